// The codecs of lossy wires: they encode float32 elements for transport and decode them.
//
// schedule/wire.py defines the formats, and how they treat NaN, infinities and small numbers. The results are
// bit-identical for every instruction set. Encodings begin at the start of a block. No pointer needs to be aligned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring {

enum class Wire : std::uint8_t { none, fp16, bf16, int8 };

inline constexpr std::size_t kScaledElements = 256;  // int8: number of elements that share a scale

// The size of a block in elements and in encoded bytes. A block is the smallest unit that can be decoded. Only the last
// block of a message may be shorter.
constexpr std::size_t block_elements(Wire wire) { return wire == Wire::int8 ? kScaledElements : 1; }
constexpr std::size_t block_bytes(Wire wire) {
    switch (wire) {
        case Wire::fp16:
        case Wire::bf16: return 2;
        case Wire::int8: return sizeof(float) + kScaledElements;
        case Wire::none: break;
    }
    return sizeof(float);
}

constexpr std::size_t encoded_bytes(Wire wire, std::size_t elements) {
    if (wire != Wire::int8) return elements * block_bytes(wire);
    return elements + (elements + kScaledElements - 1) / kScaledElements * sizeof(float);
}

// Encodes `elements` float32 values: writes encoded_bytes(wire, elements) bytes to `to`. The memories must not overlap.
void encode(Wire wire, void* to, const void* from, std::size_t elements);
// Decodes `elements` values: writes that many float32 values to `to`.
void decode(Wire wire, void* to, const void* from, std::size_t elements);

}  // namespace multiring
