// What a Context knows of its rails, and when it looks.

#include <algorithm>
#include <utility>

#include "context.h"

namespace multiring {

bool Context::rails_need_watching() const {
  return std::any_of(tcp_links_.begin(), tcp_links_.end(), [](const auto& entry) { return entry.second->needs_watching(); });
}

// Several times within the time-out, so that one late look does not double it.
void Context::watch_rails() {
  const auto now = Clock::now();
  next_rail_watch_ = now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(config_.rail_timeout_s / 8));
  if (!connected_) return;
  for (const auto& [peer, link] : tcp_links_) {
    link->watch_rails();
    if (closing_ || losses_.contains(peer)) continue;
    for (RailLoss& loss : link->take_losses()) {
      record({Event::Kind::rail, loss.rail, {0, static_cast<uint64_t>(peer)}, 0, nanoseconds(loss.when), 0, nanoseconds(now)});
      rail_losses_.push_back(std::move(loss));
    }
  }
}

void Context::watch_wires() {
  next_wire_watch_ = Clock::now() + as_duration(config_.wire_timeout_s / 16);
  if (closing_) return;
  for (const auto& [peer, link] : tcp_links_) {
    if (!losses_.contains(peer)) link->watch_wire();
  }
}

bool Context::waits_for_time() const {
  return !running_.empty() || !pending_handshakes_.empty() || listens_again_ || !gossip_.empty() || !new_losses_.empty() ||
         is_calling();
}

std::vector<RailLoss> Context::take_rail_losses() {
  const Lock lock(mutex_);
  return std::exchange(rail_losses_, {});
}

std::vector<RailStatus> Context::rails() {
  const Lock lock(mutex_);
  std::vector<RailStatus> found;
  for (const auto& [peer, link] : tcp_links_) {
    for (const RailStatus& rail : link->rails()) found.push_back(rail);
  }
  return found;
}

}  // namespace multiring
