// Between combine.cc and the variants: one function per instruction set that names its kernel for a type and operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "combine.h"

namespace multiring {

// Sizes are in bytes of one buffer. The divisor is read by averaging kernels only.
using CombineKernel = void (*)(void* dst, const void* const* sources, int source_count, std::size_t bytes,
                               std::uint64_t divisor);

// Averages exist for the sum of floating-point types here; nullptr for anything else that was asked to average.
CombineKernel baseline_kernel(DType dtype, ReduceOp op, bool average);
CombineKernel avx2_kernel(DType dtype, ReduceOp op, bool average);
CombineKernel avx512_kernel(DType dtype, ReduceOp op, bool average);

}  // namespace multiring
