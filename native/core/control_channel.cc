// Notices of a Context: sent over whatever link there is, taken by one thread that sleeps here.

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
    throw Fault(FaultKind::argument, "a notice to rank " + std::to_string(rank) + ": want another of " + std::to_string(config_.size));
  }
  if (payload.size() > kNoteBytes) {
    throw Fault(FaultKind::argument, "a notice of " + std::to_string(payload.size()) + " bytes: want at most " + std::to_string(kNoteBytes));
  }
  const Lock lock(mutex_);
  if (stopped_) throw Fault(FaultKind::state, "multiring was shut down");
  if (!broken_.empty()) throw Fault(FaultKind::state, broken_);
  if (losses_.contains(rank)) return false;
  // Only the lower of two ranks can make a connection.
  if (!links_[static_cast<size_t>(rank)] && rank < config_.rank) return false;
  if (!notices_.may_send(rank, payload.size())) {
    const auto waiting = notices_.waiting_for(rank);
    throw Fault(FaultKind::state, "rank " + std::to_string(rank) + " has not taken " + std::to_string(waiting.count) +
                                      " notices of " + std::to_string(waiting.bytes) + " bytes; no more are sent to it");
  }
  notices_.note_sent(rank, payload.size());
  const Frame frame{.group = group, .sequence = tag, .kind = FrameKind::notice};
  Link& known = link(rank);
  if (payload.empty()) {
    known.send(frame);
  } else {
    known.send_note(frame, payload);
  }
  if (congested()) poke();
  return true;
}

void Context::on_notice(int peer, const Frame& frame, std::span<const std::byte> payload) {
  if (frame.kind == FrameKind::noticed) {
    notices_.note_taken(peer, {frame.offset, frame.length});
  } else if (notices_.receive(peer, frame, payload)) {
    noticed_.notify_one();
  } else {
    note_loss(peer, LossKind::died, "it sent more notices than may wait");
  }
}

void Context::tell_here(Notice own) {
  notices_.tell(std::move(own));
  noticed_.notify_one();
}

std::optional<std::vector<Notice>> Context::take_notices(double timeout_s) {
  Lock lock(mutex_);
  noticed_.wait_until(lock, Clock::now() + as_duration(timeout_s), [this] { return stopped_ || is_prodded_ || !notices_.empty(); });
  is_prodded_ = false;
  if (notices_.has_lost()) throw Fault(FaultKind::state, "more notices came than were taken; some are lost");
  if (stopped_) return std::nullopt;
  auto taken = notices_.take();
  for (const auto& [peer, amount] : taken.by_peer) {
    if (losses_.contains(peer)) continue;
    links_[static_cast<size_t>(peer)]->send({.kind = FrameKind::noticed, .offset = amount.count, .length = amount.bytes});
  }
  if (congested()) poke();
  return std::move(taken.notices);
}

void Context::prod() {
  const Lock lock(mutex_);
  is_prodded_ = true;
  noticed_.notify_one();
}

// Has the thread that drives go on sending what found no room.
void Context::poke() {
  if (caller_drives_) {
    wake_self();
  } else {
    poller_.wake();
  }
}

}  // namespace multiring
