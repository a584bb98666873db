#include "codec.h"

#include <cstring>

#include "codec_variants.h"

namespace multiring {

void encode(Wire wire, void* to, const void* from, std::size_t elements) {
    if (elements == 0) return;
    if (wire == Wire::none) {
        std::memcpy(to, from, elements * sizeof(float));
        return;
    }
    codec_in_use(wire).encode(static_cast<char*>(to), static_cast<const char*>(from), elements);
}

void decode(Wire wire, void* to, const void* from, std::size_t elements) {
    if (elements == 0) return;
    if (wire == Wire::none) {
        std::memcpy(to, from, elements * sizeof(float));
        return;
    }
    codec_in_use(wire).decode(static_cast<char*>(to), static_cast<const char*>(from), elements);
}

}  // namespace multiring
