#include "segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <string>

#include "fault.h"

namespace multiring {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kReturnToKernel = 1 << 20;  // freed blocks from this size on give their pages back

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

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
  return *reinterpret_cast<Ring*>(base_ + kPage + sizeof(Ring) * local_index);
}

bool Mapping::contains(const void* address, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto low = reinterpret_cast<uintptr_t>(base_);
  return at >= low && bytes <= bytes_ && at - low <= bytes_ - bytes;
}

Segment::Segment(size_t bytes) {
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
  const size_t align = want >= 64 * 1024 ? kPage : 64;
  if (is_forked_child()) throw Fault(FaultKind::state, "this process was forked from a rank; only the rank may allocate");
  const std::lock_guard lock(mutex_);
  for (auto [offset, room] : free_) {
    const size_t start = round_up(offset, align);
    const size_t lost = start - offset;
    if (room < lost + want) continue;
    free_.erase(offset);
    if (lost > 0) free_[offset] = lost;
    if (room > lost + want) free_[start + want] = room - lost - want;
    used_[start] = want;
    return mapping_->base() + start;
  }
  throw Fault(FaultKind::argument, "no room for " + std::to_string(bytes) + " bytes in a segment of " +
                                       std::to_string(mapping_->bytes()) + " (MULTIRING_SEGMENT_BYTES)");
}

std::byte* Segment::reserve(size_t bytes) {
  std::byte* block = allocate(bytes);
  const std::lock_guard lock(mutex_);
  used_.erase(static_cast<size_t>(block - mapping_->base()));
  return block;
}

void Segment::release(std::byte* block) {
  if (is_forked_child()) return;
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(block - mapping_->base()));
  if (found == used_.end()) throw Fault(FaultKind::argument, "released a block that is not allocated");
  auto [start, size] = *found;
  if (condemned_.contains(start)) return;
  used_.erase(found);
  if (size >= kReturnToKernel) ::madvise(mapping_->base() + start, size / kPage * kPage, MADV_REMOVE);
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

void Segment::condemn(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<size_t>(address - mapping_->base());
  const auto after = used_.upper_bound(offset);
  if (after != used_.begin()) condemned_.insert(std::prev(after)->first);
}

size_t Segment::used_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (auto [offset, size] : used_) total += size;
  return total;
}

}  // namespace multiring
