// What waits to be carried by MPI, and what is on its way; for the one thread that calls MPI: a proxy thread's work.
//
// A bounce buffer is one MPI message, in memory of the proxy's own: MPI never sees an operation's memory, so that
// nothing has to be cancelled before an operation may end or fail. Links hand buffers over with the rank's mutex held;
// the carrier collects them without it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace multiring {

struct BounceBuffer {
  uint64_t number;  // names it to the carrier
  int peer;
  uint32_t tag;
  bool is_outgoing;  // else to be received
  std::byte* data;
  size_t size;  // bytes
};

class MpiProxy {
 public:
  // Long enough that a message's cost does not count, short enough that several are on the way of a stream's window.
  static constexpr size_t kBounceBytes = 256 * 1024;
  using Memory = std::unique_ptr<std::byte[]>;

  MpiProxy() = default;
  ~MpiProxy();
  MpiProxy(const MpiProxy&) = delete;
  MpiProxy& operator=(const MpiProxy&) = delete;

  // For links.
  Memory memory();  // kParcelBytes of it
  void recycle(Memory memory);
  uint64_t hand_over(int peer, uint32_t tag, bool is_outgoing, Memory memory, size_t size);
  // Bounce buffers that left and are not known to have landed change by so many: until they have, MPI may need to be
  // called for them although their sending is complete here.
  void expect_landings(int64_t change);
  void forget(int peer);  // it is gone: its bounce buffers are nobody's
  bool is_quiet() const;  // nothing is to be sent, and what was sent has landed
  void close();

  // For the carrier.
  struct Work {
    std::vector<BounceBuffer> bounces;  // not collected before
    std::vector<int> gone;        // peers whose bounce buffers are to be given up; new since the last time
    bool is_pending = false;      // anything is on its way: MPI is to be called again soon
    bool is_closed = false;
  };
  // New work at once, or after `pause` none; while nothing is on its way, waits until there is some.
  Work collect(std::chrono::nanoseconds pause);
  // A bounce buffer was sent or received; empty: it was given up. Its memory.
  std::optional<std::pair<BounceBuffer, Memory>> finish(uint64_t number);

 private:
  struct Entry {
    BounceBuffer bounce;
    Memory memory;
    bool is_collected;
  };
  bool is_pending() const { return !entries_.empty() || landings_ > 0; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Entry> entries_;
  uint64_t next_number_ = 1;
  size_t outgoing_ = 0;
  int64_t landings_ = 0;
  std::vector<BounceBuffer> fresh_;
  std::vector<int> gone_;
  std::vector<Memory> spare_;
  bool is_closed_ = false;
};

}  // namespace multiring
