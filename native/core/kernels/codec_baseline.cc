// The variant for every processor of the architecture: SSE2 on x86-64, NEON on aarch64.
#define MULTIRING_VECTOR_BYTES 16
#include "codec_kernels.h"

namespace multiring {

Codec baseline_codec(Wire wire) { return find_codec(wire); }

}  // namespace multiring
