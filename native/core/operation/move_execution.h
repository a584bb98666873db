// Runs a program move by move, in the order of its Schedule. Several segments run concurrently, each on its own lane.
//
// RankState::mutex guards the state; the driving thread calls it.
#pragma once

#include <set>
#include <vector>

#include "coded_moves.h"
#include "operation_record.h"

namespace multiring {

class MoveExecution {
 public:
  explicit MoveExecution(OperationRecord& operation) : operation_(operation), coded_(operation) {}

  void open();     // creates the lanes and allocates scratch memory
  bool advance();  // true if anything moved
  bool is_done() const { return lanes_.empty(); }  // true even if peers have not yet taken all bytes
  std::set<int> waiting_for() const;

 private:
  bool advance(Lane& lane, uint64_t& budget);
  bool step(Lane& lane, const Move& move);
  void send(Lane& lane, const Move& move);
  bool receive(Lane& lane, const Move& move);
  bool is_in_place(const Lane& lane, const Move& move) const;
  uint64_t ready_from(const Lane& lane, const Move& move, const void** sources, std::byte* target) const;
  uint64_t logged_bytes(const Lane& lane, const Move& move) const;
  const std::vector<Move>& moves_of(const Lane& lane) const;
  std::vector<int> readers_of(const Lane& lane) const;  // peers that have not taken all bytes of the lane's streams

  OperationRecord& operation_;
  CodedMoves coded_;
  std::vector<Lane> lanes_;  // oldest segment first
};

}  // namespace multiring
