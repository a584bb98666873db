#include "poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "fault.h"

namespace multiring {

Poller::Poller()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!epoll_.valid() || !wake_.valid()) throw_errno(FaultKind::state, "epoll_create1 or eventfd");
  add(wake_.get(), EPOLLIN, [this](uint32_t) {
    uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
  });
}

void Poller::add(int fd, uint32_t events, Callback callback) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_errno(FaultKind::state, "epoll_ctl add");
  callbacks_[fd] = std::move(callback);
}

void Poller::change(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) throw_errno(FaultKind::state, "epoll_ctl change");
}

void Poller::remove(int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  callbacks_.erase(fd);
}

void Poller::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto put = ::write(wake_.get(), &one, sizeof one);
}

int Poller::wait(Ready* ready, int most, int timeout_ms) const {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_.get(), events, std::min(most, 64), timeout_ms);
  if (count < 0) {
    if (errno == EINTR) return 0;
    throw_errno(FaultKind::state, "epoll_wait");
  }
  for (int i = 0; i < count; ++i) ready[i] = {events[i].data.fd, events[i].events};
  return count;
}

void Poller::dispatch(const Ready& ready) {
  const auto found = callbacks_.find(ready.fd);
  if (found == callbacks_.end()) return;  // an earlier callback has removed it
  const Callback callback = found->second;  // a copy, because the callback may remove itself
  callback(ready.events);
}

}  // namespace multiring
