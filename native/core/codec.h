// What float32 elements become while they travel: the codecs of lossy wires.
//
// The formats, and what they do to NaN, infinities and small numbers, are those of schedule/wire.py; the results are
// the same bits for every instruction set. Encodings begin at the start of a block, and no pointer needs to be aligned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring {

enum class Wire : std::uint8_t { none, fp16, bf16, int8 };

inline constexpr std::size_t kScaledElements = 256;  // int8: elements that share a scale

// The least that can be decoded by itself: its elements, and its bytes. Only the last one of a message may be shorter.
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

// Writes encoded_bytes(wire, elements) bytes to `to`; the memories do not overlap.
void encode(Wire wire, void* to, const void* from, std::size_t elements);
// Writes `elements` float32 to `to`.
void decode(Wire wire, void* to, const void* from, std::size_t elements);

}  // namespace multiring
