#include "listeners.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace multiring {
namespace {

constexpr size_t kMostPending = 256;  // a further caller waits or replaces the oldest pending handshake
constexpr auto kHandshakePatience = std::chrono::seconds(5);
constexpr auto kYoung = std::chrono::seconds(1);  // a pending handshake is never replaced before this age
constexpr int kAcceptsATurn = 32;
constexpr auto kFullPause = std::chrono::milliseconds(10);
constexpr auto kNoDescriptorPause = std::chrono::milliseconds(100);

}  // namespace

uint16_t Listeners::listen(const std::string& host, uint16_t first_port, uint16_t last_port) {
  if (state_.config.secret.empty()) {
    throw Fault(FaultKind::state, "cannot listen at " + host + " without a secret: anybody could join");
  }
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), "0", &hints, &found) != 0) {
    throw Fault(FaultKind::argument, "cannot listen at " + host + ": want a numeric address");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
  for (uint32_t port = first_port; port <= last_port; ++port) {
    Descriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket.valid()) throw_errno(FaultKind::state, "socket");
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_storage address{};
    std::memcpy(&address, found->ai_addr, found->ai_addrlen);
    const uint16_t number = htons(static_cast<uint16_t>(port));
    if (found->ai_family == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&address)->sin6_port = number;
    } else {
      reinterpret_cast<sockaddr_in*>(&address)->sin_port = number;
    }
    // Two sockets with SO_REUSEADDR can both bind an address; only the first of them can listen.
    if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), found->ai_addrlen) != 0 ||
        ::listen(socket.get(), 1024) != 0) {
      if (errno == EADDRINUSE && port < last_port) continue;
      throw_errno(FaultKind::argument, "binding " + host + ", ports " + std::to_string(first_port) + " to " +
                                           std::to_string(last_port));
    }
    socklen_t length = sizeof address;
    ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
    const RankState::Lock lock(state_.mutex);
    listeners_.push_back({host, std::move(socket)});
    return ntohs(found->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                              : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  throw Fault(FaultKind::argument, "the port range is empty: want first_port <= last_port");
}

void Listeners::watch(const ListeningSocket& listener) {
  state_.poller.add(listener.socket.get(), EPOLLIN, [this, &listener](uint32_t) { on_caller(listener.socket); });
}

// Pending handshakes use a bounded number of descriptors. A handshake is replaced only after a rank would have had time
// to complete it, which takes milliseconds. Further callers wait in the kernel's queue. A rank whose connection is
// dropped calls again.
void Listeners::on_caller(const Descriptor& listener) {
  for (int turn = 0; turn < kAcceptsATurn; ++turn) {
    if (pending_handshakes_.size() >= kMostPending && !make_room_for_caller()) {
      rest_listeners(kFullPause);
      return;
    }
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      // The process is out of descriptors or memory, and the waiting connection would wake this thread repeatedly.
      if (!make_room_for_caller()) rest_listeners(kNoDescriptorPause);
      return;
    }
    const int fd = socket.get();
    pending_handshakes_[fd] = std::make_unique<Handshake>(
        std::move(socket), self_on(0), Handshake::kAnyone, Clock::now() + kHandshakePatience);
    try {
      state_.poller.add(fd, EPOLLIN, [this, fd](uint32_t) { on_handshake(fd); });
    } catch (const Fault&) {  // the poller cannot watch it; the caller may try again
      pending_handshakes_.erase(fd);
      return;
    }
    on_handshake(fd);  // the hello has usually arrived already
  }
}

// Drops or completes the oldest pending handshake. Returns false if it is too young, so that new callers must wait.
bool Listeners::make_room_for_caller() {
  const auto oldest =
      std::min_element(pending_handshakes_.begin(), pending_handshakes_.end(),
                       [](const auto& a, const auto& b) { return a.second->deadline() < b.second->deadline(); });
  if (oldest == pending_handshakes_.end()) return false;
  const int fd = oldest->first;
  const auto came = oldest->second->deadline() - kHandshakePatience;
  on_handshake(fd);  // its messages may have arrived while this thread was busy
  if (!pending_handshakes_.contains(fd)) return true;
  if (Clock::now() < came + kYoung) return false;
  drop_pending(fd);
  return true;
}

void Listeners::drop_pending(int fd) {
  state_.poller.remove(fd);
  pending_handshakes_.erase(fd);
}

void Listeners::rest_listeners(Clock::duration pause) {
  if (!listens_again_) {
    for (const auto& listener : listeners_) state_.poller.remove(listener.socket.get());
  }
  listens_again_ = Clock::now() + pause;
}

void Listeners::listen_again() {
  listens_again_.reset();
  size_t heard = 0;
  try {
    for (const auto& listener : listeners_) {
      watch(listener);
      ++heard;
    }
  } catch (const Fault&) {  // the poller cannot watch it
    for (size_t i = 0; i < heard; ++i) state_.poller.remove(listeners_[i].socket.get());
    listens_again_ = Clock::now() + kNoDescriptorPause;
  }
}

void Listeners::on_handshake(int fd) {
  Handshake& handshake = *pending_handshakes_.at(fd);
  const auto status = handshake.advance();
  if (status == Handshake::Status::going) return;
  state_.poller.remove(fd);
  const auto over = std::move(pending_handshakes_.at(fd));
  pending_handshakes_.erase(fd);
  if (status == Handshake::Status::refused) return;
  on_proven_(*over);
}

void Listeners::expire_pending() {
  const auto now = Clock::now();
  std::vector<int> late;
  for (const auto& [fd, handshake] : pending_handshakes_) {
    if (now >= handshake->deadline()) late.push_back(fd);
  }
  for (const int fd : late) {
    on_handshake(fd);  // this process may have been suspended, so the messages may have arrived
    if (pending_handshakes_.contains(fd)) drop_pending(fd);
  }
}

Handshake::Self Listeners::self_on(uint16_t rail) const {
  const ContextConfig& config = state_.config;
  return {config.rank, config.size, config.job, config.secret,
          static_cast<uint16_t>(listeners_.size() * state_.connections()), rail,
          config.seal};
}

}  // namespace multiring
