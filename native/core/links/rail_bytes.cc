#include "rail.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#if defined(__SANITIZE_THREAD__)
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
#endif

namespace multiring {

namespace {

// Sends. The peer may answer before the call returns, and its answer may be written to where the sent bytes are. That is
// in order, because the kernel had copied them by then; but ThreadSanitizer notes the call's reads at its return. So it
// must not note those of a call without the mutex.
ssize_t send_parts(int socket, const msghdr& message, [[maybe_unused]] bool is_aside) {
#if defined(__SANITIZE_THREAD__)
  if (is_aside) AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
#endif
  const ssize_t wrote = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
#if defined(__SANITIZE_THREAD__)
  if (is_aside) AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
  return wrote;
}

}  // namespace

// ---- out -----------------------------------------------------------------------------------

ssize_t Rail::write(std::span<iovec> parts) {
  if (stream_) return stream_->write(socket_.get(), parts);
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return send_parts(socket_.get(), message, is_writing_);
}

void Rail::push(Outgoing outgoing) {
  if (outgoing.is_data()) ++queued_data_;
  queue_.push_back(std::move(outgoing));
}

void Rail::push_urgent(Outgoing outgoing) {
  // Insert behind the last non-data frame, because non-data frames stay in order.
  const auto behind =
      std::find_if(queue_.rbegin(), queue_.rend(), [](const Outgoing& o) { return !o.is_data() || o.has_begun(); });
  queue_.insert(behind.base(), std::move(outgoing));
}

void Rail::push_first(std::deque<Outgoing> frames) {
  queued_data_ +=
      static_cast<size_t>(std::count_if(frames.begin(), frames.end(), [](const Outgoing& o) { return o.is_data(); }));
  const auto before = std::find_if(queue_.begin(), queue_.end(), [](const Outgoing& o) { return !o.has_begun(); });
  queue_.insert(before, std::make_move_iterator(frames.begin()), std::make_move_iterator(frames.end()));
}

size_t Rail::queued_bytes() const {
  size_t sum = 0;
  for (const Outgoing& outgoing : queue_) sum += outgoing.size() - outgoing.sent;
  return sum;
}

bool Rail::leaves_to_thread() {
  if (thread_ == nullptr || (!is_writing_ && queued_bytes() <= kFewBytes)) return false;
  thread_->wake();
  return true;
}

// Collects the next bytes of the queue for a write. Returns the number of parts.
size_t Rail::gather(std::span<iovec> parts, bool in_thread) {
  write_ = {};
  size_t count = 0;
  for (auto at = queue_.begin(); at != queue_.end() && count + 2 <= parts.size(); ++at) {
    const size_t header = at->sent < sizeof(Packet) ? sizeof(Packet) - at->sent : 0;
    if (header > 0) parts[count++] = {reinterpret_cast<char*>(&at->packet) + at->sent, header};
    const size_t payload = at->size() - at->sent - header;
    if (payload > 0) {
      const std::byte* from = at->payload + (at->sent + header - sizeof(Packet));
      parts[count++] = {const_cast<std::byte*>(from), payload};
    }
    at->in_flight = in_thread;
    write_.offered += header + payload;
  }
  return count;
}

// Writes without the mutex. Another thread that needs the result meanwhile accounts for it (settle_write).
void Rail::write_aside(std::span<iovec> parts) {
  is_writing_ = true;
  write_call_.lock();
  thread_->mutex.unlock();
  write_.wrote = write(parts);
  write_.error = errno;
  write_call_.unlock();
  thread_->mutex.lock();
}

// Waits until the thread's write has ended, and accounts for it. The caller holds RankState::mutex.
void Rail::settle_write() {
  if (!is_writing_) return;
  { const std::lock_guard wait(write_call_); }
  account_for_write();
}

void Rail::settle_read() {
  if (!is_reading_) return;
  const std::lock_guard wait(read_call_);
}

// Applies the result of the last write to the queue. Returns true if the kernel may accept more.
bool Rail::account_for_write() {
  if (std::exchange(is_writing_, false)) {
    for (Outgoing& outgoing : queue_) outgoing.in_flight = false;
  }
  if (write_.wrote < 0) {
    if (write_.error == EINTR) return true;
    // A peer that left has closed its end. This rank must still read its last messages, and then the end.
    wants_write_ = write_.error == EAGAIN;
    is_mute_ = !wants_write_;
    return false;
  }
  written_ = stream_ ? stream_->produced() : written_ + static_cast<uint64_t>(write_.wrote);
  auto left = static_cast<size_t>(write_.wrote);
  while (left > 0) {
    Outgoing& first = queue_.front();
    const size_t step = std::min(left, first.size() - first.sent);
    first.sent += step;
    left -= step;
    if (first.sent < first.size()) break;
    if (first.is_data()) --queued_data_;
    if (first.stream != nullptr) first.stream->taken += first.packet.frame.length;
    if (keeps_) {
      first.end = stream_ ? written_ : written_ - left;  // a sealed frame arrives with its record
      unacknowledged_.push_back(std::move(first));
    }
    queue_.pop_front();
  }
  wants_write_ = stream_ ? stream_->pending() > 0 : static_cast<size_t>(write_.wrote) < write_.offered;
  return !wants_write_;
}

bool Rail::flush(bool in_thread) {
  if (is_writing_) return false;  // the rail's thread goes on with the queue
  bool any = false;
  wants_write_ = false;
  if (pending() > 0 && socket_.valid() && !is_mute_) {
    const size_t before = pending();
    if (!stream_->flush(socket_.get())) {
      wants_write_ = errno == EAGAIN;
      is_mute_ = !wants_write_;
    }
    any = pending() < before;
  }
  while (socket_.valid() && !is_mute_ && !wants_write_ && !queue_.empty()) {
    std::array<iovec, 16> parts{};
    const size_t count = gather(parts, in_thread);
    if (in_thread) {
      write_aside({parts.data(), count});
      if (!is_writing_) return true;  // another thread has accounted for it
    } else {
      write_.wrote = write({parts.data(), count});
      write_.error = errno;
    }
    any |= write_.wrote > 0;
    if (!account_for_write() || in_thread) break;
  }
  if (keeps_ && any) drop_acknowledged();
  return any;
}

void Rail::watch_writes() {
  if (!socket_.valid() || wants_write_ == watches_write_) return;
  watches_write_ = wants_write_;
  watcher().change(socket_.get(), wants_write_ ? EPOLLIN | EPOLLRDHUP | EPOLLOUT : EPOLLIN | EPOLLRDHUP);
}

size_t Rail::in_transit() const {
  int left = 0;
  return socket_.valid() && ::ioctl(socket_.get(), SIOCOUTQ, &left) == 0 ? static_cast<size_t>(left) + pending() : 0;
}

void Rail::drop_acknowledged() {
  int left = 0;
  if (unacknowledged_.empty() || !socket_.valid() || ::ioctl(socket_.get(), SIOCOUTQ, &left) != 0) return;
  // The unacknowledged bytes may include bytes of the handshake, which `written_` does not count.
  const uint64_t acknowledged = written_ - std::min(written_, static_cast<uint64_t>(left) + pending());
  while (!unacknowledged_.empty() && unacknowledged_.front().end <= acknowledged) unacknowledged_.pop_front();
}

bool Rail::holds_unacknowledged() {
  drop_acknowledged();
  return !unacknowledged_.empty() || !queue_.empty();
}

std::deque<Outgoing> Rail::take_unacknowledged() {
  settle_write();
  drop_acknowledged();
  std::deque<Outgoing> frames = std::exchange(unacknowledged_, {});
  std::list<Outgoing> rest;
  for (Outgoing& outgoing : queue_) {
    if (outgoing.sent > 0 && socket_.valid()) rest.push_back(outgoing);  // a partly sent frame must be completed
    frames.push_back(std::move(outgoing));
  }
  queue_ = std::move(rest);
  queued_data_ =
      static_cast<size_t>(std::count_if(queue_.begin(), queue_.end(), [](const Outgoing& o) { return o.is_data(); }));
  for (Outgoing& outgoing : frames) outgoing.sent = 0;
  return frames;
}

void Rail::close_operation(const OperationKey& key, PayloadPool& pool) {
  const bool is_written = std::any_of(queue_.begin(), queue_.end(), [&](const Outgoing& outgoing) {
    return outgoing.in_flight && outgoing.packet.frame.key() == key;
  });
  if (is_written) settle_write();
  for (auto at = queue_.begin(); at != queue_.end();) {
    if (at->stream == nullptr || at->packet.frame.key() != key) {
      ++at;
    } else if (at->sent == 0) {
      --queued_data_;
      at = queue_.erase(at);
    } else {  // part of the frame has been sent; the rest must follow, from memory that stays valid
      at->kept = pool.take(at->packet.frame.length);
      std::memcpy(at->kept.get(), at->payload, at->packet.frame.length);
      at->payload = at->kept.get();
      at->stream = nullptr;
      ++at;
    }
  }
  const bool comes = header_got_ == sizeof(Packet) && incoming_.frame.kind == FrameKind::data;
  if (comes && incoming_.frame.key() == key) abandon({key, incoming_.frame.channel}, pool);
}

void Rail::abandon(const StreamKey& key, PayloadPool& pool) {
  const Frame& frame = incoming_.frame;
  if (header_got_ < sizeof(Packet) || frame.kind != FrameKind::data || !place_.wanted) return;
  if (frame.key() != key.operation || frame.channel != key.channel) return;
  place_.wanted = false;
  if (place_.owned) return;
  settle_read();  // what it reads now still goes to the former place
  place_.owned = pool.take(frame.length);
  place_.at = place_.owned.get();
}

// ---- in ------------------------------------------------------------------------------------

void Rail::on_ready(uint32_t events) {
  if (handshake_) {
    on_handshake();
    return;
  }
  // The number of reads is bounded, so that one busy peer does not delay the others. epoll reports the rest again.
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
    receive(thread_ != nullptr ? kThreadReads : kReads);
  }
  if (socket_.valid() && (events & EPOLLOUT) != 0) owner_.on_writable(*this);
}

