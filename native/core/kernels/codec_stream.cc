#include "codec_stream.h"

#include <algorithm>
#include <cstring>

namespace multiring {

size_t CodedStream::ready(Wire wire, Link& link, const StreamKey& key, size_t left, size_t most) {
  InStream& stream = link.in(key);
  const size_t one = std::min(left, block_elements(wire));
  if (held_ == 0) {
    const auto bytes = link.peek(stream, encoded_bytes(wire, std::min(left, most)));
    const size_t whole = bytes.size() / block_bytes(wire) * block_elements(wire);
    // The last block of the message may be shorter.
    const size_t elements = bytes.size() == encoded_bytes(wire, left) ? left : whole;
    data_ = bytes.data();
    if (elements > 0) return elements;
  }
  const size_t want = encoded_bytes(wire, one);
  while (held_ < want) {
    const auto bytes = link.peek(stream, want - held_);
    if (bytes.empty()) return 0;
    std::memcpy(split_.data() + held_, bytes.data(), bytes.size());
    held_ += bytes.size();
    link.consume(key, stream, bytes.size());
  }
  data_ = split_.data();
  return one;
}

void CodedStream::consume(Wire wire, Link& link, const StreamKey& key, size_t elements) {
  if (held_ > 0) {
    held_ = 0;
  } else {
    link.consume(key, link.in(key), encoded_bytes(wire, elements));
  }
}

}  // namespace multiring
