#include "progress_loop.h"

#include <algorithm>
#include <string>
#include <utility>

namespace multiring {
namespace {

constexpr int kDoorPause_ms = 10;  // longest sleep while connections are being made
constexpr auto kNapsFor = std::chrono::milliseconds(10);  // after a quick operation without a waiter, sleeps are short

}  // namespace

void ProgressLoop::run() {
  RankState::Lock lock(state_.mutex);
  bool came = false;  // true if sockets were ready, or anything moved, since the last drive
  while (!state_.stopped) {
    bool moved = false;
    if (came || !sleepers_.caller_drives) moved = driver_.drive();
    look_around();
    // Peers ring this thread only if no caller has driven for a second. If they rang for each of a caller's quick
    // operations, the rings would cost them more than the operations.
    const bool callers_rest =
        !sleepers_.caller_drives && (!table_.empty() || seconds_since(sleepers_.last_caller) > 1);
    const bool calls = peers_.is_calling();
    connector_.tend();
    int timeout_ms = pause_ms(callers_rest, calls);
    if (moved) {
      timeout_ms = 0;
    } else {
      if (peers_.congested()) timeout_ms = 1;
      if (callers_rest && !sleepers_.may_sleep(ControlPage::kSocketSleeper)) timeout_ms = 0;
      // Sleep shortly, so that the next quick operation need not wake this thread.
      if (timeout_ms != 0 && Clock::now() - sleepers_.last_quick < kNapsFor) timeout_ms = 1;
    }
    sleepers_.naps = timeout_ms == 0 || timeout_ms == 1;
    if (!poll(lock, timeout_ms)) {
      state_.changed.wait(lock, [this] { return state_.stopped; });
      return;
    }
    came = count_ > 0 || moved;
  }
}

void ProgressLoop::look_around() {
  if (driver_.is_tick_due(Clock::now())) driver_.tick();
  if (sleepers_.caller_drives && std::exchange(told_of_, table_.ended()) != table_.ended()) {
    sleepers_.wake_callers();  // a caller's operation may be among the ended operations
  }
  if (rails_.is_rail_look_due()) driver_.guarded([this] { rails_.watch_rails(); });
  if (rails_.is_wire_look_due()) driver_.guarded([this] { rails_.watch_wires(); });
}

// Returns how many milliseconds to wait for sockets at most while nothing moves; negative for no limit.
int ProgressLoop::pause_ms(bool callers_rest, bool calls) const {
  const ContextConfig& config = state_.config;
  // True if a part of the rank has a deadline.
  const bool waits = connector_.waits_for_time() || driver_.waits_for_time();
  int timeout_ms = callers_rest && !waits ? -1 : 1000;
  if (!peers_.connections().empty()) {  // wires are checked even while the rank is idle
    const int look_ms = std::max(1, static_cast<int>(std::min(config.wire_timeout_s, 1e4) * 1000 / 16));
    timeout_ms = timeout_ms < 0 ? look_ms : std::min(timeout_ms, look_ms);
  }
  if (rails_.needs_watching()) timeout_ms = std::max(1, static_cast<int>(config.rail_timeout_s * 125));
  if (calls || connector_.listeners().rests()) {
    timeout_ms = timeout_ms < 0 ? kDoorPause_ms : std::min(timeout_ms, kDoorPause_ms);
  }
  return timeout_ms;
}

// Waits for sockets without the mutex and calls their callbacks. Returns false if waiting is impossible from now on.
bool ProgressLoop::poll(RankState::Lock& lock, int timeout_ms) {
  lock.unlock();
  std::string failure;
  try {
    count_ = state_.poller.wait(ready_.data(), static_cast<int>(ready_.size()), timeout_ms);
  } catch (const Fault& error) {  // for example if the program has closed the core's descriptors
    failure = error.what();
  }
  lock.lock();
  if (!failure.empty()) {
    driver_.break_down(failure);
    return false;
  }
  state_.segment->mapping().control().sleepers.fetch_and(~ControlPage::kSocketSleeper, std::memory_order_seq_cst);
  for (int i = 0; i < count_; ++i) {
    driver_.guarded([&] { state_.poller.dispatch(ready_[static_cast<size_t>(i)]); });
  }
  return true;
}

ProgressLoop::Waited ProgressLoop::wait(const std::shared_ptr<Operation>& operation, double timeout_s) {
  state_.refuse_inherited();
  const auto start = Clock::now();
  const auto deadline = start + as_duration(timeout_s);
  RankState::Lock lock(state_.mutex);
  Waited result = Waited::ended;
  while (!operation->ended()) {
    if (sleepers_.caller_drives) {
      if (state_.changed.wait_until(lock, deadline) == std::cv_status::timeout) {
        result = Waited::timed_out;
        break;
      }
      continue;
    }
    sleepers_.caller_drives = true;
    result = drive_until(operation, deadline, lock);
    sleepers_.caller_drives = false;
    sleepers_.last_caller = Clock::now();
    const bool is_seen_to = sleepers_.naps && table_.are_all_quick();
    if (peers_.congested() || (!table_.empty() && !is_seen_to)) {
      state_.poller.wake();  // the progress thread drives again
    }
    state_.changed.notify_all();
    break;
  }
  recorder_.record({EventKind::wait, operation->spec().name, operation->spec().key, 0, nanoseconds(start), 0,
                    nanoseconds(Clock::now()), 0, 0, recorder_.this_thread()});
  return operation->ended() ? Waited::ended : result;
}

ProgressLoop::Waited ProgressLoop::drive_until(const std::shared_ptr<Operation>& operation, Clock::time_point deadline,
                                               RankState::Lock& lock) {
  auto& sleeping = state_.segment->mapping().control().sleepers;
  if ((sleeping.fetch_and(~ControlPage::kSocketSleeper) & ControlPage::kSocketSleeper) != 0) state_.poller.wake();
  // Do not spin for ranks of other hosts: the progress thread receives their bytes and needs the processor core.
  const auto& members = operation->spec().members;
  const auto& far = peers_.connections();
  const bool spins = std::none_of(members.begin(), members.end(), [&](int member) { return far.contains(member); });
  const auto spin_until = Clock::now() + as_duration(spins ? sleepers_.spin_s : 0);
  while (!operation->ended()) {
    const bool driven = driver_.drive();
    if (operation->ended()) break;
    const auto now = Clock::now();
    if (driver_.is_tick_due(now)) driver_.tick();
    if (now >= deadline) return Waited::timed_out;
    if (driven) {
      lock.unlock();  // let other threads post or query between two turns
      lock.lock();
      continue;
    }
    if (now < spin_until) {
      lock.unlock();  // let posting threads and the progress thread take the mutex
      for (int i = 0; i < 16; ++i) cpu_relax();
      lock.lock();
      continue;
    }
    if (!sleepers_.may_sleep(ControlPage::kFutexSleeper)) continue;
    auto nap = std::min<Clock::duration>(deadline - now, std::chrono::seconds(1));
    if (peers_.congested()) nap = std::min<Clock::duration>(nap, kCongestedSleep);
    if (sleepers_.sleep(lock, nap) && !operation->ended()) return Waited::interrupted;
  }
  return Waited::ended;
}

}  // namespace multiring
