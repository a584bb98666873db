// The interface between codec.cc and its variants: one function per instruction set returns the kernels of a wire.
#pragma once

#include <cstddef>

#include "codec.h"

namespace multiring {

using CodecKernel = void (*)(char* to, const char* from, std::size_t elements);

struct Codec {
    CodecKernel encode;
    CodecKernel decode;
};

// `wire` must be a lossy wire.
Codec baseline_codec(Wire wire);
Codec avx2_codec(Wire wire);
Codec avx512_codec(Wire wire);

// Returns the codec of the instruction set that combine_isa() names; see combine.h.
Codec codec_in_use(Wire wire);

}  // namespace multiring
