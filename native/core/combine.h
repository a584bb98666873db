// Element-wise reduction of several buffers into one: the arithmetic of every collective.
//
// The results are the same bits for every variant (instruction set), whatever the alignment and the length:
//   * operands are combined left to right; nothing is contracted, reassociated or multiplied by a reciprocal;
//   * f16 and bf16 are combined, and divided, in float32 and rounded once, to nearest even;
//   * a NaN result is always the type's positive quiet NaN without payload, because which operand's payload
//     survives an addition is left open by C++ and differs between processors;
//   * min and max return NaN when any operand is NaN, and the later one of two equal operands (+0 and -0).
#pragma once

#include <cstddef>
#include <cstdint>

namespace multiring {

enum class DType : std::uint8_t { i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, boolean };
enum class ReduceOp : std::uint8_t { sum, min, max, product };

// Bytes of one element.
std::size_t size_of(DType dtype);

// dst[i] = (sources[0][i] op sources[1][i] op ...) / divisor for i < count.
//
// divisor is 1, or, for a sum that becomes an average, the number of ranks (at most 2^31 - 1). Integers wrap, but
// the sum of an integer average does not; it is truncated. Booleans: sum and max are "or", product and
// min are "and", a byte other than 0 is true, the result is 0 or 1, and there is no average.
//
// dst may be one of the sources; any other overlap is undefined. No pointer needs to be aligned.
// Throws std::invalid_argument for a source_count below 1, or for a divisor that the above does not allow.
void combine(DType dtype, ReduceOp op, void* dst, const void* const* sources, int source_count, std::size_t count,
             std::uint64_t divisor);

// The variant in use: "avx512", "avx2" or "baseline" on x86-64, "neon" on aarch64. The best one this processor runs.
const char* combine_isa();

// For tests: use the named variant from now on, in every thread.
// Throws std::invalid_argument when this build or this processor lacks it.
void force_isa(const char* name);

}  // namespace multiring
