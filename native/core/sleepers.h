// Who drives this rank, and how its sleeping threads are woken.
//
// Whoever holds the rank's mutex may drive: the progress thread, which sleeps on the sockets, or a caller blocked in
// `wait`, which may spin for a bounded time and then sleeps on a futex in the control page. Peers ring one or the
// other, whichever sleeps. Guarded by RankState::mutex; called by the progress thread and by callers. Peers of the host
// write into the control page at any time.
#pragma once

#include <algorithm>
#include <iterator>

#include "clock.h"
#include "rank_state.h"

namespace multiring {

class Sleepers {
 public:
  explicit Sleepers(RankState& state) : state_(state) {}

  bool has_news() const {  // from a peer of this host
    const auto& pending = control().pending;
    return std::any_of(std::begin(pending), std::end(pending),
                       [](const auto& word) { return word.load(std::memory_order_seq_cst) != 0; });
  }
  // Announces that this rank is about to sleep, as ControlPage has it; false if news came in meanwhile.
  bool may_sleep(uint32_t sleeper);
  // Sleeps on the futex for at most `nap`, without the mutex; true where a signal came.
  bool sleep(RankState::Lock& lock, Clock::duration nap);
  void wake_callers();  // whichever threads of this process wait for an operation
  // Has the thread that drives go on, with what found no room or is new.
  void wake_driver() {
    if (caller_drives) {
      wake_callers();
    } else {
      state_.poller.wake();
    }
  }

  bool caller_drives = false;
  Clock::time_point last_caller{};  // when one drove
  Clock::time_point last_quick{};   // when a quick operation was posted that nobody waited for
  bool naps = false;                // whether the progress thread sleeps for a millisecond at most
  double spin_s = 0;                // how long a blocked caller spins before it sleeps

 private:
  ControlPage& control() const { return state_.segment->mapping().control(); }

  RankState& state_;
};

}  // namespace multiring
