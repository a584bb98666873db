// The work queue between links and the carrier, the one thread that calls MPI.
//
// A bounce buffer is one MPI message in memory of the proxy. MPI never accesses an operation's memory, so an operation
// can end or fail without cancelling MPI requests. Links hand buffers over while they hold the rank's mutex; the
// carrier collects them without it.
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
  uint64_t number;  // identifies the buffer to the carrier
  int peer;
  uint32_t tag;
  bool is_outgoing;  // true: to be sent; false: to be received
  std::byte* data;
  size_t size;  // bytes
};

class MpiProxy {
 public:
  // Large enough that the cost per message is negligible, and small enough that several fit into a stream's window.
  static constexpr size_t kBounceBytes = 256 * 1024;
  using Memory = std::unique_ptr<std::byte[]>;

  MpiProxy() = default;
  ~MpiProxy();
  MpiProxy(const MpiProxy&) = delete;
  MpiProxy& operator=(const MpiProxy&) = delete;

  // For links.
  Memory memory();  // returns kBounceBytes of memory
  void recycle(Memory memory);  // keeps memory for reuse
  // Queues a send or a receive of `size` bytes. Returns the number of the bounce buffer.
  uint64_t hand_over(int peer, uint32_t tag, bool is_outgoing, Memory memory, size_t size);
  // Changes the number of sent bounce buffers whose arrival is not confirmed. While there are any, the carrier keeps
  // calling MPI, because MPI may need calls even after a send is complete on this side.
  void expect_landings(int64_t change);
  void forget(int peer);  // drops all bounce buffers of a lost peer
  bool is_quiet() const;  // true if nothing waits to be sent and every sent bounce buffer has arrived
  void close();           // makes `collect` return with is_closed

  // For the carrier.
  struct Work {
    std::vector<BounceBuffer> bounces;  // bounce buffers handed over since the last call
    std::vector<int> gone;              // peers lost since the last call: abandon their bounce buffers
    bool is_pending = false;            // messages are in transit, so the carrier must call MPI again soon
    bool is_closed = false;
  };
  // Returns new work at once. Without new work it waits: at most `pause` while messages are in transit, else until
  // there is work.
  Work collect(std::chrono::nanoseconds pause);
  // Reports that MPI has sent or received a bounce buffer. Returns it with its memory, or nullopt if the buffer was
  // dropped.
  std::optional<std::pair<BounceBuffer, Memory>> finish(uint64_t number);

 private:
  struct BounceInTransit {
    BounceBuffer bounce;
    Memory memory;
    bool is_collected;
  };
  bool is_pending() const { return !entries_.empty() || landings_ > 0; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, BounceInTransit> entries_;
  uint64_t next_number_ = 1;
  size_t outgoing_ = 0;
  int64_t landings_ = 0;
  std::vector<BounceBuffer> fresh_;
  std::vector<int> gone_;
  std::vector<Memory> spare_;
  bool is_closed_ = false;
};

}  // namespace multiring
