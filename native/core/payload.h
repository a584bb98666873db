// Memory for payload on its way in or out: large buffers are used again while they are warm in cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace multiring {

using Payload = std::shared_ptr<std::byte[]>;

// Fresh memory of this size would be mapped, and its pages faulted in, for every frame. One pool serves all links of a
// rank, so that what is kept does not grow with them. Thread-safe.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  static constexpr size_t kBytes = 128 * 1024;
  static constexpr size_t kMostSpare = 64;  // buffers, 8 MiB: those of a few busy links

  // Room for `size` bytes, at most kBytes; it comes back here when nobody holds it any more. std::bad_alloc.
  Payload take(size_t size) {
    if (size <= kSmall) return Payload(new std::byte[size]);
    Buffer buffer = spare();
    if (!buffer) buffer = Buffer(map());
    return Payload(buffer.release(), [pool = shared_from_this()](std::byte* back) { pool->put(Buffer(back)); });
  }

  size_t spare_buffers() const {
    const std::lock_guard lock(mutex_);
    return spare_.size();
  }

 private:
  static constexpr size_t kSmall = 16 * 1024;  // the allocator is quick at these, and many may wait at once

  struct Unmap {
    void operator()(std::byte* buffer) const { ::munmap(buffer, kBytes); }
  };
  using Buffer = std::unique_ptr<std::byte, Unmap>;

  // Of the kernel's own: an allocator would keep what a moment with many links needed.
  static std::byte* map() {
    void* fresh = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    return static_cast<std::byte*>(fresh);
  }

  Buffer spare() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return nullptr;
    Buffer buffer = std::move(spare_.back());
    spare_.pop_back();
    return buffer;
  }

  void put(Buffer buffer) {
    const std::lock_guard lock(mutex_);
    if (spare_.size() < kMostSpare) spare_.push_back(std::move(buffer));
  }

  mutable std::mutex mutex_;
  std::vector<Buffer> spare_;
};

}  // namespace multiring