void Rail::receive_all() {
  if (receives_) return;  // a recursive call, from a callback of this rail
  while (receive(kReads)) {
  }
}

// Returns false if no more bytes are available.
bool Rail::receive(int turns) {
  receives_ = true;
  bool more = true;
  // epoll does not report bytes that are decrypted already, so they are read in any case.
  const auto holds = [this] { return stream_ && stream_->holds(); };
  for (int turn = 0; more && socket_.valid() && (turn < turns || holds()); ++turn) more = receive_some();
  receives_ = false;
  return more && socket_.valid();
}

// Reads. The rail's own thread releases the mutex meanwhile, and nobody else calls.
ssize_t Rail::read(std::span<const iovec> room) {
  const auto reads = [&] {
    return stream_ ? stream_->read(socket_.get(), room)
                   : ::readv(socket_.get(), room.data(), static_cast<int>(room.size()));
  };
  if (thread_ == nullptr) return reads();
  is_reading_ = true;
  read_call_.lock();
  thread_->mutex.unlock();
  const ssize_t got = reads();
  const int error = errno;
  read_call_.unlock();
  thread_->mutex.lock();
  is_reading_ = false;
  errno = error;
  return got;
}

bool Rail::receive_some() {
  for (;;) {
    // One call reads the rest of a payload to its place and the bytes after it into the staging buffer. Thus the next
    // header costs no separate call.
    const bool in_payload = header_got_ == sizeof(Packet);
    std::array<iovec, 2> parts{};
    const size_t rest = in_payload ? payload_of(incoming_.frame) - payload_got_ : 0;
    const size_t aside = in_payload ? kSpillBytes : kStagingBytes;
    parts[0] = {place_.at + payload_got_, rest};
    parts[1] = {staging_.data(), aside};
    const std::span<const iovec> room(&parts[in_payload ? 0 : 1], in_payload ? 2 : 1);
    const ssize_t got = read(room);
    if (!socket_.valid()) return false;  // another thread has closed the rail meanwhile
    if (got == 0) {
      end("its connection ended");
      return false;
    }
    if (got < 0) {
      if (errno == EINTR) continue;
      if (errno == EBADMSG && stream_) {
        close();
        owner_.on_cut(*this, stream_->why());
      } else if (errno != EAGAIN) {
        end(std::string("its connection broke: ") + std::strerror(errno));
      }
      return false;
    }
    const auto bytes = static_cast<size_t>(got);
    const size_t to_payload = std::min(bytes, rest);
    payload_got_ += to_payload;
    staged_from_ = 0;
    staged_to_ = bytes - to_payload;
    if (in_payload && payload_got_ == incoming_.frame.length) deliver();
    if (!take_staged()) return false;
    // A short read means that no more bytes are available.
    return stream_ ? stream_->holds() || stream_->may_have_more() : bytes == rest + aside;
  }
}

