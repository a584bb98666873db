// The interface between combine.cc and its variants: one function per instruction set returns the kernel for a type and
// an operation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "combine.h"

namespace multiring {

// `bytes` is the size of one buffer. Only averaging kernels read the divisor.
using CombineKernel = void (*)(void* dst, const void* const* sources, int source_count, std::size_t bytes,
                               std::uint64_t divisor);

// Averaging kernels exist for sums of floating-point types only. Other averages return nullptr.
CombineKernel baseline_kernel(DType dtype, ReduceOp op, bool average);
CombineKernel avx2_kernel(DType dtype, ReduceOp op, bool average);
CombineKernel avx512_kernel(DType dtype, ReduceOp op, bool average);

}  // namespace multiring
