#include "descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "fault.h"

namespace multiring {
namespace {

constexpr int kMost = 65536;
// One flag per descriptor number. The flags are atomics, because the child of a fork must not use locks.
std::array<std::atomic<bool>, kMost> owned{};
std::atomic<uint64_t> forks{0};
std::once_flag handler_once;

void close_in_child() {
  forks.fetch_add(1);
  for (int fd = 0; fd < kMost; ++fd) {
    if (owned[static_cast<size_t>(fd)].exchange(false)) ::close(fd);
  }
}

}  // namespace

void throw_errno(FaultKind kind, const std::string& call) {
  const int code = errno;
  throw Fault(kind, call + ": " + std::strerror(code) + " (errno " + std::to_string(code) + ")");
}

Origin::Origin() : forks_(forks.load(std::memory_order_relaxed)) {
  std::call_once(handler_once, [] { pthread_atfork(nullptr, nullptr, close_in_child); });
}

bool Origin::is_inherited() const { return forks_ != forks.load(std::memory_order_relaxed); }

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd_ >= 0 && fd_ < kMost) owned[static_cast<size_t>(fd_)].store(true);
}

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), origin_(other.origin_) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    origin_ = other.origin_;
  }
  return *this;
}

void Descriptor::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  // A forked child has already closed an inherited descriptor, and may have reused its number.
  if (fd >= kMost || (!origin_.is_inherited() && owned[static_cast<size_t>(fd)].exchange(false))) ::close(fd);
}

}  // namespace multiring
