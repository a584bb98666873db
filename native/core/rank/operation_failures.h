// Fails operations in flight, and informs their members of the cause.
//
// RankState::mutex guards the state. Every caller holds it: the driving thread, and callers that give up or abort.
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

  void prepare(const Operation& operation);  // applies causes that are already known to a newly posted operation
  void on_fail(int peer, const Frame& frame);  // handles a `fail` frame from `peer`
  // Records that a link cannot send the operation's bytes. `fail_stuck` fails the operation later.
  void note_stuck(const OperationKey& key, const std::string& why) { stuck_.try_emplace(key, why); }
  bool fail_stuck();  // fails the operations whose bytes a link cannot send; true if there were any

  bool has_unsettled() const { return unsettled_ || detector_.has_new(); }
  // Fails the operations that cannot be finished without lost ranks, including the first `count` new losses.
  bool settle_losses(size_t count);
  bool settle(const std::shared_ptr<Operation>& operation);  // fails an operation to which a known cause applies

  // Fails an operation on all its ranks because of a silent or aborting rank, and makes its group unusable.
  void stall(const std::shared_ptr<Operation>& operation, const FailureCause& cause);
  void fail_alone(Operation& operation, const std::string& why);  // fails an operation that this rank cannot continue
  void break_down(const std::string& why);  // fails all operations, because this rank cannot communicate any more

  // Stalled groups: their members may have taken part in different operations, so they accept no new operations.
  bool ends_groups() const { return !stalled_groups_.empty(); }
  bool has_stalled(uint64_t group) const { return stalled_groups_.contains(group); }
  bool is_stalling(uint64_t group) const { return stalls_.contains(group); }
  void refuse_stalled(uint64_t group) const;  // throws Fault::stall if the group is unusable

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
  bool unsettled_ = false;                     // operations must be checked for a new loss or cause
  std::map<OperationKey, std::string> stuck_;  // operations that cannot continue -> reason
  std::map<uint64_t, Stall> stalls_;           // group -> the first operation in which a member stalled
  std::map<uint64_t, std::string> stalled_groups_;  // group -> reason
};

}  // namespace multiring
