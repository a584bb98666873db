#include "operation_starter.h"

#include <algorithm>
#include <utility>

#include "operation/slot_execution.h"
#include "progress_loop.h"

namespace multiring {
namespace {

constexpr auto kMeetingSpin = std::chrono::microseconds(20);  // short, because the caller holds its locks meanwhile

}  // namespace

std::shared_ptr<Operation> OperationStarter::post(OperationSpec spec, bool caller_waits) {
  state_.refuse_inherited();
  const RankState::Lock lock(state_.mutex);
  if (state_.closing) throw Fault(FaultKind::state, "multiring was shut down");
  if (!state_.broken.empty()) throw Fault(FaultKind::state, state_.broken);
  const OperationKey key = spec.key;
  failures_.refuse_stalled(key.group);
  if (table_.find(key) != nullptr) throw Fault(FaultKind::state, "an operation with this key is in flight");
  const bool meets = may_meet(spec, key);
  auto operation = std::make_shared<Operation>(std::move(spec), host_);
  if (meets) {
    operation->begin_in_slots(false);
    peers_.wake_waiting(*operation->spec().slots);
  }
  router_.begin(operation);
  if (sleepers_.caller_drives) {
    sleepers_.wake_callers();
  } else if (!caller_waits) {
    const bool is_quick = table_.is_quick(*operation);
    if (is_quick) sleepers_.last_quick = Clock::now();
    // If the progress thread sleeps only for a millisecond, it continues the operation soon enough without a wake-up.
    if (!is_quick || !sleepers_.naps || !driver_.drive_here(operation)) state_.poller.wake();
  }
  return operation;
}

bool OperationStarter::may_meet(const OperationSpec& spec, const OperationKey& key) const {
  if (!spec.meets || !state_.config.lower || !spec.slots || !spec.slots->may_publish(key.sequence)) return false;
  // A member does not use the slots, or has already failed.
  if (table_.has_unexpected(key) || table_.cause_of(key) != nullptr || failures_.is_stalling(key.group)) return false;
  return table_.oldest_of(key.group) == nullptr;
}

OperationStarter::MeetResult OperationStarter::meet(const OperationSpec& model, const CallSequence& sequence,
                                                 std::byte* data) {
  state_.refuse_inherited();
  const RankState::Lock lock(state_.mutex, std::try_to_lock);
  if (!lock || state_.closing || !state_.broken.empty() || !peers_.losses().empty() ||
      failures_.has_stalled(sequence.group)) {
    return {};
  }
  if (sleepers_.has_news()) peers_.receive_local();
  uint64_t before = sequence.last.load();
  const OperationKey key{sequence.group, before + sequence.steps};
  if (state_.config.log_moves || failures_.has_unsettled() || !may_meet(model, key)) return {};
  if (!sequence.last.compare_exchange_strong(before, key.sequence)) return {};
  const auto start = Clock::now();
  const auto until = start + std::min<Clock::duration>(kMeetingSpin, as_duration(sleepers_.spin_s));
  const size_t bytes = model.program ? model.user_bytes : 0;
  model.slots->publish(key.sequence, model.digest, data, bytes);
  peers_.wake_waiting(*model.slots);
  for (int turn = 1;; ++turn) {
    const auto seen = model.slots->look(key.sequence, model.digest);
    if (seen == SharedSlots::Seen::all) {
      if (model.program) combine_published(*model.program, *model.slots, key.sequence, data, bytes);
      sleepers_.last_caller = Clock::now();
      model.slots->note_end(key.sequence);
      table_.note_ended_at_once(model, key, nanoseconds(start), nanoseconds(sleepers_.last_caller));
      return {true, nullptr};
    }
    if (seen == SharedSlots::Seen::different) break;
    if (turn % 16 == 0 && (sleepers_.has_news() || Clock::now() > until)) break;
    cpu_relax();
  }
  OperationSpec spec = model;
  spec.key = key;
  spec.bases[1] = data;
  const auto operation = std::make_shared<Operation>(std::move(spec), host_);
  operation->posted = start;  // this rank has published; other ranks may have ended the operation since
  operation->begin_in_slots(true);
  router_.begin(operation);
  if (sleepers_.caller_drives) sleepers_.wake_callers();
  return {false, operation};
}

}  // namespace multiring
