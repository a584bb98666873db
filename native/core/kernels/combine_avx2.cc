#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile combine_avx2.cc with -mavx2 -mf16c"
#endif
#define MULTIRING_VECTOR_BYTES 32
#include "combine_kernels.h"

namespace multiring {

CombineKernel avx2_kernel(DType dtype, ReduceOp op, bool average) { return find_kernel(dtype, op, average); }

}  // namespace multiring
