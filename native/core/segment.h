// One rank's shared memory: a control page, a ring of frames from each local rank, and a heap.
//
// Each rank owns one sparse memfd; the other ranks of its host map it once. Allocation is local to
// the owner and lives in private memory, so a rank that is killed leaves nothing half-changed that
// another rank would read. Pages exist only once written.
//
// Freed blocks of 1 MiB or more stay resident ("warm"), because a program that gathers into fresh memory at every step
// would otherwise pay a page fault every 4 KiB of every step. Warm memory is bounded: beyond kWarmBytes the blocks
// freed longest ago give their pages back to the kernel. Where a program then wants fresh pages for as much, as
// fully_shard does at every step, the bound grows by it, up to kWarmestBytes: memory that was wanted once is given
// back, memory that is wanted again and again stays. Smaller blocks keep their pages.
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
inline constexpr size_t kPagedBytes = size_t{64} << 10;  // a block of so much, or more, begins with a page

// Frames from one local rank to the segment's owner: one producer, one consumer.
struct Ring {
  static constexpr uint64_t kEntries = 126;
  alignas(64) std::atomic<uint64_t> produced;
  alignas(64) std::atomic<uint64_t> consumed;
  alignas(64) Frame entries[kEntries];
};
static_assert(sizeof(Ring) == 8192);

struct ControlPage {
  static constexpr uint32_t kFutexSleeper = 1;   // a caller's thread sleeps on `sleepers`
  static constexpr uint32_t kSocketSleeper = 2;  // the progress thread sleeps on its sockets
  alignas(64) std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint64_t> pending[kMaxLocalRanks / 64];  // bit i: ring i has news
  // How many operations wait for slots of SharedSlots; a line of its own, as every small operation of a peer looks.
  alignas(64) std::atomic<uint32_t> in_slots;
};
static_assert(sizeof(ControlPage) <= kPage);

// The operations that failed on the segment's owner, the last ones. One is entered before the owner's user has its
// memory back, so that a peer that has read there and does not find it here has read what it was meant to.
struct Failures {
  static constexpr uint64_t kEntries = 16 * 1024 - 4;
  alignas(64) std::atomic<uint64_t> count;  // ever
  struct Entry {
    std::atomic<uint64_t> group;
    std::atomic<uint64_t> sequence;
  };
  alignas(64) Entry entries[kEntries];

  void enter(const OperationKey& key);
};
static_assert(sizeof(Failures) % kPage == 0);

// Any mapped segment, own or a peer's.
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

// The segment this rank owns, with its allocator. Thread-safe.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  static constexpr size_t kWarmBytes = size_t{256} << 20;
  static constexpr size_t kWarmestBytes = size_t{1} << 30;
  // `page_bytes`: the kernel's, which takes back whole ones only; 0: what it says they are.
  explicit Segment(size_t bytes, size_t warm_bytes = kWarmBytes, size_t warmest_bytes = kWarmestBytes,
                   size_t page_bytes = 0);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Returns 64-byte aligned memory (of kPagedBytes and more: at a page's start); zero-filled only when fresh.
  // Blocks of 1 MiB or more come from warm memory where it has room, the most recently freed first.
  std::byte* allocate(size_t bytes);
  // The same for good: it is nobody's to release, and no user's memory.
  std::byte* reserve(size_t bytes);
  void release(std::byte* block);  // in a forked child nothing: the memory is the parent's
  // Never hands out again the block that holds `address`: another rank may still write into it.
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
  std::deque<Range> warm_;  // whole pages of free_, disjoint, the longest free first
  size_t warm_bytes_ = 0;
  size_t given_back_ = 0;  // bytes of pages, since when no fresh ones were wanted for as many
  std::set<size_t> quarantined_;  // offsets of blocks that stay used for good
};

}  // namespace multiring
