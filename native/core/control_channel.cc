// Control messages of a Context: sent over whatever link there is, taken by one thread that sleeps here.

#include <algorithm>
#include <utility>

#include "context.h"

namespace multiring {

void Context::link_with(const std::vector<int>& ranks) {
  const Lock lock(mutex_);
  if (closing_) return;
  for (const int rank : ranks) {
    if (rank != config_.rank && !losses_.contains(rank)) link(rank);
  }
}

bool Context::notify(int rank, uint64_t group, uint64_t tag, std::span<const std::byte> payload) {
  if (origin_.is_inherited()) throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may communicate");
  if (rank < 0 || rank >= config_.size || rank == config_.rank) {
    throw Fault(FaultKind::argument, "a control message to rank " + std::to_string(rank) + ": want another of " + std::to_string(config_.size));
  }
  if (payload.size() > kNoteBytes) {
    throw Fault(FaultKind::argument, "a control message of " + std::to_string(payload.size()) + " bytes: want at most " + std::to_string(kNoteBytes));
  }
  const Lock lock(mutex_);
  if (stopped_) throw Fault(FaultKind::state, "multiring was shut down");
  if (!broken_.empty()) throw Fault(FaultKind::state, broken_);
  if (losses_.contains(rank)) return false;
  // Only the lower of two ranks can make a connection.
  if (!links_[static_cast<size_t>(rank)] && rank < config_.rank) return false;
  if (!control_.may_send(rank, payload.size())) {
    const auto waiting = control_.waiting_for(rank);
    throw Fault(FaultKind::state, "rank " + std::to_string(rank) + " has not taken " + std::to_string(waiting.count) +
                                      " control messages of " + std::to_string(waiting.bytes) + " bytes; no more are sent to it");
  }
  control_.note_sent(rank, payload.size());
  const Frame frame{.group = group, .sequence = tag, .kind = FrameKind::control};
  Link& known = link(rank);
  if (payload.empty()) {
    known.send(frame);
  } else {
    known.send_note(frame, payload);
  }
  if (congested()) wake_driver();
  return true;
}

void Context::on_control(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (frame.kind == FrameKind::control_taken) {
    control_.note_taken(peer, {frame.offset, frame.length});
  } else if (control_.receive(peer, frame, payload)) {
    control_came_.notify_one();
  } else {
    note_loss(peer, LossKind::died, "it sent more control messages than may wait");
  }
}

void Context::tell_here(ControlMessage own) {
  control_.tell(std::move(own));
  control_came_.notify_one();
}

std::optional<std::vector<ControlMessage>> Context::take_control_messages(double timeout_s) {
  Lock lock(mutex_);
  control_came_.wait_until(lock, Clock::now() + as_duration(timeout_s), [this] { return stopped_ || is_woken_ || !control_.empty(); });
  is_woken_ = false;
  if (control_.has_lost()) throw Fault(FaultKind::state, "more control messages came than were taken; some are lost");
  if (stopped_) return std::nullopt;
  auto taken = control_.take();
  for (const auto& [peer, amount] : taken.by_peer) {
    if (losses_.contains(peer)) continue;
    links_[static_cast<size_t>(peer)]->send({.kind = FrameKind::control_taken, .offset = amount.count, .length = amount.bytes});
  }
  if (congested()) wake_driver();
  return std::move(taken.messages);
}

void Context::wake_control() {
  const Lock lock(mutex_);
  is_woken_ = true;
  control_came_.notify_one();
}

// Has the thread that drives go on sending what found no room.
void Context::wake_driver() {
  if (caller_drives_) {
    wake_self();
  } else {
    poller_.wake();
  }
}

}  // namespace multiring
