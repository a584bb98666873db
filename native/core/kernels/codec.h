// The codecs of lossy wires: they encode float32 elements for transport and decode them.
//
// _schedule/wire.py defines the formats, and how they treat NaN, infinities and small numbers. The results are
// bit-identical for every instruction set. Encodings begin at the start of a block. No pointer needs to be aligned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring {

enum class Wire : std::uint8_t { none, fp16, bf16, int8 };

inline constexpr std::size_t kScaledElements = 256;  // int8: number of elements that share a scale

// A block is the smallest unit that can be decoded. Only the last block of a message may be shorter. This file uses no
// templates of the standard library, because files for other instruction sets include it.
struct WireFormat {
    const char* name;            // of the member of Python's enumeration
    std::size_t block_elements;  // elements of a block
    std::size_t element_bytes;
    std::size_t scale_bytes;  // additional bytes of a block
};
inline constexpr WireFormat kWireFormats[] = {
    {"NONE", 1, sizeof(float), 0},
    {"FP16", 1, 2, 0},
    {"BF16", 1, 2, 0},
    {"INT8", kScaledElements, 1, sizeof(float)},
};  // in the order of Wire

constexpr WireFormat format_of(Wire wire) { return kWireFormats[static_cast<std::size_t>(wire)]; }
constexpr std::size_t block_elements(Wire wire) { return format_of(wire).block_elements; }
constexpr std::size_t encoded_bytes(Wire wire, std::size_t elements) {
    const WireFormat format = format_of(wire);
    const std::size_t blocks = (elements + format.block_elements - 1) / format.block_elements;
    return elements * format.element_bytes + blocks * format.scale_bytes;
}
constexpr std::size_t block_bytes(Wire wire) { return encoded_bytes(wire, block_elements(wire)); }
constexpr std::size_t most_block_bytes() {
    std::size_t most = 0;
    for (std::uint8_t at = 0; at < sizeof kWireFormats / sizeof *kWireFormats; ++at) {
        const std::size_t bytes = block_bytes(static_cast<Wire>(at));
        most = bytes > most ? bytes : most;
    }
    return most;
}

// Encodes `elements` float32 values: writes encoded_bytes(wire, elements) bytes to `to`. The memories must not overlap.
void encode(Wire wire, void* to, const void* from, std::size_t elements);
// Decodes `elements` values: writes that many float32 values to `to`.
void decode(Wire wire, void* to, const void* from, std::size_t elements);

}  // namespace multiring
