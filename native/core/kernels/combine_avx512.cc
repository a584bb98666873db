#if !defined(__F16C__) || !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile combine_avx512.cc with -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#define MULTIRING_VECTOR_BYTES 64
#include "combine_kernels.h"

namespace multiring {

CombineKernel avx512_kernel(DType dtype, ReduceOp op, bool average) { return find_kernel(dtype, op, average); }

}  // namespace multiring
