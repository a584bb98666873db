// Advances the operations in flight, and checks those that do not move.
//
// Every caller holds RankState::mutex: the progress thread, callers that wait or post, and the thread that calls MPI.
#pragma once

#include <exception>
#include <memory>

#include "failure_detector.h"
#include "memory/clock.h"
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

  bool drive();  // advances all operations; true if anything moved
  // Advances a newly posted operation that no caller waits for. It runs on the posting thread, which costs less than
  // waking another thread. Returns false if the caller must wake the progress thread.
  bool drive_here(const std::shared_ptr<Operation>& operation);
  bool is_tick_due(Clock::time_point now) const { return now >= next_tick_; }
  bool waits_for_time() const { return !table_.empty() || detector_.waits_for_time(); }  // true if there is a deadline
  void tick();  // checks for stalls; call it about once a second while operations are in flight

  // Runs `work` that belongs to no particular operation. An exception ends this rank's participation in the job, but
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
