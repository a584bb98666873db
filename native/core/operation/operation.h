// One collective (or one message) in flight on this rank. It agrees, runs the compiled moves and drains its streams.
//
// An Operation never blocks: `drive` does the work that is possible now. The operation first agrees on the descriptor
// with all its ranks. No input is overwritten before all ranks are known to have posted the same operation. If the
// descriptors differ, the operation ends as a mismatch with all inputs intact.
//
// RankState::mutex guards an operation. Every caller holds it: the driving thread, and callers that post, abort or
// query the operation. An operation that has ended does not change; a thread that has seen its end may read it without
// the mutex.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "agreement.h"
#include "eager_execution.h"
#include "memory/fault.h"
#include "move_execution.h"
#include "operation_record.h"
#include "quieting.h"
#include "slice_execution.h"
#include "slot_execution.h"

namespace multiring {

class Operation {
 public:
  // completing: this rank is done, but peers still work on its buffer. quieting: the operation has failed, but peers
  // may still write into the user's memory.
  enum class State : uint8_t {
    in_slots, eager, agreeing, explaining, running, slicing, completing, draining, quieting, done, failed
  };

  Operation(OperationSpec spec, OperationHost& host);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Starts the operation in the group's slots, without an agreement. `is_published`: this rank has already published
  // its contribution.
  void begin_in_slots(bool is_published);
  bool drive();  // does the work that is possible now; true if anything moved
  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);  // takes a round frame from `peer`
  // Fails the operation. It ends at once, unless peers may still write into its memory. Then it is quieting until those
  // peers report that they have stopped, or until some seconds have passed.
  void fail(FaultKind kind, const std::string& text);
  bool has_failed() const { return state_ == State::quieting || state_ == State::failed; }
  bool is_written_by_peers() const;  // true if peers may write into its buffer, so that `fail` may have to wait
  void on_failure(int peer);  // the operation has failed on `peer`, which no longer reads or writes memory for it
  void on_quiet(int peer) { quieting_.on_quiet(peer); }
  void end_quieting();  // stops waiting for peers

  bool ended() const { return state_ == State::done || state_ == State::failed; }
  State state() const { return state_; }
  const OperationSpec& spec() const { return record_.spec; }
  std::vector<int> waiting_for() const;  // ranks whose frames or bytes the operation needs to continue
  bool involves(int rank) const;

  FaultKind fault() const { return fault_; }
  const std::string& fault_text() const { return fault_text_; }
  const std::map<int, std::string>& descriptions() const { return agreement_.descriptions(); }  // after a mismatch
  const std::vector<LogEntry>& log() const { return record_.log; }
  const std::vector<ReductionTimes::Stretch>& reductions() const { return record_.reductions.stretches(); }
  Clock::time_point agreed() const { return record_.agreed; }  // when every rank had arrived, as far as this rank knows

  Clock::time_point posted = Clock::now();
  Clock::time_point moved = posted;  // when anything last moved
  Clock::time_point finished{};
  int culprit = -1;  // the rank that the awaited ranks wait for, by their own answers; -1 if unknown

 private:
  bool meet();
  bool run_eager();
  bool agree();
  bool explain();
  bool run();
  bool slice();
  bool pass_barrier();
  bool drain();
  bool quiet();
  void release_memory();
  void finish(State state);

  OperationRecord record_;
  State state_ = State::agreeing;
  FaultKind fault_ = FaultKind::none;
  std::string fault_text_;
  Agreement agreement_{record_};
  SlotExecution slots_{record_};
  EagerExecution eager_{record_, agreement_};
  SliceExecution slices_{record_, agreement_};
  MoveExecution moves_{record_};
  Quieting quieting_{record_};
};

}  // namespace multiring
