#include "segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "descriptor.h"
#include "fault.h"

namespace multiring {
namespace {

constexpr size_t kLarge = 1 << 20;  // blocks of at least this size are kept warm, and later returned to the kernel

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }
size_t round_down(size_t value, size_t to) { return value / to * to; }

}  // namespace

// Only one thread at a time may call this function.
void Failures::enter(const OperationKey& key) {
  const uint64_t at = count.load(std::memory_order_relaxed);
  Entry& entry = entries[at % kEntries];
  entry.group.store(key.group, std::memory_order_relaxed);
  entry.sequence.store(key.sequence, std::memory_order_relaxed);
  count.store(at + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // orders the entry before later writes to that memory
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    throw_errno(FaultKind::state, "mapping a segment of " + std::to_string(bytes) +
                                      " bytes (set MULTIRING_SEGMENT_BYTES lower where address space is limited)");
  }
  base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() { ::munmap(base_, bytes_); }

Ring& Mapping::ring_from(uint32_t local_index) const {
  return *reinterpret_cast<Ring*>(base_ + kRingsStart + sizeof(Ring) * local_index);
}

bool Mapping::contains(const void* address, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto low = reinterpret_cast<uintptr_t>(base_);
  return at >= low && bytes <= bytes_ && at - low <= bytes_ - bytes;
}

Segment::Segment(size_t bytes, size_t warm_bytes, size_t warmest_bytes, size_t page_bytes)
    : most_warm_(warm_bytes), warmest_(warmest_bytes),
      page_(page_bytes != 0 ? page_bytes : static_cast<size_t>(::sysconf(_SC_PAGESIZE))) {
  bytes = round_up(bytes, kPage);
  if (bytes < Mapping::kHeapStart + kPage) {
    throw Fault(FaultKind::argument, "MULTIRING_SEGMENT_BYTES is " + std::to_string(bytes) + ", want at least " +
                                         std::to_string(Mapping::kHeapStart + kPage));
  }
  fd_ = Descriptor(::memfd_create("multiring", MFD_CLOEXEC));
  if (!fd_.valid()) throw_errno(FaultKind::state, "memfd_create");
  if (::ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0) throw_errno(FaultKind::state, "sizing a memfd");
  mapping_ = std::make_unique<Mapping>(fd_.get(), bytes);
  free_[Mapping::kHeapStart] = bytes - Mapping::kHeapStart;
}

std::byte* Segment::allocate(size_t bytes) {
  const size_t want = round_up(bytes == 0 ? 1 : bytes, 64);
  const size_t align = want >= kPagedBytes ? kPage : 64;
  if (origin_.is_inherited())
    throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may allocate");
  const std::lock_guard lock(mutex_);
  const size_t start = place_of(want, align);
  if (start == 0) {
    throw Fault(FaultKind::argument, "no room for " + std::to_string(bytes) + " bytes in a segment of " +
                                         std::to_string(mapping_->bytes()) + " (MULTIRING_SEGMENT_BYTES)");
  }
  carve(start, want);
  const size_t warm = warm_bytes_;
  cool(start, start + want);
  if (want >= kLarge) regret(want - std::min(want, warm - warm_bytes_));
  used_[start] = want;
  return mapping_->base() + start;
}

// Returns the offset of `want` free bytes, or 0 (the offset of the control page) if there is no room.
size_t Segment::place_of(size_t want, size_t align) const {
  if (want >= kLarge) {
    const auto fits = [want](const Range& range) { return range.end - range.start >= want; };
    const auto found = std::find_if(warm_.rbegin(), warm_.rend(), fits);
    if (found != warm_.rend()) return found->start;  // the start of a page satisfies every alignment
  }
  for (auto [offset, room] : free_) {
    const size_t start = round_up(offset, align);
    if (room >= start - offset + want) return start;
  }
  return 0;
}

// Removes [start, start + want) from the free block that contains it.
void Segment::carve(size_t start, size_t want) {
  const auto found = std::prev(free_.upper_bound(start));
  const auto [offset, room] = *found;
  free_.erase(found);
  if (start > offset) free_[offset] = start - offset;
  if (offset + room > start + want) free_[start + want] = offset + room - start - want;
}

// Removes [start, end) from the warm ranges; the rest of each range stays warm.
void Segment::cool(size_t start, size_t end) {
  std::deque<Range> left;
  for (const Range& range : warm_) {
    const Range parts[] = {{range.start, std::min(range.end, round_down(start, kPage))},
                           {std::max(range.start, round_up(end, kPage)), range.end}};
    if (range.end <= start || end <= range.start) {
      left.push_back(range);
      continue;
    }
    warm_bytes_ -= range.end - range.start;
    for (const Range& part : parts) {
      if (part.start >= part.end) continue;
      left.push_back(part);
      warm_bytes_ += part.end - part.start;
    }
  }
  warm_ = std::move(left);
}

// Records that the pages of a large free block are resident. Returns the oldest warm pages to the kernel if there are
// too many.
void Segment::keep_warm(size_t start, size_t size) {
  const Range range{start, start + round_down(size, kPage)};
  warm_.push_back(range);
  warm_bytes_ += range.end - range.start;
  while (warm_bytes_ > most_warm_) {
    const Range oldest = warm_.front();
    const size_t from = round_up(oldest.start, page_);
    const size_t to = round_down(oldest.end, page_);
    if (from < to) ::madvise(mapping_->base() + from, to - from, MADV_REMOVE);
    warm_bytes_ -= oldest.end - oldest.start;
    given_back_ += oldest.end - oldest.start;
    warm_.pop_front();
  }
}

// Records that an allocation needs `bytes` of fresh pages. Raises the bound of warm memory by these bytes, as far as
// the segment has returned as many to the kernel.
void Segment::regret(size_t bytes) {
  const size_t missed = std::min(bytes, given_back_);
  given_back_ -= missed;
  most_warm_ = std::max(most_warm_, std::min(most_warm_ + missed, warmest_));
}

std::byte* Segment::reserve(size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto spare = spare_.find(bytes); spare != spare_.end()) return spare_.extract(spare).mapped();
  }
  std::byte* block = allocate(bytes);
  const std::lock_guard lock(mutex_);
  used_.erase(static_cast<size_t>(block - mapping_->base()));
  return block;
}

void Segment::unreserve(std::byte* block, size_t bytes) {
  const std::lock_guard lock(mutex_);
  spare_.emplace(bytes, block);
}

void Segment::release(std::byte* block) {
  if (origin_.is_inherited()) return;
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(block - mapping_->base()));
  if (found == used_.end()) throw Fault(FaultKind::argument, "released a block that is not allocated");
  auto [start, size] = *found;
  if (quarantined_.contains(start)) return;
  used_.erase(found);
  if (size >= kLarge) keep_warm(start, size);
  auto next = free_.lower_bound(start);
  if (next != free_.end() && start + size == next->first) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      before->second += size;
      return;
    }
  }
  free_[start] = size;
}

void Segment::quarantine(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<size_t>(address - mapping_->base());
  const auto after = used_.upper_bound(offset);
  if (after != used_.begin()) quarantined_.insert(std::prev(after)->first);
}

size_t Segment::used_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (auto [offset, size] : used_) total += size;
  return total;
}

}  // namespace multiring
