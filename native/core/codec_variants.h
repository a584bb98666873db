// Between codec.cc and the variants: one function per instruction set that names its kernels for a wire type.
#pragma once

#include <cstddef>

#include "codec.h"

namespace multiring {

using CodecKernel = void (*)(char* to, const char* from, std::size_t elements);

struct Codec {
    CodecKernel encode;
    CodecKernel decode;
};

// For a lossy wire.
Codec baseline_codec(Wire wire);
Codec avx2_codec(Wire wire);
Codec avx512_codec(Wire wire);

// Of the instruction set that combine_isa() names; see combine.h.
Codec codec_in_use(Wire wire);

}  // namespace multiring
