// An all_reduce with small messages: each send travels with its descriptor, so no agreement has to precede it.
//
// A rank turns back to the ordinary agreement if it learns of a rank that sends no such messages or has another
// descriptor. Its agreement rounds make other ranks turn back, too. No rank can have written its buffer by then. A
// complete part contains the contributions of all ranks, and these passed only ranks with equal descriptors. So once a
// rank has written one part, no rank turns back, and the rank can write the other parts. RankState::mutex guards the
// state; the driving thread calls it.
#pragma once

#include <compare>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "agreement.h"
#include "operation_record.h"

namespace multiring {

enum class EagerOutcome : uint8_t { waits, done, turned_back };

class EagerExecution {
 public:
  EagerExecution(OperationRecord& operation, Agreement& agreement) : operation_(operation), agreement_(agreement) {}

  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);  // stores a message from `peer`
  // Runs moves until a message is missing; sets `moved` if anything moved. turned_back: the operation must continue
  // with the ordinary agreement.
  EagerOutcome advance(bool& moved);
  std::set<int> waiting_for() const;

 private:
  struct Message {
    Frame frame;
    std::vector<std::byte> payload;
  };
  // Messages between two ranks on a channel. The receiver takes them in the order of sending.
  struct Line {
    int peer;
    uint16_t channel;
    auto operator<=>(const Line&) const = default;
  };
  void send(const Move& move);
  bool take(const Move& move);

  OperationRecord& operation_;
  Agreement& agreement_;
  bool is_open_ = false;
  Lane lane_{.slot = 0, .segment = 0};
  std::map<std::pair<Line, uint8_t>, Message> came_;  // received messages, by their index on their line
  std::map<Line, uint8_t> sent_;
  std::map<Line, uint8_t> taken_;
};

}  // namespace multiring
