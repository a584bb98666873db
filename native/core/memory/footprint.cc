#include "footprint.h"

#include <algorithm>
#include <cstring>

namespace multiring {

bool TensorView::is_dense() const {
  int64_t stride = 1;
  bool dense = true;
  for (int32_t dim = dims - 1; dim >= 0; --dim) {
    if (shape[dim] == 0) return true;
    dense = dense && (shape[dim] == 1 || strides == nullptr || strides[dim] == stride);
    stride *= shape[dim];
  }
  return dense;
}

void Footprint::reserve(size_t count) {
  addresses_.reserve(count);
  dims_.reserve(count);
  sizes_at_.reserve(count);
}

bool Footprint::add(const TensorView& tensor) {
  if (addresses_.empty()) type_ = tensor.type;
  if (!is_plain(tensor)) return false;
  addresses_.push_back(tensor.address);
  dims_.push_back(tensor.dims);
  sizes_at_.push_back(sizes_.size());
  sizes_.insert(sizes_.end(), tensor.shape, tensor.shape + tensor.dims);
  return true;
}

bool Footprint::has(size_t index, const TensorView& tensor) const {
  if (tensor.address != addresses_[index] || tensor.dims != dims_[index] || !is_plain(tensor)) return false;
  return std::equal(tensor.shape, tensor.shape + tensor.dims, sizes_.data() + sizes_at_[index]);
}

std::vector<int64_t> Footprint::form() const {
  std::vector<int64_t> words{type_};
  words.reserve(1 + 2 * dims_.size() + sizes_.size());
  for (size_t i = 0; i < dims_.size(); ++i) {
    words.push_back(static_cast<int64_t>(addresses_[i] - address()));
    words.push_back(dims_[i]);
  }
  words.insert(words.end(), sizes_.begin(), sizes_.end());
  return words;
}

void LineHints::fetch_behind(const void* object, size_t header, size_t bytes) {
  const size_t size = std::min(bytes, kLineBytes);
  for (size_t at = header; at + sizeof(uintptr_t) <= size; at += sizeof(uintptr_t)) {
    uintptr_t word = 0;
    std::memcpy(&word, static_cast<const std::byte*>(object) + at, sizeof word);
    if (!is_likely(word)) continue;
    for (size_t offset = 0; offset < kTensorBytes; offset += kLineBytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(word + offset));
    }
  }
}

void LineHints::note(uintptr_t address) {
  if (is_likely(address)) lines_.push_back(address & ~(uintptr_t{kLineBytes} - 1));
}

void LineHints::note_tensor(uintptr_t start) {
  for (size_t offset = 0; offset < kTensorBytes + kLineBytes; offset += kLineBytes) {
    note(start + std::min(offset, kTensorBytes - 1));
  }
  auto words = others_;
  std::memcpy(words.data(), reinterpret_cast<const void*>(start), kLineBytes);
  for (size_t at = 1; at < words.size(); ++at) {  // the first word points to code
    if (words[at] != others_[at]) note(words[at]);  // the lines that tensors share are fetched once anyway
  }
  others_ = words;
}

void LineHints::fetch() const {
  for (const uintptr_t line : lines_) __builtin_prefetch(reinterpret_cast<const void*>(line));
}

}  // namespace multiring
