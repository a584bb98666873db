#include "link.h"

#include <algorithm>
#include <cstring>

namespace multiring {

OutStream& Link::out(const StreamKey& key) {
  const auto found = out_.find(key);
  return found != out_.end() ? found->second : out_.emplace(key, fresh_out()).first->second;
}

void Link::offer(const StreamKey& key, const std::byte* data, size_t size, uint16_t rail) {
  if (size == 0) return;
  OutStream& stream = out(key);
  stream.rail = rail;
  stream.pending.push_back({data, size});
  stream.offered += size;
}

std::span<const std::byte> Link::peek(InStream& stream, size_t most) {
  if (stream.pieces.empty()) return {};
  const auto& piece = stream.pieces.front();
  return {piece.data, std::min(piece.size, most)};
}

size_t Link::copy(InStream& stream, std::byte* target, size_t most) {
  const auto bytes = peek(stream, most);
  if (!bytes.empty()) std::memcpy(target, bytes.data(), bytes.size());
  return bytes.size();
}

bool Link::drained(const OperationKey& key) const {
  for (auto at = out_.lower_bound({key, 0}); at != out_.end() && at->first.operation == key; ++at) {
    if (!at->second.drained()) return false;
  }
  return true;
}

void Link::close(const OperationKey& key) {
  out_.erase(out_.lower_bound({key, 0}), out_.upper_bound({key, UINT16_MAX}));
  in_.erase(in_.lower_bound({key, 0}), in_.upper_bound({key, UINT16_MAX}));
}

}  // namespace multiring
