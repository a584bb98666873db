#include "tcp_link.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fault.h"

namespace multiring {

TcpLink::~TcpLink() {
  if (handshake_) poller_.remove(handshake_->fd());
  if (socket_.valid()) poller_.remove(socket_.get());
}

void TcpLink::call(const std::string& host, uint16_t port, const Handshake::Self& self, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Fault(FaultKind::rendezvous, "rank " + std::to_string(peer_) + " gave the address " + host +
                                           ", which is not a numeric one");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> guard(found, ::freeaddrinfo);
  Descriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) throw_errno(FaultKind::rendezvous, "socket");
  if (::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) {
    throw_errno(FaultKind::rendezvous, "connecting to rank " + std::to_string(peer_) + " at " + host + ":" +
                                           std::to_string(port));
  }
  const int fd = socket.get();
  handshake_ = std::make_unique<Handshake>(std::move(socket), self, peer_, deadline);
  poller_.add(fd, EPOLLIN | EPOLLOUT, [this](uint32_t events) { on_ready(events); });
}

void TcpLink::adopt(Descriptor socket) {
  socket_ = std::move(socket);
  watch_socket();
  pump();
}

void TcpLink::watch_socket() {
  const int yes = 1;
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  poller_.add(socket_.get(), EPOLLIN | EPOLLRDHUP, [this](uint32_t events) { on_ready(events); });
}

void TcpLink::on_handshake() {
  const int fd = handshake_->fd();
  const auto status = handshake_->advance();
  if (status == Handshake::Status::going) {
    poller_.change(fd, handshake_->wants_to_write() ? EPOLLIN | EPOLLOUT : EPOLLIN);
    return;
  }
  poller_.remove(fd);
  const std::unique_ptr<Handshake> over = std::move(handshake_);
  if (status == Handshake::Status::refused) {
    break_off(over->why());
    return;
  }
  socket_ = over->release();
  watch_socket();
  pump();
}

void TcpLink::expire() {
  if (!handshake_ || Clock::now() < handshake_->deadline()) return;
  poller_.remove(handshake_->fd());
  handshake_.reset();
  break_off("it did not answer a connection in time");
}

void TcpLink::hang_up() {
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_WR);
}

void TcpLink::break_off(const std::string& why) {
  if (broken_) return;
  broken_ = true;
  if (socket_.valid()) poller_.remove(socket_.get());
  socket_.reset();
  queue_.clear();
  queued_data_ = 0;
  events_.on_loss(peer_, LossKind::died, why);
}

void TcpLink::send(const Frame& frame) {
  if (broken_) return;
  Chunk chunk;
  chunk.frame = frame;
  chunk.size = sizeof(Frame);
  queue_.push_back(std::move(chunk));
  flush();
}

void TcpLink::send_note(const Frame& frame, std::span<const std::byte> payload) {
  if (broken_) return;
  Chunk chunk;
  chunk.frame = frame;
  chunk.frame.length = payload.size();
  chunk.kept = std::make_unique_for_overwrite<std::byte[]>(payload.size());
  std::memcpy(chunk.kept.get(), payload.data(), payload.size());
  chunk.payload = chunk.kept.get();
  chunk.size = sizeof(Frame) + payload.size();
  queue_.push_back(std::move(chunk));
  flush();
}

bool TcpLink::refill() {
  bool any = false;
  for (auto& [key, stream] : out_) {
    while (!stream.pending.empty() && queued_data_ < kQueuedFrames && stream.sent < stream.credit) {
      auto& piece = stream.pending.front();
      // Whole multiples of 64 bytes but for an offer's end, so that no element is ever split.
      const size_t size = std::min({piece.size, kFrameBytes, static_cast<size_t>(stream.credit - stream.sent)});
      Chunk chunk;
      chunk.frame = {.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::data,
                     .channel = key.channel, .length = size};
      chunk.payload = piece.data;
      chunk.size = sizeof(Frame) + size;
      chunk.stream = &stream;
      queue_.push_back(std::move(chunk));
      ++queued_data_;
      stream.sent += size;
      piece.data += size;
      piece.size -= size;
      if (piece.size == 0) stream.pending.pop_front();
      any = true;
    }
  }
  return any;
}

bool TcpLink::flush() {
  bool any = false;
  while (socket_.valid() && !queue_.empty()) {
    std::array<iovec, 16> parts{};
    size_t count = 0;
    for (auto at = queue_.begin(); at != queue_.end() && count + 2 <= parts.size(); ++at) {
      if (at->sent < sizeof(Frame)) {
        parts[count++] = {reinterpret_cast<char*>(&at->frame) + at->sent, sizeof(Frame) - at->sent};
      }
      if (at->payload != nullptr) {
        const size_t done = at->sent > sizeof(Frame) ? at->sent - sizeof(Frame) : 0;
        parts[count++] = {const_cast<std::byte*>(at->payload) + done, at->size - sizeof(Frame) - done};
      }
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t wrote = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (wrote < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) break_off(std::string("its connection broke: ") + std::strerror(errno));
      break;
    }
    any = true;
    auto left = static_cast<size_t>(wrote);
    while (left > 0) {
      Chunk& chunk = queue_.front();
      const size_t step = std::min(left, chunk.size - chunk.sent);
      chunk.sent += step;
      left -= step;
      if (chunk.sent < chunk.size) break;
      if (chunk.frame.kind == FrameKind::data) --queued_data_;
      if (chunk.stream != nullptr) chunk.stream->taken += chunk.size - sizeof(Frame);
      queue_.pop_front();
    }
    refill();
  }
  const bool wants = socket_.valid() && !queue_.empty();
  if (socket_.valid() && wants != wants_write_) {
    wants_write_ = wants;
    poller_.change(socket_.get(), wants ? EPOLLIN | EPOLLRDHUP | EPOLLOUT : EPOLLIN | EPOLLRDHUP);
  }
  return any;
}

