// Memory for payload on its way in or out: large buffers are used again while they are warm in cache.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace multiring {

using Payload = std::shared_ptr<std::byte[]>;

// Fresh memory of this size would be mapped, and its pages faulted in, for every frame.
class PayloadPool : public std::enable_shared_from_this<PayloadPool> {
 public:
  static constexpr size_t kBytes = 128 * 1024;

  // Room for `size` bytes, at most kBytes; it comes back here when nobody holds it any more.
  Payload take(size_t size) {
    if (size <= kSmall) return Payload(new std::byte[size]);
    std::unique_ptr<std::byte[]> buffer;
    if (spare_.empty()) {
      buffer.reset(new std::byte[kBytes]);
    } else {
      buffer = std::move(spare_.back());
      spare_.pop_back();
    }
    return Payload(buffer.release(), [pool = shared_from_this()](std::byte* back) {
      std::unique_ptr<std::byte[]> returned(back);
      if (pool->spare_.size() < kMostSpare) pool->spare_.push_back(std::move(returned));
    });
  }

 private:
  static constexpr size_t kSmall = 16 * 1024;  // the allocator is quick at these, and many may wait at once
  static constexpr size_t kMostSpare = 16;     // more would not stay in cache
  std::vector<std::unique_ptr<std::byte[]>> spare_;
};

}  // namespace multiring
