// Ends a rank's participation in the job.
//
// Each function locks RankState::mutex itself. Any thread may call.
#pragma once

#include "failure_detector.h"
#include "links/control_messages.h"
#include "links/mpi_proxy.h"
#include "operation_failures.h"
#include "operation_table.h"
#include "peers.h"
#include "rank_state.h"

namespace multiring {

class Shutdown {
 public:
  Shutdown(RankState& state, Peers& peers, FailureDetector& detector, OperationTable& table,
           OperationFailures& failures, ControlMessages& control, const MpiProxy& proxy)
      : state_(state), peers_(peers), detector_(detector), table_(table), failures_(failures), control_(control),
        proxy_(proxy) {}

  // Waits until no operation is in flight and every frame has been sent. Returns false after `timeout_s` seconds.
  bool settled(double timeout_s);
  // The part of Context::close that ends with the order to the progress thread to stop. Returns false if the rank has
  // already stopped.
  bool stop(double grace_s, bool announce);

 private:
  bool is_settled() const;
  void settle_until(RankState::Lock& lock, Clock::time_point deadline);
  void fail_rest();
  void hang_up(RankState::Lock& lock, Clock::time_point last_call);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  OperationTable& table_;
  OperationFailures& failures_;
  ControlMessages& control_;
  const MpiProxy& proxy_;
};

}  // namespace multiring
