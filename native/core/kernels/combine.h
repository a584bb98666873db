// Element-wise reduction of several buffers into one: the arithmetic of every collective.
//
// The results are bit-identical for every variant (instruction set), alignment and length:
//   * Operands are combined from left to right, without contraction, reassociation or multiplication by a reciprocal.
//   * f16 and bf16 are combined and divided in float32, and rounded once, to nearest even.
//   * A NaN result is always the type's positive quiet NaN without payload. C++ does not define which operand's payload
//     survives an addition, and processors differ.
//   * min and max return NaN if any operand is NaN. Of two equal operands (+0 and -0) they return the later one.
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
// divisor is 1, or the number of ranks (at most 2^31 - 1) for a sum that becomes an average. Integer results wrap. An
// integer average does not wrap: its sum is computed exactly, and the quotient is truncated. For booleans, sum and max
// are "or", product and min are "and", every byte except 0 is true, the result is 0 or 1, and there is no average.
//
// dst may be one of the sources; any other overlap is undefined. No pointer needs to be aligned.
// Throws std::invalid_argument for a source_count below 1 and for an invalid divisor.
void combine(DType dtype, ReduceOp op, void* dst, const void* const* sources, int source_count, std::size_t count,
             std::uint64_t divisor);

// Returns the variant in use: "avx512", "avx2" or "baseline" on x86-64, "neon" on aarch64. By default it is the fastest
// variant that this processor supports.
const char* combine_isa();

// For tests: selects a variant for all threads. Throws std::invalid_argument if this build or processor lacks it.
void force_isa(const char* name);

}  // namespace multiring
