// Tests that nothing is read into the memory of an operation that has ended, if each connection has a thread; and that
// no connection is closed while a thread reads from it.
//
// A thread reads without the rank's mutex, so another thread may end the operation meanwhile, and must wait for the end
// of the read. Reads are short, and such a moment is rare. So this program has a `readv` of its own, which holds a read
// until the operation's memory has another use. Meant to run under TSan and ASan.

#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "core/memory/descriptor.h"
#include "core/rank/context.h"
#include "checks.h"
#include "job.h"

using namespace multiring;
using namespace multiring::checks;

namespace {

using ReadCall = ssize_t (*)(int, const iovec*, int);

constexpr int32_t kOverwritten = -1'000'000;
// An operation that waits for the held read cannot end before the read. So the read goes on by itself after this time.
constexpr auto kHold = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::seconds(60);

bool is_same_file(int one, int other) {
  struct stat first {};
  struct stat second {};
  return ::fstat(one, &first) == 0 && ::fstat(other, &second) == 0 && first.st_ino == second.st_ino;
}

// The read that is held: the first one whose bytes go to certain memory.
class HeldRead {
 public:
  // Holds the next read into `memory`.
  void arm(const std::vector<int32_t>& memory) {
    const std::lock_guard lock(mutex_);
    from_ = reinterpret_cast<const std::byte*>(memory.data());
    to_ = from_ + memory.size() * sizeof(int32_t);
    state_ = HoldState::armed;
    got_ = 0;
    is_memory_reused_ = false;
  }

  bool is_begun() {
    const std::lock_guard lock(mutex_);
    return state_ >= HoldState::begun;
  }

  // Returns true if a read is or will be held; false if none has come, and then none will be.
  bool disarm() {
    const std::lock_guard lock(mutex_);
    if (state_ != HoldState::armed) return true;
    state_ = HoldState::none;
    return false;
  }

  // For the thread of a connection: whether to read by `read_late`.
  bool takes(std::span<const iovec> parts) {
    const std::lock_guard lock(mutex_);
    if (state_ != HoldState::armed || parts.empty() || parts[0].iov_len == 0) return false;
    const auto* at = static_cast<const std::byte*>(parts[0].iov_base);
    if (at < from_ || at >= to_) return false;
    state_ = HoldState::begun;
    return true;
  }

  // The kernel uses a connection until the end of a call, even if the connection is closed meanwhile. The copy of the
  // descriptor has this effect.
  ssize_t read_late(ReadCall read, int fd, std::span<const iovec> parts) {
    const Descriptor own(::dup(fd));
    pollfd arrival{own.get(), POLLIN, 0};
    ::poll(&arrival, 1, static_cast<int>(std::chrono::milliseconds(kPatience).count()));
    std::unique_lock lock(mutex_);
    held_fd_ = fd;
    state_ = HoldState::held;
    changed_.notify_all();
    changed_.wait_for(lock, kHold, [this] { return is_memory_reused_; });
    was_open_ = is_same_file(fd, own.get());
    lock.unlock();
    const ssize_t got = read(own.get(), parts.data(), static_cast<int>(parts.size()));
    const int error = errno;
    lock.lock();
    got_ = got;
    state_ = HoldState::over;
    changed_.notify_all();
    errno = error;
    return got;
  }

  // Returns true if the connection was still open at the end of the hold. Otherwise another one may have its number.
  bool was_open() {
    const std::lock_guard lock(mutex_);
    return was_open_;
  }

  // Waits until a read is held; returns its descriptor.
  int wait_until_held() {
    std::unique_lock lock(mutex_);
    check(changed_.wait_for(lock, kPatience, [this] { return state_ >= HoldState::held; }), "a read is held");
    return held_fd_;
  }

  // Lets the read go on if it is still held, and waits for its end. Returns its result.
  ssize_t finish() {
    std::unique_lock lock(mutex_);
    is_memory_reused_ = true;
    changed_.notify_all();
    check(changed_.wait_for(lock, kPatience, [this] { return state_ == HoldState::over; }), "the held read ends");
    return got_;
  }

