#include "sealed_stream.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace multiring {

SealedStream::SealedStream(SealPair seals) : seals_(std::move(seals)), out_(kMostBytes), in_(kInBytes) {}

// ---- out -----------------------------------------------------------------------------------

bool SealedStream::flush(int socket) {
  while (pending() > 0) {
    const ssize_t sent = ::send(socket, out_.data() + out_from_, pending(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    out_from_ += static_cast<size_t>(sent);
  }
  return true;
}

ssize_t SealedStream::write(int socket, std::span<const iovec> parts) {
  if (!flush(socket)) return -1;
  std::array<std::span<const std::byte>, 16> taken;
  size_t count = 0;
  size_t size = 0;
  for (const iovec& part : parts) {
    if (count == taken.size() || size == kRecordBytes) break;
    taken[count] = {static_cast<const std::byte*>(part.iov_base), std::min(part.iov_len, kRecordBytes - size)};
    size += taken[count++].size();
  }
  if (size == 0) return 0;
  const auto length = static_cast<uint32_t>(size);
  std::memcpy(out_.data(), &length, kHeadBytes);
  if (!seals_.out->seal({out_.data(), kHeadBytes}, {taken.data(), count}, out_.data() + kHeadBytes)) {
    // The end of the connection ends the operations; a silent connection would let them wait.
    ::shutdown(socket, SHUT_RDWR);
    errno = EPIPE;
    return -1;
  }
  out_from_ = 0;
  out_to_ = kHeadBytes + size + Seal::kTagBytes;
  produced_ += out_to_;
  if (!flush(socket) && errno != EAGAIN) return -1;
  return static_cast<ssize_t>(size);
}

// ---- in ------------------------------------------------------------------------------------

ssize_t SealedStream::fail(std::string why) {
  why_ = std::move(why);
  errno = EBADMSG;
  return -1;
}

uint32_t SealedStream::next_size() const {
  uint32_t size = 0;
  std::memcpy(&size, in_.data() + in_from_, kHeadBytes);
  return size;
}

// An invalid size counts as a record, so that `open_record` rejects it at once.
bool SealedStream::has_record() const {
  const size_t there = in_to_ - in_from_;
  if (there < kHeadBytes) return false;
  const size_t size = next_size();
  return size == 0 || size > kRecordBytes || there >= kHeadBytes + size + Seal::kTagBytes;
}

// Decrypts the next record in place. Returns false if it is not authentic.
bool SealedStream::open_record() {
  const size_t size = next_size();
  if (size == 0 || size > kRecordBytes) return false;
  std::byte* head = in_.data() + in_from_;
  std::byte* body = head + kHeadBytes;
  if (!seals_.in->open({head, kHeadBytes}, {body, size + Seal::kTagBytes}, body)) return false;
  plain_from_ = in_from_ + kHeadBytes;
  plain_to_ = plain_from_ + size;
  in_from_ = plain_to_ + Seal::kTagBytes;
  ++opened_;
  return true;
}

ssize_t SealedStream::fill(int socket) {
  if (in_from_ > 0) {
    std::memmove(in_.data(), in_.data() + in_from_, in_to_ - in_from_);
    in_to_ -= std::exchange(in_from_, 0);
    plain_from_ = plain_to_ = 0;
  }
  const size_t room = in_.size() - in_to_;
  const ssize_t got = ::recv(socket, in_.data() + in_to_, room, MSG_DONTWAIT);
  is_drained_ = got < static_cast<ssize_t>(room);
  if (got > 0) in_to_ += static_cast<size_t>(got);
  if (got == 0 && in_to_ > 0) return fail("it ended in the middle of a sealed record");
  return got;
}

ssize_t SealedStream::read(int socket, std::span<const iovec> parts) {
  if (!why_.empty()) return fail(why_);
  size_t done = 0;
  for (const iovec& part : parts) {
    auto* to = static_cast<std::byte*>(part.iov_base);
    for (size_t filled = 0; filled < part.iov_len;) {
      if (plain_from_ == plain_to_) {
        if (!has_record()) {
          if (done > 0) return static_cast<ssize_t>(done);
          const ssize_t got = fill(socket);
          if (got <= 0) return got;
          continue;
        }
        if (!open_record()) {
          why_ = "its sealed record " + std::to_string(opened_) +
                 " is not authentic: the bytes on the connection were changed";
          // The bytes before it are authentic. The next call reports the failure.
          return done > 0 ? static_cast<ssize_t>(done) : fail(why_);
        }
      }
      const size_t step = std::min(part.iov_len - filled, plain_to_ - plain_from_);
      std::memcpy(to + filled, in_.data() + plain_from_, step);
      plain_from_ += step;
      filled += step;
      done += step;
    }
  }
  return static_cast<ssize_t>(done);
}

}  // namespace multiring
