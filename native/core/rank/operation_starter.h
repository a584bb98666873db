// Starts operations: `post` adds an operation to those in flight, and `meet` tries to finish one within the call.
//
// Each function locks RankState::mutex itself. Any thread except the progress thread may call.
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

// The sequence numbers of a group's blocking calls.
struct CallSequence {
  uint64_t group;
  std::atomic<uint64_t>& last;
  uint64_t steps;  // number of sequence numbers that one operation takes
};

class OperationStarter {
 public:
  OperationStarter(RankState& state, OperationHost& host, Sleepers& sleepers, Peers& peers, OperationTable& table,
                   OperationFailures& failures, OperationDriver& driver, FrameRouter& router)
      : state_(state), host_(host), sleepers_(sleepers), peers_(peers), table_(table), failures_(failures),
        driver_(driver), router_(router) {}

  // Starts an operation. `caller_waits`: this thread calls `wait` next, so no other thread needs to be woken.
  std::shared_ptr<Operation> post(OperationSpec spec, bool caller_waits);

  // See Context::meet.
  struct MeetResult {
    bool is_done = false;
    std::shared_ptr<Operation> operation;
  };
  MeetResult meet(const OperationSpec& model, const CallSequence& sequence, std::byte* data);

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