 private:
  enum class HoldState : uint8_t { none, armed, begun, held, over };

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::byte* from_ = nullptr;
  const std::byte* to_ = nullptr;
  HoldState state_ = HoldState::none;
  int held_fd_ = -1;
  ssize_t got_ = 0;
  bool is_memory_reused_ = false;
  bool was_open_ = false;
};

HeldRead held_read;

// Ends all connections between the ranks but that of `held`.
void end_other_connections(const std::set<int>& sockets, int held) {
  const auto ports_of = [](int fd) {
    sockaddr_in own{};
    sockaddr_in other{};
    socklen_t length = sizeof own;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
    length = sizeof other;
    ::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length);
    return std::minmax({own.sin_port, other.sin_port});
  };
  const auto ports = ports_of(held);
  for (const int fd : sockets) {
    if (ports_of(fd) != ports) ::shutdown(fd, SHUT_RDWR);
  }
}

enum class Interruption : uint8_t { aborted, link_lost };

// Ends a sum on rank 0 while a thread reads into its memory, then uses the memory for something else.
void ends_while_reading(uint16_t connections, Interruption end) {
  constexpr uint64_t kCount = 8'000'000;
  constexpr uint64_t kMostTurns = 50;
  const std::set<int> before = checks::connections();
  Job job(2, false, false, false, 1, 60, false, false, false, connections);
  const std::set<int> sockets = checks::connections(before);
  std::vector<std::vector<int32_t>> memory(2, std::vector<int32_t>(kCount));
  bool is_held = false;
  // Only a frame that comes after the operation asked for it is read into the operation's memory.
  for (uint64_t turn = 0; turn < kMostTurns && !is_held; ++turn) {
    std::vector<std::shared_ptr<Operation>> operations;
    held_read.arm(memory[0]);
    for (int rank = 0; rank < 2; ++rank) {
      auto& data = memory[static_cast<size_t>(rank)];
      std::fill(data.begin(), data.end(), rank + 1);
      auto spec = spec_of(rank, 2, 1, direct_all_reduce(rank, 2, kCount), data.data(), "sum");
      spec.key.group = 100 + turn;
      operations.push_back(job[rank].post(std::move(spec), false));
    }
    std::thread other([&] { wait_for(job[1], operations[1]); });
    while (!job[0].has_ended(*operations[0]) && !held_read.is_begun()) std::this_thread::yield();
    is_held = held_read.disarm();
    if (is_held) {
      const int held = held_read.wait_until_held();
      if (end == Interruption::aborted) {
        job[0].abort(operations[0], 0);
      } else {
        end_other_connections(sockets, held);
      }
    }
    wait_for(job[0], operations[0]);
    if (is_held) {
      check(operations[0]->fault() != FaultKind::none, "the operation fails");
      std::fill(memory[0].begin(), memory[0].end(), kOverwritten);
      check(held_read.finish() > 0, "the held read gets bytes");
      const auto right = std::count(memory[0].begin(), memory[0].end(), kOverwritten);
      check(held_read.was_open(), "no connection is closed while a thread reads from it");
      check(right == static_cast<int64_t>(kCount), "nothing is read into the memory of an ended operation");
    }
    other.join();
  }
  check(is_held, "a thread reads into the memory of an operation");
  job.in_parallel([&](int rank) { job[rank].close(0, false); });
}

}  // namespace

// The core's calls come here, because a program's definitions come before those of libraries. `next` is that of a
// sanitizer or of the C library.
extern "C" ssize_t readv(int fd, const iovec* parts, int count) {
  static const auto next = reinterpret_cast<ReadCall>(::dlsym(RTLD_NEXT, "readv"));
  const std::span<const iovec> all(parts, static_cast<size_t>(count));
  return held_read.takes(all) ? held_read.read_late(next, fd, all) : next(fd, parts, count);
}

int main() {
  for (const uint16_t connections : {2, 4}) {
    ends_while_reading(connections, Interruption::aborted);
    ends_while_reading(connections, Interruption::link_lost);
  }
  return result();
}
