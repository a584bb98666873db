#if !defined(__F16C__) || !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile codec_avx512.cc with -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif
#define MULTIRING_VECTOR_BYTES 64
#include "codec_kernels.h"

namespace multiring {

Codec avx512_codec(Wire wire) { return find_codec(wire); }

}  // namespace multiring
