// Records the memory layout of many tensors, and checks whether the layout is unchanged.
//
// Not thread-safe: callers must hold Python's lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace multiring {

// A tensor as DLPack describes it. Strides are in elements; null strides mean row-major order.
struct TensorView {
  uintptr_t address;
  int64_t type;  // code, bits and lanes in one word
  bool is_on_host;
  int32_t dims;
  const int64_t* shape;
  const int64_t* strides;

  bool is_dense() const;  // true if it is contiguous in row-major order, or has no elements
};

class Footprint {
 public:
  void reserve(size_t count);
  // Appends a tensor. Returns false if it is not dense in host memory, or its type differs from the first tensor's.
  bool add(const TensorView& tensor);
  bool has(size_t index, const TensorView& tensor) const;  // true if tensor `index` has the recorded layout
  size_t size() const { return addresses_.size(); }
  uintptr_t address() const { return addresses_.front(); }
  // Returns a key that is equal for tensors with equal types, shapes and offsets from the first tensor.
  std::vector<int64_t> form() const;

 private:
  bool is_plain(const TensorView& tensor) const {
    return tensor.is_on_host && tensor.type == type_ && tensor.is_dense();
  }

  int64_t type_ = 0;
  std::vector<uintptr_t> addresses_;
  std::vector<int32_t> dims_;
  std::vector<int64_t> sizes_;   // the shapes of all tensors, one after another
  std::vector<size_t> sizes_at_;  // where each tensor's shape begins in sizes_
};

// Cache lines to prefetch before the tensors are inspected. They are only hints.
class LineHints {
 public:
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kTensorBytes = 176;  // the size of TensorImpl in torch 2.13

  // Prefetches the targets of the pointers in `object`, one of which may be the tensor's description. Skips `header`
  // bytes and reads at most one line, or `bytes`.
  static void fetch_behind(const void* object, size_t header, size_t bytes);
  void note(uintptr_t address);
  // Adds the lines of a tensor's description at `start`, and the targets of the pointers among its first words.
  void note_tensor(uintptr_t start);
  void fetch() const;
  bool empty() const { return lines_.empty(); }

 private:
  static bool is_likely(uintptr_t address) { return address > kLeastAddress && address < kMostAddress; }
  static constexpr uintptr_t kLeastAddress = uintptr_t{1} << 16;
  static constexpr uintptr_t kMostAddress = uintptr_t{1} << 47;

  std::vector<uintptr_t> lines_;
  std::array<uintptr_t, kLineBytes / sizeof(uintptr_t)> others_{};  // the first words of the previous tensor
};

}  // namespace multiring
