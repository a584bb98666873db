// The variant for every processor of the architecture: SSE2 on x86-64, NEON on aarch64.
#define MULTIRING_VECTOR_BYTES 16
#include "combine_kernels.h"

namespace multiring {

CombineKernel baseline_kernel(DType dtype, ReduceOp op, bool average) { return find_kernel(dtype, op, average); }

}  // namespace multiring
