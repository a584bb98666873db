#include "sleepers.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace multiring {

bool Sleepers::may_sleep(uint32_t sleeper) {
  control().sleepers.fetch_or(sleeper, std::memory_order_seq_cst);
  if (!has_news()) return true;
  control().sleepers.fetch_and(~sleeper, std::memory_order_seq_cst);
  return false;
}

bool Sleepers::sleep(RankState::Lock& lock, Clock::duration nap) {
  auto& sleepers = control().sleepers;
  timespec relative{};
  relative.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(nap).count();
  relative.tv_nsec = (std::chrono::duration_cast<std::chrono::nanoseconds>(nap) % std::chrono::seconds(1)).count();
  lock.unlock();
  const long slept =
      ::syscall(SYS_futex, &sleepers, FUTEX_WAIT, ControlPage::kFutexSleeper, &relative, nullptr, 0);
  const bool interrupted = slept != 0 && errno == EINTR;
  lock.lock();
  sleepers.fetch_and(~ControlPage::kFutexSleeper, std::memory_order_seq_cst);
  return interrupted;
}

void Sleepers::wake_callers() {
  auto& sleepers = control().sleepers;
  sleepers.fetch_and(~ControlPage::kFutexSleeper, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &sleepers, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  state_.changed.notify_all();
}

}  // namespace multiring