// Parses frames and parts of frames from the staging buffer. Returns false if the rail is broken.
bool Rail::take_staged() {
  while (socket_.valid() && staged_from_ < staged_to_) {
    const size_t there = staged_to_ - staged_from_;
    if (header_got_ < sizeof(Packet)) {
      const size_t step = std::min(there, sizeof(Packet) - header_got_);
      std::memcpy(reinterpret_cast<std::byte*>(&incoming_) + header_got_, staging_.data() + staged_from_, step);
      header_got_ += step;
      staged_from_ += step;
      if (header_got_ < sizeof(Packet)) break;
      payload_got_ = 0;
      const Frame& frame = incoming_.frame;
      if (frame.kind < FrameKind::round || frame.kind > FrameKind::control_taken || frame.kind == FrameKind::reads) {
        break_off("it sent a frame of unknown kind " + std::to_string(static_cast<int>(frame.kind)));
      } else if (payload_of(frame) == 0 && frame.kind != FrameKind::data) {
        deliver();
      } else if (frame.length == 0 ||
                 frame.length > (frame.kind == FrameKind::data ? PayloadPool::kBytes : kNoteBytes)) {
        break_off("it sent a frame with an invalid length of " + std::to_string(frame.length) + " bytes");
      } else {
        owner_.place(*this, frame, place_);
      }
      continue;
    }
    const size_t step = std::min<size_t>(there, incoming_.frame.length - payload_got_);
    std::memcpy(place_.at + payload_got_, staging_.data() + staged_from_, step);
    payload_got_ += step;
    staged_from_ += step;
    if (payload_got_ == incoming_.frame.length) deliver();
  }
  return socket_.valid();
}

void Rail::deliver() {
  const Packet packet = incoming_;
  header_got_ = 0;
  owner_.on_packet(*this, packet, std::exchange(place_, {}));
}

}  // namespace multiring
