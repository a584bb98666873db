// What operations in flight fail for, and how their members come to know of it.
//
// Guarded by RankState::mutex, which every caller holds: whichever thread drives, and callers that give up or abort.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "failure_detector.h"
#include "operation_table.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

class OperationFailures {
 public:
  OperationFailures(RankState& state, Peers& peers, FailureDetector& detector, OperationTable& table,
                    ControlMessages& control)
      : state_(state), peers_(peers), detector_(detector), table_(table), control_(control) {}

  void prepare(const Operation& operation);  // that was just posted: what is known already counts for it
  void on_fail(int peer, const Frame& frame);
  void note_stuck(const OperationKey& key, const std::string& why) { stuck_.try_emplace(key, why); }
  bool fail_stuck();  // what a link cannot hand on fails the operation it belongs to, and no other

  bool has_unsettled() const { return unsettled_ || detector_.has_new(); }
  // Fails what cannot be finished without the ranks that are gone, the first `count` of those newly found among them.
  bool settle_losses(size_t count);
  bool settle(const std::shared_ptr<Operation>& operation);

  void stall(const std::shared_ptr<Operation>& operation, const FailureCause& cause);
  void fail_alone(Operation& operation, const std::string& why);  // this rank cannot go on with it, so nobody can
  void break_down(const std::string& why);  // nor with anything else

  // Groups whose members are not known to have taken part in the same any more.
  bool ends_groups() const { return !stalled_groups_.empty(); }
  bool has_stalled(uint64_t group) const { return stalled_groups_.contains(group); }
  bool is_stalling(uint64_t group) const { return stalls_.contains(group); }
  void refuse_stalled(uint64_t group) const;

 private:
  struct Stall {
    uint64_t sequence;
    FailureCause cause;
  };
  void fail_later(const OperationKey& key, const FailureCause& cause);
  void settle_cause(const std::shared_ptr<Operation>& operation, const FailureCause& cause);
  int lost_cause_of(const Operation& operation) const;
  void take_losses(size_t count);
  void fail_for(Operation& operation, int lost, const Loss& loss);
  void tell_members(const Operation& operation, const FailureCause& cause);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  OperationTable& table_;
  ControlMessages& control_;
  bool unsettled_ = false;                          // a loss is known that operations were not checked for
  std::map<OperationKey, std::string> stuck_;       // what this rank cannot go on with, and why
  std::map<uint64_t, Stall> stalls_;                // by group: the first operation that a member has stalled in
  std::map<uint64_t, std::string> stalled_groups_;  // and why
};

}  // namespace multiring