bool TcpLink::pump() {
  const bool refilled = refill();
  return flush() || refilled;
}

void TcpLink::on_ready(uint32_t events) {
  if (handshake_) {
    on_handshake();
    return;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) receive();
  if (socket_.valid() && (events & EPOLLOUT) != 0) pump();
}

bool TcpLink::receive() {
  // Bounded, so that one busy peer cannot keep the others waiting; epoll calls again.
  for (int turn = 0; turn < 64 && socket_.valid(); ++turn) {
    char* at = nullptr;
    size_t want = 0;
    if (header_got_ < sizeof(Frame)) {
      at = reinterpret_cast<char*>(&incoming_) + header_got_;
      want = sizeof(Frame) - header_got_;
    } else {
      at = reinterpret_cast<char*>(payload_.get()) + payload_got_;
      want = incoming_.length - payload_got_;
    }
    const ssize_t got = ::recv(socket_.get(), at, want, MSG_DONTWAIT);
    if (got == 0) {
      break_off("its connection ended");
      return true;
    }
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) break_off(std::string("its connection broke: ") + std::strerror(errno));
      return turn > 0;
    }
    if (header_got_ < sizeof(Frame)) {
      header_got_ += static_cast<size_t>(got);
      if (header_got_ < sizeof(Frame)) continue;
      if (!accept_frame()) return true;
    } else {
      payload_got_ += static_cast<size_t>(got);
    }
    if (payload_ == nullptr || payload_got_ == incoming_.length) deliver();
  }
  return true;
}

bool TcpLink::accept_frame() {
  if (incoming_.kind < FrameKind::round || incoming_.kind > FrameKind::landed) {
    break_off("it sent a frame of unknown kind " + std::to_string(static_cast<int>(incoming_.kind)));
    return false;
  }
  const bool is_data = incoming_.kind == FrameKind::data;
  const bool is_note = incoming_.kind == FrameKind::round && incoming_.length > 0;
  if (!is_data && !is_note) return true;
  if (incoming_.length == 0 || incoming_.length > (is_data ? kFrameBytes : kNoteBytes)) {
    break_off("it sent a frame with " + std::to_string(incoming_.length) + " bytes");
    return false;
  }
  payload_ = std::make_unique_for_overwrite<std::byte[]>(incoming_.length);
  payload_got_ = 0;
  return true;
}

void TcpLink::deliver() {
  const Frame frame = incoming_;
  header_got_ = 0;
  if (frame.kind == FrameKind::data) {
    const std::byte* data = payload_.get();
    if (!events_.expects(frame.key())) {  // the operation failed here; its bytes are nobody's any more
      payload_.reset();
      return;
    }
    in({frame.key(), frame.channel}).pieces.push_back({data, frame.length, frame.length, kNoSlot, std::move(payload_)});
    payload_.reset();
  } else if (frame.kind == FrameKind::taken) {
    const auto found = out_.find({frame.key(), frame.channel});
    if (found != out_.end()) found->second.credit += frame.length;
    pump();
  } else {
    const auto payload = std::exchange(payload_, nullptr);
    events_.on_frame(peer_, frame, {payload.get(), payload ? frame.length : 0});
  }
}

void TcpLink::consume(const StreamKey& key, InStream& stream, size_t size) {
  auto& piece = stream.pieces.front();
  piece.data += size;
  piece.size -= size;
  stream.ungranted += size;
  if (piece.size == 0) stream.pieces.pop_front();
  if (stream.ungranted < kWindow / 4) return;
  send({.group = key.operation.group, .sequence = key.operation.sequence, .kind = FrameKind::taken,
        .channel = key.channel, .length = std::exchange(stream.ungranted, 0)});
}

void TcpLink::close(const OperationKey& key) {
  for (auto at = queue_.begin(); at != queue_.end();) {
    if (at->stream == nullptr || at->frame.key() != key) {
      ++at;
    } else if (at->sent == 0) {
      --queued_data_;
      at = queue_.erase(at);
    } else {  // half a frame is on the wire: the rest must follow, from memory that stays
      const size_t bytes = at->size - sizeof(Frame);
      at->kept = std::make_unique_for_overwrite<std::byte[]>(bytes);
      std::memcpy(at->kept.get(), at->payload, bytes);
      at->payload = at->kept.get();
      at->stream = nullptr;
      ++at;
    }
  }
  Link::close(key);
}

}  // namespace multiring
