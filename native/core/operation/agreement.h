// How the ranks of an operation verify that they have posted the same operation.
//
// Each rank sends the digest of its descriptor to other ranks, in the rounds that the group's grid defines. No input is
// overwritten before all digests are known to be equal. If they differ, a second exchange collects every rank's
// description. RankState::mutex guards the state; the driving thread calls it.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "operation_record.h"

namespace multiring {

class Agreement {
 public:
  explicit Agreement(OperationRecord& operation) : operation_(operation) {
    descriptions_[operation.rank()] = operation.spec.description;
  }

  void on_round(const Frame& frame) { notes_.insert_or_assign(frame.round, frame); }
  bool has_heard() const { return !notes_.empty(); }
  bool has_heard(uint8_t round) const { return notes_.contains(round); }
  uint64_t offset_in(size_t round) const { return notes_.at(static_cast<uint8_t>(round)).offset; }
  void learn_slots();  // finds the slots of all members; call it after the agreement, whose notes hold their offsets

  // Continues the agreement; true if anything moved. `shared`: the address at which peers may access this rank's
  // buffer.
  bool agree(const std::byte* shared);
  bool is_over() const { return round_ == rounds().size(); }  // true if the current exchange has run all its rounds
  bool has_begun() const { return round_ > 0 || round_sent_; }
  void end();  // resets the round counter for the next exchange
  bool is_told_all_at_once() const { return has_begun() && operation_.spec.at_once; }
  bool explain();  // continues the second exchange, after a mismatch; true if anything moved
  void note_conflict(bool is_one) { conflict_ |= is_one; }
  bool has_conflict() const { return conflict_; }
  const std::map<int, std::string>& descriptions() const { return descriptions_; }

  Frame note_of(size_t round, const std::byte* shared) const;  // returns the note of a round; `shared` as in `agree`
  int awaited() const { return rounds()[round_].from; }  // the rank of the current round; call it before `is_over`

 private:
  const std::vector<Round>& rounds() const { return *operation_.spec.rounds; }

  OperationRecord& operation_;
  size_t round_ = 0;
  bool round_sent_ = false;
  bool conflict_ = false;
  std::map<uint8_t, Frame> notes_;  // received notes by round, including early arrivals
  std::map<int, std::string> descriptions_;
  std::vector<std::string> told_;  // the bytes sent in each `explain` round; links read them until the peer took them
  std::string heard_;
};

}  // namespace multiring
