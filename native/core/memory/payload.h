// Memory for payload that is being sent or received. Large buffers are reused while they are warm in cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace multiring {

using Payload = std::shared_ptr<std::byte[]>;

// A pool of payload buffers. Without it, every frame would map fresh memory and pay its page faults. All links of a
// rank share one pool, so the kept memory does not grow with the number of links. Thread-safe.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  static constexpr size_t kBytes = 128 * 1024;
  static constexpr size_t kMostSpare = 64;  // buffers (8 MiB): enough for a few busy links

  // Returns memory for `size` bytes, at most kBytes. The memory returns to the pool with its last reference. Throws
  // std::bad_alloc.
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
  static constexpr size_t kSmall = 16 * 1024;  // up to this size the allocator is fast, and many buffers may be in use

  struct Unmap {
    void operator()(std::byte* buffer) const { ::munmap(buffer, kBytes); }
  };
  using Buffer = std::unique_ptr<std::byte, Unmap>;

  // Maps memory from the kernel, because an allocator would keep the memory of a peak for good.
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
