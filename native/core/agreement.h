// How the ranks of an operation come to know that they mean the same, or what each means.
//
// Each rank tells others its descriptor's digest, in the rounds the group's grid gives, so that no input is overwritten
// before all ranks are known to mean the same. Where they do not, a second exchange gathers every rank's description.
// Guarded by RankState::mutex; whichever thread drives calls it.
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
  void learn_slots();  // of the ranks of the group: all have been heard of, and with that where each has them

  // True if anything moved. `shared`: where others may reach this rank's buffer.
  bool agree(const std::byte* shared);
  bool is_over() const { return round_ == rounds().size(); }  // of the rounds at hand
  bool has_begun() const { return round_ > 0 || round_sent_; }
  void end();  // of the rounds; what comes next counts them anew
  bool is_told_all_at_once() const { return has_begun() && operation_.spec.at_once; }
  bool explain();
  void note_conflict(bool is_one) { conflict_ |= is_one; }
  bool has_conflict() const { return conflict_; }
  const std::map<int, std::string>& descriptions() const { return descriptions_; }

  Frame note_of(size_t round, const std::byte* shared) const;
  int awaited() const { return rounds()[round_].from; }  // before it is over

 private:
  const std::vector<Round>& rounds() const { return *operation_.spec.rounds; }

  OperationRecord& operation_;
  size_t round_ = 0;
  bool round_sent_ = false;
  bool conflict_ = false;
  std::map<uint8_t, Frame> notes_;  // rounds, also those that arrived before their turn
  std::map<int, std::string> descriptions_;
  std::vector<std::string> told_;  // what each explain round sent; links read it until it is taken
  std::string heard_;
};

}  // namespace multiring
