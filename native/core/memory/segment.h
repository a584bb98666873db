// One rank's shared memory: a control page, a ring of frames from each local rank, and a heap.
//
// Each rank owns one sparse memfd; the other ranks of its host map it once. Only the owner allocates, and its allocator
// state is private. Therefore a killed rank leaves no half-changed state that another rank could read. Pages exist only
// after they are written.
//
// Freed blocks of 1 MiB or more stay resident ("warm"). Otherwise a program that gathers into fresh memory at every
// step would pay a page fault per 4 KiB in every step. Warm memory is bounded: beyond kWarmBytes, the pages of the
// blocks that were freed longest ago return to the kernel. If the program then needs fresh pages again, as fully_shard
// does at every step, the bound grows by the same amount, up to kWarmestBytes. Thus memory that a program uses once is
// returned, and memory that it uses repeatedly stays. Smaller blocks keep their pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "descriptor.h"
#include "frame.h"

namespace multiring {

inline constexpr uint32_t kMaxLocalRanks = 1024;
inline constexpr size_t kPage = 4096;
inline constexpr size_t kPagedBytes = size_t{64} << 10;  // blocks of at least this size start at a page boundary

// The frames from one local rank to the segment's owner. It has one producer and one consumer.
struct Ring {
  static constexpr uint64_t kEntries = 126;
  alignas(64) std::atomic<uint64_t> produced;
  alignas(64) std::atomic<uint64_t> consumed;
  alignas(64) Frame entries[kEntries];
};
static_assert(sizeof(Ring) == 8192);

struct ControlPage {
  static constexpr uint32_t kFutexSleeper = 1;   // a caller sleeps on the futex `sleepers`
  static constexpr uint32_t kSocketSleeper = 2;  // the progress thread sleeps on its sockets
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint64_t> pending[kMaxLocalRanks / 64];  // bit i: ring i has new frames
  // The number of operations that wait in SharedSlots. It has its own cache line, because a peer reads it in every
  // small operation.
  alignas(64) std::atomic<uint32_t> in_slots;
};
static_assert(sizeof(ControlPage) <= kPage);

// The operations that failed most recently on the segment's owner. The owner enters an operation before the user gets
// its memory back. If a peer has read that memory and does not find the operation here, the bytes it read are valid.
struct Failures {
  static constexpr uint64_t kEntries = 16 * 1024 - 4;
  alignas(64) std::atomic<uint64_t> count;  // number of failures since the start
  struct Entry {
    std::atomic<uint64_t> group;
    std::atomic<uint64_t> sequence;
  };
  alignas(64) Entry entries[kEntries];

  void enter(const OperationKey& key);
};
static_assert(sizeof(Failures) % kPage == 0);

// A mapped segment, of this rank or of a peer.
class Mapping {
 public:
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  ControlPage& control() const { return *reinterpret_cast<ControlPage*>(base_); }
  Failures& failures() const { return *reinterpret_cast<Failures*>(base_ + kPage); }
  Ring& ring_from(uint32_t local_index) const;
  bool contains(const void* address, size_t bytes) const;

  static constexpr size_t kRingsStart = kPage + sizeof(Failures);
  static constexpr size_t kHeapStart = kRingsStart + sizeof(Ring) * kMaxLocalRanks;

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

// The segment of this rank, with its allocator. Thread-safe.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  static constexpr size_t kWarmBytes = size_t{256} << 20;
  static constexpr size_t kWarmestBytes = size_t{1} << 30;
  // `page_bytes`: the kernel's page size, 0 to ask the kernel. Only whole pages can be returned to the kernel.
  explicit Segment(size_t bytes, size_t warm_bytes = kWarmBytes, size_t warmest_bytes = kWarmestBytes,
                   size_t page_bytes = 0);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Returns memory aligned to 64 bytes, or to a page for kPagedBytes and more. Only fresh memory is zero-filled. Blocks
  // of 1 MiB or more come from warm memory if it has room, the most recently freed first. Throws Fault.
  std::byte* allocate(size_t bytes);
  // Allocates memory for internal use that does not count in `used_bytes`. Memory of `unreserve` comes first.
  std::byte* reserve(size_t bytes);
  // Keeps memory of `reserve` for the next call with the same number of bytes.
  void unreserve(std::byte* block, size_t bytes);
  void release(std::byte* block);  // does nothing in a forked child: the memory belongs to the parent
  // Keeps the block that contains `address` allocated for good, because another rank may still write into it.
  void quarantine(const std::byte* address);

  const Mapping& mapping() const { return *mapping_; }
  int fd() const { return fd_.get(); }
  size_t used_bytes() const;

 private:
  struct Range {
    size_t start;
    size_t end;
  };

  size_t place_of(size_t want, size_t align) const;
  void carve(size_t start, size_t want);
  void cool(size_t start, size_t end);
  void keep_warm(size_t start, size_t size);
  void regret(size_t bytes);

  const Origin origin_;
  Descriptor fd_;
  std::unique_ptr<Mapping> mapping_;
  size_t most_warm_;
  const size_t warmest_;
  const size_t page_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes, never adjacent
  std::map<size_t, size_t> used_;
  std::multimap<size_t, std::byte*> spare_;  // memory of `unreserve` by its number of bytes
  std::deque<Range> warm_;  // disjoint resident page ranges of free_, the longest free first
  size_t warm_bytes_ = 0;
  size_t given_back_ = 0;  // bytes returned to the kernel, minus fresh bytes allocated since
  std::set<size_t> quarantined_;  // offsets of blocks that are never released
};

}  // namespace multiring
