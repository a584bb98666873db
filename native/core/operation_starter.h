// How an operation begins: posted, to be driven by whoever drives, or met on the spot where all ranks are there at
// once.
//
// Takes RankState::mutex itself; called by any thread but the progress thread.
#pragma once

#include <atomic>
#include <memory>

#include "frame_router.h"
#include "operation_driver.h"
#include "operation_failures.h"
#include "operation_table.h"
#include "peers.h"
#include "rank_state.h"
#include "sleepers.h"

namespace multiring {

// A group's blocking calls, one after the other: each takes the next number.
struct CallSequence {
  uint64_t group;
  std::atomic<uint64_t>& last;
  uint64_t steps;  // numbers an operation takes
};

class OperationStarter {
 public:
  OperationStarter(RankState& state, OperationHost& host, Sleepers& sleepers, Peers& peers, OperationTable& table,
                   OperationFailures& failures, OperationDriver& driver, FrameRouter& router)
      : state_(state), host_(host), sleepers_(sleepers), peers_(peers), table_(table), failures_(failures),
        driver_(driver), router_(router) {}

  // `caller_waits`: `wait` follows at once on this thread, so nobody else need be woken.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits);

  struct Attempt {
    bool is_done = false;
    std::shared_ptr<Operation> operation;
  };
  Attempt meet(const OperationSpec& model, const CallSequence& sequence, std::byte* data);

 private:
  bool may_meet(const OperationSpec& spec, const OperationKey& key) const;

  RankState& state_;
  OperationHost& host_;
  Sleepers& sleepers_;
  Peers& peers_;
  OperationTable& table_;
  OperationFailures& failures_;
  OperationDriver& driver_;
  FrameRouter& router_;
};

}  // namespace multiring
