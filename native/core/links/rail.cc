#include "rail.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/fault.h"

namespace multiring {
namespace {

// Most unsent bytes in the kernel's buffer. They keep a gigabit connection busy for some milliseconds while this
// process does not run; but urgent frames wait behind them.
constexpr int kUnsentBytes = 512 * 1024;
constexpr auto kLongestPause = std::chrono::milliseconds(500);  // longest pause before a rejected call is repeated

using AddressInfo = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

AddressInfo address_of(const std::string& host, uint16_t port, const std::string& whose) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Fault(FaultKind::rendezvous, whose + " gave the address " + host + ", which is not numeric");
  }
  return {found, ::freeaddrinfo};
}

}  // namespace

Rail::~Rail() {
  if (handshake_) poller_.remove(handshake_->fd());
  if (socket_.valid()) watcher().remove(socket_.get());
}

void Rail::call(const std::string& host, uint16_t port, const std::string& from, const Handshake::Self& self,
                Clock::time_point deadline) {
  call_ = std::make_unique<Call>(Call{host, port, from, self, deadline});
  try {
    dial();
  } catch (const Fault&) {  // the caller reports it; the call is not repeated
    call_.reset();
    throw;
  }
}

void Rail::dial() {
  const auto& [host, port, from, self, deadline, again_at, pause] = *call_;
  const AddressInfo target = address_of(host, port, "rank " + std::to_string(peer_));
  Descriptor socket(::socket(target->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) throw_errno(FaultKind::rendezvous, "socket");
  if (!from.empty()) {
    const AddressInfo source = address_of(from, 0, "this rank");
    if (::bind(socket.get(), source->ai_addr, source->ai_addrlen) != 0) {
      throw_errno(FaultKind::rendezvous, "binding a connection to " + from);
    }
  }
  state_ = RailState::calling;
  if (::connect(socket.get(), target->ai_addr, target->ai_addrlen) != 0 && errno != EINPROGRESS) {
    throw_errno(FaultKind::rendezvous, "connecting to rank " + std::to_string(peer_) + " at " + host + ":" +
                                           std::to_string(port) + (from.empty() ? "" : " from " + from));
  }
  const int fd = socket.get();
  handshake_ = std::make_unique<Handshake>(std::move(socket), self, peer_, deadline);
  poller_.add(fd, EPOLLIN | EPOLLOUT, [this](uint32_t events) { on_ready(events); });
}

void Rail::adopt(Descriptor socket, std::unique_ptr<SealedStream> stream) {
  socket_ = std::move(socket);
  stream_ = std::move(stream);
  watch_socket();
}

void Rail::watch_socket() {
  state_ = RailState::up;
  call_.reset();
  const int yes = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
  ask_when_idle();
  watcher().add(socket_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t events) { on_ready(events); });
  owner_.on_up(*this);
}

// Makes the kernel probe an idle connection. The peer's kernel answers even if its process is stopped. The probes never
// end the connection; `silence` evaluates them. The kernel's intervals are whole seconds, and retransmissions double
// them.
void Rail::ask_when_idle() {
#ifndef TCP_RTO_MAX_MS
  constexpr int TCP_RTO_MAX_MS = 44;  // Linux 6.15 and later; earlier kernels double the interval up to two minutes
#endif
  const int yes = 1;
  const int most = 127;
  const int seconds =
      std::max(1, static_cast<int>(std::chrono::duration_cast<std::chrono::seconds>(probe_every_).count()));
  const int milliseconds = std::max(1000, seconds * 1000);
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_KEEPCNT, &most, sizeof most);
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_RTO_MAX_MS, &milliseconds, sizeof milliseconds);
}

void Rail::on_handshake() {
  const int fd = handshake_->fd();
  const auto status = handshake_->advance();
  if (status == Handshake::Status::going) {
    poller_.change(fd, handshake_->wants_to_write() ? EPOLLIN | EPOLLOUT : EPOLLIN);
    return;
  }
  poller_.remove(fd);
  const std::unique_ptr<Handshake> over = std::move(handshake_);
  if (status == Handshake::Status::refused && over->was_turned_away()) {
    call_->again_at = Clock::now() + call_->pause;
    call_->pause = std::min<Clock::duration>(2 * call_->pause, kLongestPause);
    return;
  }
  if (status == Handshake::Status::refused) {
    break_off(over->why());
    return;
  }
  adopt(over->release(), over->release_stream());
}

void Rail::tend_call() {
  if (!call_) return;
  const auto now = Clock::now();
  if (now >= call_->deadline) {
    break_off(handshake_ ? "it did not complete the handshake in time"
                         : "it closed every connection before the handshake was complete");
  } else if (!handshake_ && now >= call_->again_at) {
    try {
      dial();
    } catch (const Fault& fault) {  // for example no descriptor, or no route any more
      break_off(fault.what());
    }
  }
}

void Rail::hang_up() {
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_WR);
}

void Rail::give_up() {
  call_.reset();
  if (handshake_) {
    poller_.remove(handshake_->fd());
    handshake_.reset();
  }
  state_ = socket_.valid() ? RailState::given_up : RailState::closed;
}

void Rail::close() {
  settle_write();
  settle_read();
  call_.reset();
  if (handshake_) poller_.remove(handshake_->fd());
  handshake_.reset();
  last_health_ = health();
  if (socket_.valid()) watcher().remove(socket_.get());
  socket_.reset();
  state_ = RailState::closed;
  wants_write_ = false;
}

void Rail::break_off(const std::string& why) {
  if (state_ == RailState::closed) return;
  const bool is_used = state_ != RailState::given_up;
  close();
  if (is_used) owner_.on_broken(*this, why);
}

// A peer that leaves says so on every rail before it closes them. A rail that was given up carries nothing new.
void Rail::end(const std::string& why) {
  if (!stream_ || has_left || state_ != RailState::up) {
    break_off(why);
    return;
  }
  close();
  owner_.on_cut(*this, why);
}

// ---- health --------------------------------------------------------------------------------

Rail::Health Rail::health() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (!socket_.valid() || ::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) {
    return last_health_;
  }
  Health found;
  found.acknowledged = info.tcpi_bytes_acked;
  const uint64_t held_us = info.tcpi_rwnd_limited + info.tcpi_sndbuf_limited;
  found.busy_s = static_cast<double>(info.tcpi_busy_time - std::min<uint64_t>(info.tcpi_busy_time, held_us)) * 1e-6;
  found.waits = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
  found.quiet_s = info.tcpi_last_ack_recv * 1e-3;
  return found;
}

Clock::duration Rail::silence(Look& last, Clock::duration at_most) const {
  Look look{.when = Clock::now(), .health = health(), .silence = {}};
  const Health& before = last.health;
  const auto passed = look.when - last.when;
  // The acknowledged bytes reveal an answer right after the previous check. The kernel's clock has a resolution of some
  // milliseconds, so its time of that answer may lie before the check. The time reveals answers that acknowledge
  // nothing.
  const bool answered = look.health.acknowledged != before.acknowledged ||
                        look.health.quiet_s < std::chrono::duration<double>(passed).count();
  if (before.waits && look.health.waits && !answered) look.silence = last.silence + std::min(passed, at_most);
  last = look;
  return look.silence;
}

}  // namespace multiring
