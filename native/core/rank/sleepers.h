// Which thread drives this rank's operations, and how sleeping threads are woken.
//
// The driving thread advances operations; it must hold the rank's mutex. It is either the progress thread, which sleeps
// on the sockets, or a caller blocked in `wait`. Such a caller may spin for a bounded time; then it sleeps on a futex
// in the control page. Peers wake the one that sleeps. RankState::mutex guards this state. The progress thread and
// callers use it; peers on this host write into the control page at any time.
#pragma once

#include <algorithm>
#include <iterator>

#include "memory/clock.h"
#include "rank_state.h"

namespace multiring {

class Sleepers {
 public:
  explicit Sleepers(RankState& state) : state_(state) {}

  bool has_news() const {  // true if a peer on this host has sent frames
    const auto& pending = control().pending;
    return std::any_of(std::begin(pending), std::end(pending),
                       [](const auto& word) { return word.load(std::memory_order_seq_cst) != 0; });
  }
  // Announces in the control page that this rank is about to sleep; `sleeper` is a flag of ControlPage. Returns false,
  // without the announcement, if frames have arrived.
  bool may_sleep(uint32_t sleeper);
  // Releases the mutex and sleeps on the futex for at most `nap`. Returns true if a signal interrupted the sleep.
  bool sleep(RankState::Lock& lock, Clock::duration nap);
  void wake_callers();  // wakes all threads of this process that wait for an operation
  // Wakes the driving thread, because there is a new operation or a frame that waits for room.
  void wake_driver() {
    if (caller_drives) {
      wake_callers();
    } else {
      state_.poller.wake();
    }
  }

  bool caller_drives = false;       // true while a caller, not the progress thread, drives
  Clock::time_point last_caller{};  // when a caller last drove
  Clock::time_point last_quick{};   // when a quick operation was last posted without a waiting caller
  bool naps = false;                // true if the progress thread sleeps for at most a millisecond
  double spin_s = 0;                // seconds that a blocked caller spins before it sleeps

 private:
  ControlPage& control() const { return state_.segment->mapping().control(); }

  RankState& state_;
};

}  // namespace multiring
