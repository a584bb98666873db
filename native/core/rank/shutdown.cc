#include "shutdown.h"

#include <algorithm>

#include "progress_loop.h"

namespace multiring {
namespace {

constexpr auto kHandingOn = std::chrono::seconds(30);  // how long a leaving rank waits for peers that connect late
constexpr auto kLinger = std::chrono::milliseconds(500);  // how long a leaving rank waits for a peer that is silent

}  // namespace

// After a stall it does not wait until MPI messages have arrived, because a silent rank does not receive them.
bool Shutdown::is_settled() const {
  return table_.empty() && !peers_.congested() && (proxy_.is_quiet() || failures_.ends_groups());
}

void Shutdown::settle_until(RankState::Lock& lock, Clock::time_point deadline) {
  state_.poller.wake();
  while (!is_settled() && Clock::now() < deadline) {
    state_.changed.wait_until(lock, std::min(deadline, Clock::now() + kCongestedSleep));
  }
}

bool Shutdown::settled(double timeout_s) {
  const auto deadline = Clock::now() + as_duration(timeout_s);
  RankState::Lock lock(state_.mutex);
  settle_until(lock, deadline);
  return is_settled();
}

bool Shutdown::stop(double grace_s, bool announce) {
  const auto deadline = Clock::now() + as_duration(grace_s);
  RankState::Lock lock(state_.mutex);
  if (state_.stopped) return false;
  state_.closing = true;
  settle_until(lock, deadline);
  const bool is_complete = announce && table_.empty() && !failures_.ends_groups();
  const auto last_call = Clock::now() + kHandingOn;
  // This rank has finished its part, but some ranks have not connected yet to receive their frames.
  while (is_complete && peers_.hands_on() && Clock::now() < last_call) {
    state_.changed.wait_until(lock, Clock::now() + kCongestedSleep);
  }
  fail_rest();
  if (announce) {
    peers_.tell_everyone({.kind = FrameKind::lost, .slot = static_cast<uint32_t>(LossKind::left),
                          .offset = static_cast<uint64_t>(state_.config.rank)});
    detector_.say_leaving();
    // If a slow connection ended before the announcement, its peer would take this rank for dead, and would fail
    // operations that do not even wait for this rank.
    while (is_complete && peers_.is_sending() && Clock::now() < last_call) {
      state_.changed.wait_until(lock, Clock::now() + kCongestedSleep);
    }
  }
  hang_up(lock, is_complete ? last_call : deadline);
  state_.stopped = true;
  state_.poller.wake();
  state_.changed.notify_all();
  control_.wake(true);
  return true;
}

// Called before this rank announces that it leaves. After the announcement it must not access the memory of other
// ranks.
void Shutdown::fail_rest() {
  const auto running = table_.running();
  for (const auto& [key, operation] : running) {
    operation->fail(FaultKind::state, "multiring was shut down");
    operation->end_quieting();
    table_.end_if_over(operation);
  }
}

// If a peer's bytes arrive at a closed socket, or a socket is closed with unread bytes, the connection is reset. The
// kernel then discards bytes that the peer has not received. Therefore this rank ends its own direction and reads until
// the peers have hung up, too, or until they have acknowledged nothing for a short time, but at most until `last_call`.
void Shutdown::hang_up(RankState::Lock& lock, Clock::time_point last_call) {
  const auto& connections = peers_.connections();
  for (const auto& [rank, link] : connections) link->hang_up();
  const auto all_closed = [&] {
    return std::none_of(connections.begin(), connections.end(),
                        [](const auto& entry) { return entry.second->is_open(); });
  };
  const auto patience = [&] { return std::min(Clock::now() + kLinger, last_call); };
  size_t in_transit = peers_.in_transit();
  for (auto until = patience(); !all_closed() && Clock::now() < until;) {
    state_.changed.wait_until(lock, std::min(until, Clock::now() + kLinger / 10), all_closed);
    const size_t left = peers_.in_transit();
    if (left < in_transit) until = patience();
    in_transit = left;
  }
}

}  // namespace multiring
