// The state of a thread that moves the bytes of one connection of every link (see LinkThreads).
//
// RankState::mutex guards the state. The thread releases it only during its system calls, which never block.
#pragma once

#include <mutex>
#include <utility>

#include "memory/poller.h"

namespace multiring {

struct LinkThread {
  explicit LinkThread(std::mutex& guard) : mutex(guard) {}

  // Tells the thread that one of its connections has something to send. The caller holds the mutex.
  void wake() {
    has_news = true;
    if (std::exchange(sleeps, false)) poller.wake();
  }

  Poller poller;      // watches the thread's connections
  std::mutex& mutex;  // RankState::mutex
  bool sleeps = false;
  bool has_news = false;
};

}  // namespace multiring
