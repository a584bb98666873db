#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile codec_avx2.cc with -mavx2 -mf16c"
#endif
#define MULTIRING_VECTOR_BYTES 32
#include "codec_kernels.h"

namespace multiring {

Codec avx2_codec(Wire wire) { return find_codec(wire); }

}  // namespace multiring
