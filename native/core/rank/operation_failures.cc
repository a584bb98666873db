#include "operation_failures.h"

#include <algorithm>
#include <cstring>

namespace multiring {
namespace {

// Returns whether this kind of failure makes the group unusable, because its members no longer agree on its operations.
bool ends_group(LossKind kind) { return kind == LossKind::silent || kind == LossKind::aborted; }

const char* verb(LossKind kind) {
  if (kind == LossKind::cut_off) return "cannot be reached";
  return kind == LossKind::left ? "left the job" : "died";
}

FailureCause cause_in(const Frame& frame) {
  FailureCause cause{static_cast<int>(frame.offset), static_cast<LossKind>(frame.slot), 0};
  std::memcpy(&cause.quiet_s, frame.note.data(), sizeof cause.quiet_s);
  return cause;
}

}  // namespace

void OperationFailures::prepare(const Operation& operation) {
  const OperationKey key = operation.spec().key;
  const auto stall = stalls_.find(key.group);
  if (stall != stalls_.end() && key.sequence > stall->second.sequence) {
    table_.note_cause(key, stall->second.cause);
    unsettled_ = true;
  }
  if (!peers_.losses().empty()) unsettled_ = true;
}

void OperationFailures::on_fail(int peer, const Frame& frame) {
  const FailureCause cause = cause_in(frame);
  if (ends_group(cause.kind)) fail_later(frame.key(), cause);
  Operation* operation = table_.find(frame.key());
  // Called once per frame. If the operation is posted later, it receives the kept frame when it begins.
  if (operation != nullptr) operation->on_failure(peer);
  if (frame.round != 0) {
    peers_.link(peer)->send({.group = frame.group, .sequence = frame.sequence, .kind = FrameKind::quiet});
  }
  if (operation == nullptr) {
    if (table_.has_ended(frame.key()) || has_stalled(frame.group)) return;  // this rank will not post it
    Frame kept = frame;
    kept.round = 0;
    table_.keep_unexpected({peer, kept, {}});
    return;
  }
  // Ranks that vote know only who they lose themselves, and tell a rank that they have lost by a `lost` frame.
  const bool excludes = cause.rank == state_.config.rank && cause.kind == LossKind::cut_off;
  if (excludes && !state_.config.own_losses_only) {
    detector_.on_exclusion(peer);
    return;
  }
  table_.note_cause(frame.key(), cause);
  if (is_loss_of_rank(cause.kind) && !excludes) detector_.on_cause(peer, cause);
  unsettled_ = true;
}

// A rank that stalled in an operation takes part in no later operation of the group. Ranks that had already ended the
// operation must name the rank that it waited for. Otherwise they would name the stalled rank, because it leaves.
void OperationFailures::fail_later(const OperationKey& key, const FailureCause& cause) {
  stalls_.try_emplace(key.group, Stall{key.sequence, cause});
  const auto& running = table_.running();
  for (auto at = running.upper_bound(key); at != running.end() && at->first.group == key.group; ++at) {
    table_.note_cause(at->first, cause);
    unsettled_ = true;
  }
}

bool OperationFailures::fail_stuck() {
  if (stuck_.empty()) return false;
  bool any = false;
  for (const auto& [key, why] : std::exchange(stuck_, {})) {
    const auto found = table_.running().find(key);
    if (found == table_.running().end() || found->second->has_failed()) continue;
    const auto operation = found->second;
    fail_alone(*operation, why);
    table_.end_if_over(operation);
    any = true;
  }
  return any;
}

bool OperationFailures::settle_losses(size_t count) {
  unsettled_ = false;
  bool any = false;
  const auto failing = table_.running();  // a copy, because failing an operation changes the table
  // Pass on a member's failure cause before the news that the member has left: some ranks have no connection with it.
  for (const auto& [key, operation] : failing) {
    if (table_.cause_of(key) != nullptr) any |= settle(operation);
  }
  take_losses(count);
  const auto running = table_.running();
  for (const auto& [key, operation] : running) any |= settle(operation);
  return any;
}

void OperationFailures::take_losses(size_t count) {
  for (const auto& [lost, loss, found, is_passed_on] : detector_.take(count)) {
    if (!peers_.lose(lost, loss)) continue;
    control_.tell({ControlMessageKind::loss, lost, 0, static_cast<uint64_t>(loss.kind), loss.why, {}});
    if (state_.closing || !is_passed_on) continue;
    const Frame news{.kind = FrameKind::lost, .slot = static_cast<uint32_t>(loss.kind),
                     .offset = static_cast<uint64_t>(lost)};
    peers_.tell_everyone(news);
    Link* its_own = loss.kind == LossKind::cut_off ? peers_.link(lost) : nullptr;
    if (its_own != nullptr) its_own->send(news);  // the wire may still work in this direction
  }
}

// The death of a rank fails every operation with that rank. A rank that left had finished its own part, so its
// departure fails only operations that still wait for it. The reported cause is another member's cause if there is one,
// else the first detected death, else a departure. Departures come last, because ranks that fail due to a death leave,
// too.
bool OperationFailures::settle(const std::shared_ptr<Operation>& operation) {
  if (operation->has_failed()) return false;
  if (const FailureCause* told = table_.cause_of(operation->spec().key)) {
    settle_cause(operation, FailureCause(*told));
    return true;
  }
  const int lost = lost_cause_of(*operation);
  if (lost < 0) return false;
  fail_for(*operation, lost, peers_.losses().at(lost));
  table_.end_if_over(operation);
  return true;
}

void OperationFailures::settle_cause(const std::shared_ptr<Operation>& operation, const FailureCause& cause) {
  if (ends_group(cause.kind)) {
    stall(operation, cause);
    return;
  }
  if (cause.kind == LossKind::unable) {
    tell_members(*operation, cause);
    operation->fail(FaultKind::state,
                    "rank " + std::to_string(cause.rank) + " could not continue it; see the error on that rank");
  } else {
    const auto known = peers_.losses().find(cause.rank);
    fail_for(*operation, cause.rank,
             known != peers_.losses().end() ? known->second : Loss{cause.kind, "as another rank reported"});
  }
  table_.end_if_over(operation);
}

int OperationFailures::lost_cause_of(const Operation& operation) const {
  const auto waits = operation.waiting_for();
  int cause = -1;
  for (const int lost : peers_.lost_in_order()) {
    if (!operation.involves(lost)) continue;
    if (is_death(peers_.losses().at(lost).kind)) return lost;
    const bool waits_for_it = std::find(waits.begin(), waits.end(), lost) != waits.end();
    if (waits_for_it && cause < 0) cause = lost;
  }
  return cause;
}

void OperationFailures::tell_members(const Operation& operation, const FailureCause& cause) {
  const OperationKey key = operation.spec().key;
  for (const int peer : operation.spec().members) {
    Link* known = peer == state_.config.rank ? nullptr : peers_.link(peer);
    if (known == nullptr || peers_.is_lost(peer)) continue;
    Frame frame{.group = key.group, .sequence = key.sequence, .kind = FrameKind::fail,
                .slot = static_cast<uint32_t>(cause.kind), .offset = static_cast<uint64_t>(cause.rank)};
    std::memcpy(frame.note.data(), &cause.quiet_s, sizeof cause.quiet_s);
    frame.round = operation.is_written_by_peers() && peers_.is_local(peer) ? 1 : 0;
    known->send(frame);
  }
}

void OperationFailures::fail_for(Operation& operation, int lost, const Loss& loss) {
  tell_members(operation, {lost, loss.kind, 0});
  operation.fail(FaultKind::peer_lost, "rank " + std::to_string(lost) + " " + verb(loss.kind) + " (" + loss.why + ")");
}

// Fails an operation on all its ranks, and makes its group unusable.
void OperationFailures::stall(const std::shared_ptr<Operation>& operation, const FailureCause& cause) {
  tell_members(*operation, cause);
  const std::string who = cause.rank == state_.config.rank ? "this rank" : "rank " + std::to_string(cause.rank);
  const bool is_silent = cause.kind == LossKind::silent;
  const std::string text = is_silent ? "nothing came from " + who + " for " + std::to_string(cause.quiet_s) + " s"
                                     : who + " aborted the group";
  operation->culprit = cause.rank;
  const uint64_t group = operation->spec().key.group;
  stalled_groups_.try_emplace(group, text);
  table_.drop_unexpected(group);  // the group accepts no more operations
  operation->fail(is_silent ? FaultKind::stall : FaultKind::state, text);
  table_.end_if_over(operation);
}

void OperationFailures::fail_alone(Operation& operation, const std::string& why) {
  tell_members(operation, {state_.config.rank, LossKind::unable, 0});
  operation.fail(FaultKind::state, why);
}

void OperationFailures::break_down(const std::string& why) {
  if (!state_.broken.empty()) return;
  state_.broken = "this rank cannot communicate any more: " + why;
  peers_.tell_everyone({.kind = FrameKind::lost, .slot = static_cast<uint32_t>(LossKind::died),
                        .offset = static_cast<uint64_t>(state_.config.rank)});
  const auto running = table_.running();
  for (const auto& [key, operation] : running) {
    fail_alone(*operation, state_.broken);
    table_.end_if_over(operation);
  }
  state_.changed.notify_all();
}

void OperationFailures::refuse_stalled(uint64_t group) const {
  const auto found = stalled_groups_.find(group);
  if (found == stalled_groups_.end()) return;
  throw Fault(FaultKind::stall, "the group is unusable: in an earlier operation " + found->second);
}

}  // namespace multiring
