// Where many tensors lie, and whether they still lie there.
//
// Not thread-safe: whoever holds Python's lock calls it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace multiring {

// A tensor as DLPack describes it. Strides in elements; null: row by row.
struct TensorView {
  uintptr_t address;
  int64_t type;  // code, bits and lanes in one word
  bool is_on_host;
  int32_t dims;
  const int64_t* shape;
  const int64_t* strides;

  bool is_dense() const;  // row by row, or without elements
};

class Footprint {
 public:
  void reserve(size_t count);
  bool add(const TensorView& tensor);  // false: not in host memory row by row, or of another type than the first
  bool has(size_t index, const TensorView& tensor) const;  // whether the tensor at that place lies as it did
  size_t size() const { return addresses_.size(); }
  uintptr_t address() const { return addresses_.front(); }
  // Equal for tensors that lie to each other alike, wherever the first of them is.
  std::vector<int64_t> form() const;

 private:
  bool is_plain(const TensorView& tensor) const {
    return tensor.is_on_host && tensor.type == type_ && tensor.is_dense();
  }

  int64_t type_ = 0;
  std::vector<uintptr_t> addresses_;
  std::vector<int32_t> dims_;
  std::vector<int64_t> sizes_;   // of all, one after the other
  std::vector<size_t> sizes_at_;  // where each one's begin
};

// Lines of the cache that a look at tensors is expected to fetch: hints and no more.
class LineHints {
 public:
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kTensorBytes = 176;  // of torch 2.13's TensorImpl

  // An object in memory whose words may point to where a tensor is described; read up to a line, or `bytes`.
  static void fetch_behind(const void* object, size_t header, size_t bytes);
  void note(uintptr_t address);
  // A tensor's own description, which is longer than a line, and what its first words point to, which may be anything.
  void note_tensor(uintptr_t start);
  void fetch() const;
  bool empty() const { return lines_.empty(); }

 private:
  static bool is_likely(uintptr_t address) { return address > kLeastAddress && address < kMostAddress; }
  static constexpr uintptr_t kLeastAddress = uintptr_t{1} << 16;
  static constexpr uintptr_t kMostAddress = uintptr_t{1} << 47;

  std::vector<uintptr_t> lines_;
  std::array<uintptr_t, kLineBytes / sizeof(uintptr_t)> others_{};  // words of the tensor before
};

}  // namespace multiring
