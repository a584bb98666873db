// Whole blocks of a coded message, out of a stream whose pieces end anywhere.
#pragma once

#include <array>
#include <cstddef>

#include "codec.h"
#include "link.h"

namespace multiring {

class CodedStream {
 public:
  // How many elements of the message can be decoded now, at most `most`: whole blocks, or all of the `left` that the
  // message still has. May take bytes out of the stream.
  size_t ready(Wire wire, Link& link, const StreamKey& key, size_t left, size_t most);
  // Where they lie, until the next call.
  const std::byte* data() const { return data_; }
  // `elements` of what was ready were decoded.
  void consume(Wire wire, Link& link, const StreamKey& key, size_t elements);

 private:
  std::array<std::byte, block_bytes(Wire::int8)> split_;  // a block that came in parts
  size_t held_ = 0;                                       // bytes of it
  const std::byte* data_ = nullptr;
};

}  // namespace multiring
