// Extracts whole blocks of an encoded message from a stream whose pieces may end anywhere.
#pragma once

#include <array>
#include <cstddef>

#include "codec.h"
#include "links/link.h"

namespace multiring {

class CodedStream {
 public:
  // Returns how many elements can be decoded now, at most `most`. They are whole blocks, or all `left` elements that
  // remain of the message. May consume bytes of the stream.
  size_t ready(Wire wire, Link& link, const StreamKey& key, size_t left, size_t most);
  // Returns the encoded bytes of these elements; valid until the next call of a member function.
  const std::byte* data() const { return data_; }
  // Consumes `elements` of the ready elements. Call it after decoding them.
  void consume(Wire wire, Link& link, const StreamKey& key, size_t elements);

 private:
  std::array<std::byte, most_block_bytes()> split_;  // a block that arrived in several pieces
  size_t held_ = 0;                                 // number of valid bytes in split_
  const std::byte* data_ = nullptr;
};

}  // namespace multiring
