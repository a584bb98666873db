#include "operation_driver.h"

#include <algorithm>

namespace multiring {

bool OperationDriver::drive() {
  bool any = false;
  guarded([&] { any = drive_all(); });
  return any;
}

bool OperationDriver::drive_all() {
  bool any = peers_.receive_local();
  any |= drive_each();
  any |= peers_.pump();
  any |= failures_.fail_stuck();
  if (!failures_.has_unsettled()) return any;
  const size_t heard_out = detector_.heard_out(any);
  if (heard_out == 0 && detector_.has_new()) return any;
  return failures_.settle_losses(heard_out) || any;
}

bool OperationDriver::drive_each() {
  bool any = false;
  const Operation* in_slots = nullptr;
  const auto& running = table_.running();
  for (auto at = running.begin(); at != running.end();) {
    const auto operation = at->second;
    const OperationKey key = at->first;
    ++at;  // the operation may end and leave the table
    if (operation->state() == Operation::State::in_slots && table_.cause_of(key) != nullptr) {
      any |= failures_.settle(operation);  // a failed operation must not finish in the slots
      continue;
    }
    // A group's later operation tells the other ranks that this rank no longer uses the slots.
    if (in_slots != nullptr && in_slots->spec().key.group == key.group) continue;
    any |= drive_one(operation);
    if (operation->state() == Operation::State::in_slots) in_slots = operation.get();
  }
  return any;
}

bool OperationDriver::drive_one(const std::shared_ptr<Operation>& operation) {
  bool any = true;
  try {
    any = operation->drive();
  } catch (const std::exception& error) {  // for example no scratch memory, or an unreachable address
    failures_.fail_alone(*operation, error.what());
  }
  table_.end_if_over(operation);
  return any;
}

bool OperationDriver::drive_here(const std::shared_ptr<Operation>& operation) {
  if (table_.running().size() > 1 || failures_.has_unsettled() || peers_.congested()) return false;
  guarded([&] {
    peers_.receive_local();
    drive_one(operation);
    peers_.pump_local();
    failures_.fail_stuck();
  });
  return true;
}

void OperationDriver::tick() {
  guarded([this] { look_after_all(); });
}

void OperationDriver::look_after_all() {
  const auto now = Clock::now();
  const auto quarter_ms = static_cast<int64_t>(state_.config.stall_warn_s * 250);
  next_tick_ = now + std::chrono::milliseconds(std::clamp<int64_t>(quarter_ms, 10, 1000));
  connector_.listeners().expire_pending();
  detector_.believe_gossip(now);
  const auto running = table_.running();
  for (const auto& [key, operation] : running) look_after(operation);
}

void OperationDriver::look_after(const std::shared_ptr<Operation>& operation) {
  if (operation->has_failed()) {
    drive_one(operation);
    return;
  }
  const ContextConfig& config = state_.config;
  const double quiet_s = seconds_since(operation->moved);
  if (quiet_s < config.stall_warn_s / 2 && quiet_s < config.stall_timeout_s / 4) return;
  const auto waits = operation->waiting_for();
  if (quiet_s >= config.stall_timeout_s) {
    const int silent = operation->culprit >= 0 || waits.empty() ? operation->culprit : waits.front();
    failures_.stall(operation, {silent, LossKind::silent, static_cast<int64_t>(quiet_s)});
    return;
  }
  const OperationKey key = operation->spec().key;
  for (const int rank : waits) {
    Link* known = peers_.link(rank);
    if (known != nullptr) known->send({.group = key.group, .sequence = key.sequence, .kind = FrameKind::where});
  }
}

}  // namespace multiring
