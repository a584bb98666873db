// An epoll wrapper with one callback per descriptor. Another thread can wake the waiting thread.
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

  // The caller of `add`, `change` and `remove` holds the owner's mutex.
  void add(int fd, uint32_t events, Callback callback);
  void change(int fd, uint32_t events);
  void remove(int fd);
  void wake() const;

  // Waiting does not touch the callbacks, so the owner need not hold its mutex during `wait`.
  struct Ready {
    int fd;
    uint32_t events;
  };
  // Returns the number of ready descriptors; `timeout_ms` < 0 waits without limit.
  int wait(Ready* ready, int most, int timeout_ms) const;
  void dispatch(const Ready& ready);  // calls the descriptor's callback; the caller holds the owner's mutex

 private:
  Descriptor epoll_;
  Descriptor wake_;
  std::map<int, Callback> callbacks_;
};

}  // namespace multiring
