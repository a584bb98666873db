#include "shutdown.h"

#include <algorithm>

#include "progress_loop.h"

namespace multiring {
namespace {

constexpr auto kHandingOn = std::chrono::seconds(30);  // a peer that is late does not wait for ever for who has left

}  // namespace

// What a silent rank has not received is not waited for.
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
  // Its own part is done, but not with everybody: some have yet to connect for it.
  const auto last_call = Clock::now() + kHandingOn;
  while (announce && table_.empty() && !failures_.ends_groups() && peers_.hands_on() && Clock::now() < last_call) {
    state_.changed.wait_until(lock, Clock::now() + kCongestedSleep);
  }
  fail_rest();
  if (announce) {
    peers_.tell_everyone({.kind = FrameKind::lost, .slot = static_cast<uint32_t>(LossKind::left),
                          .offset = static_cast<uint64_t>(state_.config.rank)});
    detector_.say_leaving();
  }
  hang_up(lock, deadline);
  state_.stopped = true;
  state_.poller.wake();
  state_.changed.notify_all();
  control_.wake(true);
  return true;
}

// Before it is said that this rank leaves: from then on nobody expects it to touch the others' memory.
void Shutdown::fail_rest() {
  const auto running = table_.running();
  for (const auto& [key, operation] : running) {
    operation->fail(FaultKind::state, "multiring was shut down");
    operation->end_quieting();
    table_.end_if_over(operation);
  }
}

// Closing a socket with unread bytes would reset it, and with it what the peer has yet to read: say that nothing more
// comes, and read on until the peers have hung up too, or a moment has passed.
void Shutdown::hang_up(RankState::Lock& lock, Clock::time_point deadline) {
  const auto& connections = peers_.connections();
  for (const auto& [rank, link] : connections) link->hang_up();
  const auto linger = std::min(Clock::now() + std::chrono::milliseconds(500), std::max(deadline, Clock::now()));
  state_.changed.wait_until(lock, linger, [&] {
    return std::none_of(connections.begin(), connections.end(),
                        [](const auto& entry) { return entry.second->is_open(); });
  });
}

}  // namespace multiring
