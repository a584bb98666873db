// Has operations in flight do what they can do now, and looks after those that do not move.
//
// Guarded by RankState::mutex, which every caller holds: the progress thread, callers that wait or post, and the thread
// that calls MPI.
#pragma once

#include <exception>
#include <memory>

#include "clock.h"
#include "failure_detector.h"
#include "operation_failures.h"
#include "operation_table.h"
#include "peer_connector.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

class OperationDriver {
 public:
  OperationDriver(RankState& state, Peers& peers, PeerConnector& connector, FailureDetector& detector,
                  OperationTable& table, OperationFailures& failures)
      : state_(state), peers_(peers), connector_(connector), detector_(detector), table_(table), failures_(failures) {}

  bool drive();  // all of them; true if anything moved
  // One that nobody waits for, on the thread that posts it, which costs less than to wake another one; false: the
  // progress thread has to be woken.
  bool drive_here(const std::shared_ptr<Operation>& operation);
  bool is_tick_due(Clock::time_point now) const { return now >= next_tick_; }
  bool waits_for_time() const { return !table_.empty() || detector_.waits_for_time(); }  // something has a deadline
  void tick();  // about once a second while operations are in flight

  // Does what belongs to no operation, on whichever thread; what goes wrong there ends this rank's part in the job, and
  // neither the process nor the thread.
  template <typename Work>
  void guarded(Work work) {
    try {
      work();
    } catch (const std::exception& error) {  // no memory to map a peer's segment, no watch left for a socket
      failures_.break_down(error.what());
    }
  }

  void break_down(const std::string& why) { failures_.break_down(why); }

 private:
  bool drive_all();
  bool drive_each();
  bool drive_one(const std::shared_ptr<Operation>& operation);
  void look_after_all();
  void look_after(const std::shared_ptr<Operation>& operation);

  RankState& state_;
  Peers& peers_;
  PeerConnector& connector_;
  FailureDetector& detector_;
  OperationTable& table_;
  OperationFailures& failures_;
  Clock::time_point next_tick_{};
};

}  // namespace multiring
