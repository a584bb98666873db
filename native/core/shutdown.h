// How a rank's part in the job ends.
//
// Takes RankState::mutex itself; any caller's.
#pragma once

#include "control_messages.h"
#include "failure_detector.h"
#include "mpi_proxy.h"
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

  // True once nothing is in flight and every frame has been handed on; false after `timeout_s`.
  bool settled(double timeout_s);
  // As Context::close, up to where the progress thread has been told to stop. False: it was before.
  bool stop(double grace_s, bool announce);

 private:
  bool is_settled() const;
  void settle_until(RankState::Lock& lock, Clock::time_point deadline);
  void fail_rest();
  void hang_up(RankState::Lock& lock, Clock::time_point deadline);

  RankState& state_;
  Peers& peers_;
  FailureDetector& detector_;
  OperationTable& table_;
  OperationFailures& failures_;
  ControlMessages& control_;
  const MpiProxy& proxy_;
};

}  // namespace multiring
