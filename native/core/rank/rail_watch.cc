#include "rail_watch.h"

#include <algorithm>

namespace multiring {

bool RailWatch::needs_watching() const {
  const auto& all = peers_.connections();
  return std::any_of(all.begin(), all.end(), [](const auto& entry) { return entry.second->needs_watching(); });
}

// Checks several times within the time-out, so that one late check does not double it.
void RailWatch::watch_rails() {
  const auto now = Clock::now();
  next_rail_look_ = now + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(state_.config.rail_timeout_s / 8));
  if (!state_.connected) return;
  for (const auto& [peer, link] : peers_.connections()) {
    link->watch_rails();
    if (state_.closing || peers_.is_lost(peer)) continue;
    for (RailLoss& loss : link->take_losses()) {
      recorder_.record({EventKind::rail, loss.rail, {0, static_cast<uint64_t>(peer)}, 0, nanoseconds(loss.when), 0,
                        nanoseconds(now)});
      losses_.push_back(std::move(loss));
    }
  }
}

void RailWatch::watch_wires() {
  next_wire_look_ = Clock::now() + as_duration(state_.config.wire_timeout_s / 16);
  if (state_.closing) return;
  for (const auto& [peer, link] : peers_.connections()) {
    if (!peers_.is_lost(peer)) link->watch_wire();
  }
}

}  // namespace multiring
