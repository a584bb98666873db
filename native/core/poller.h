// epoll with one callback a descriptor, and a way to be woken from another thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "descriptor.h"

namespace multiring {

class Poller {
 public:
  using Callback = std::function<void(uint32_t events)>;  // EPOLLIN | EPOLLOUT | EPOLLHUP ...
  Poller();

  // `guard` is the mutex's business: add, change and remove are called with the owner's mutex held.
  void add(int fd, uint32_t events, Callback callback);
  void change(int fd, uint32_t events);
  void remove(int fd);
  void wake() const;

  // Waits without touching the callbacks, so that the owner need not hold its mutex meanwhile.
  struct Ready {
    int fd;
    uint32_t events;
  };
  int wait(Ready* ready, int most, int timeout_ms) const;  // timeout < 0: for ever
  void dispatch(const Ready& ready);                        // owner's mutex held

 private:
  Descriptor epoll_;
  Descriptor wake_;
  std::map<int, Callback> callbacks_;
};

}  // namespace multiring
