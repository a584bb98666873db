// One collective (or one message) in flight on this rank: agree, run the compiled moves, drain.
//
// An Operation never blocks: `drive` does what can be done now. It first agrees on the descriptor with every rank of
// the operation, so that no input is overwritten before all ranks are known to mean the same thing. Where they do not,
// it ends as a mismatch, inputs intact.
//
// Guarded by the mutex of its rank (RankState::mutex), which every caller holds: callers that post, give up or ask, and
// whichever thread drives. Once it has ended nobody changes it, and who has seen that may read it without.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "agreement.h"
#include "eager_execution.h"
#include "fault.h"
#include "move_execution.h"
#include "operation_record.h"
#include "quieting.h"
#include "slice_execution.h"
#include "slot_execution.h"

namespace multiring {

class Operation {
 public:
  // completing: done, but for others that work on its buffer. quieting: it has failed, but peers may still write into
  // its user's memory.
  enum class State : uint8_t {
    in_slots, eager, agreeing, explaining, running, slicing, completing, draining, quieting, done, failed
  };

  Operation(OperationSpec spec, OperationHost& host);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Instead of agreeing first: meets the others in the slots. `is_published`: this rank's is written already.
  void begin_in_slots(bool is_published);
  bool drive();  // true if anything moved
  void on_round(int peer, const Frame& frame, std::span<const std::byte> payload);
  // Over at once, or quieting until every peer that may write into its memory has said that it does not any more, or
  // some seconds have passed.
  void fail(FaultKind kind, const std::string& text);
  bool has_failed() const { return state_ == State::quieting || state_ == State::failed; }
  bool is_written_by_peers() const;  // whether `fail` would have to wait
  void on_failure(int peer);         // it has failed over there: nothing is read or written there any more
  void on_quiet(int peer) { quieting_.on_quiet(peer); }
  void end_quieting();  // the peers are not waited for any more

  bool ended() const { return state_ == State::done || state_ == State::failed; }
  State state() const { return state_; }
  const OperationSpec& spec() const { return record_.spec; }
  std::vector<int> waiting_for() const;  // ranks whose frame or bytes would let it go on
  bool involves(int rank) const;

  FaultKind fault() const { return fault_; }
  const std::string& fault_text() const { return fault_text_; }
  const std::map<int, std::string>& descriptions() const { return agreement_.descriptions(); }  // after a mismatch
  const std::vector<LogEntry>& log() const { return record_.log; }
  const std::vector<ReductionTimes::Stretch>& reductions() const { return record_.reductions.stretches(); }
  Clock::time_point agreed() const { return record_.agreed; }  // when every rank had come to it

  Clock::time_point posted = Clock::now();
  Clock::time_point moved = posted;  // last time anything moved
  Clock::time_point finished{};
  int culprit = -1;  // whom the ranks we wait for say they wait for

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
