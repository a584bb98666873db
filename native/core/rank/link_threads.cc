#include "link_threads.h"

#include <array>
#include <string>
#include <utility>

namespace multiring {

void LinkThreads::start(uint16_t count) {
  const RankState::Lock lock(state_.mutex);
  if (!state_.link_threads.empty() || state_.connected || state_.stopped) {
    throw Fault(FaultKind::state, "the number of connections was chosen already");
  }
  for (uint16_t i = 0; i < count; ++i) state_.link_threads.push_back(std::make_unique<LinkThread>(state_.mutex));
  for (uint16_t i = 0; i < count; ++i) threads_.push_back(std::make_unique<std::thread>([this, i] { run(i); }));
}

void LinkThreads::join() {
  for (const auto& thread : state_.link_threads) thread->poller.wake();
  for (const auto& thread : threads_) thread->join();
  threads_.clear();
}

void LinkThreads::disown() {
  for (auto& thread : threads_) {
    [[maybe_unused]] const auto* parents = thread.release();
  }
  threads_.clear();
}

void LinkThreads::run(uint16_t index) {
  LinkThread& own = *state_.link_threads[index];
  std::array<Poller::Ready, 64> ready{};
  uint64_t told_of = 0;
  bool moved = false;
  RankState::Lock lock(state_.mutex);
  while (!state_.stopped) {
    own.sleeps = !moved && !own.has_news;
    const int timeout_ms = own.sleeps ? -1 : 0;
    int count = 0;
    std::string failure;
    lock.unlock();
    try {
      count = own.poller.wait(ready.data(), static_cast<int>(ready.size()), timeout_ms);
    } catch (const Fault& error) {  // for example if the program has closed the core's descriptors
      failure = error.what();
    }
    lock.lock();
    own.sleeps = false;
    if (!failure.empty()) {
      driver_.break_down(failure);
      state_.changed.wait(lock, [this] { return state_.stopped; });
      return;
    }
    for (int i = 0; i < count; ++i) {
      driver_.guarded([&] { own.poller.dispatch(ready[static_cast<size_t>(i)]); });
    }
    own.has_news = false;
    moved = (count > 0 || moved) && driver_.drive();
    moved |= carry(index);
    tell_callers(told_of);
  }
}

// Sends on this thread's connection of every link. Links may be added during the system calls, but none is removed
// before the threads have ended.
bool LinkThreads::carry(uint16_t index) {
  bool any = false;
  driver_.guarded([&] {
    for (const auto& [rank, link] : peers_.connections()) any |= link->carry(index);
  });
  return any;
}

void LinkThreads::tell_callers(uint64_t& told_of) {
  const bool any_ended = std::exchange(told_of, table_.ended()) != table_.ended();
  if (any_ended && sleepers_.caller_drives) sleepers_.wake_callers();
}

}  // namespace multiring
