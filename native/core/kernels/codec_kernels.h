// The codecs of wire types, written with the compiler's vector types and compiled once per instruction set.
//
// Only codec_<variant>.cc includes this file, after defining MULTIRING_VECTOR_BYTES; see vectors.h.
#include "codec_variants.h"
#include "vectors.h"

namespace multiring {
namespace {

constexpr std::size_t lanes = vector_bytes / sizeof(float);

template <class T>
struct NarrowOf {
    typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T>
using Narrow = typename NarrowOf<T>::type;  // a vector with as many elements as Floats

// ---- 16-bit floats: a vector of elements at a time ------------------------------------------------------------------

struct HalfCodec {
    MULTIRING_INLINE static void encode(char* to, Floats value) {
#ifdef __F16C__
        write(to, rounded_to_f16(value));
#else
        write(to, __builtin_convertvector(rounded_to_f16(value), Narrow<std::uint16_t>));
#endif
    }
    MULTIRING_INLINE static Floats decode(const char* from) {
#ifdef __F16C__
        return widened_f16(read<Halves>(from));
#else
        return widened_f16(__builtin_convertvector(read<Narrow<std::uint16_t>>(from), Words));
#endif
    }
};

struct Brain16Codec {
    MULTIRING_INLINE static void encode(char* to, Floats value) {
        write(to, __builtin_convertvector(rounded_to_bf16(value) >> 16, Narrow<std::uint16_t>));
    }
    MULTIRING_INLINE static Floats decode(const char* from) {
        const Words words = __builtin_convertvector(read<Narrow<std::uint16_t>>(from), Words);
        return reinterpret_cast<Floats>(words << 16);
    }
};

template <class Format>
struct By16Bits {
    static constexpr std::size_t coded_bytes = lanes * 2;

    static void encode(char* to, const char* from, std::size_t elements) {
        std::size_t i = 0;
        for (; i + lanes <= elements; i += lanes) Format::encode(to + 2 * i, read<Floats>(from + 4 * i));
        if (i == elements) return;
        char floats[vector_bytes] = {};
        char coded[coded_bytes];
        __builtin_memcpy(floats, from + 4 * i, 4 * (elements - i));
        Format::encode(coded, read<Floats>(floats));
        __builtin_memcpy(to + 2 * i, coded, 2 * (elements - i));
    }

    static void decode(char* to, const char* from, std::size_t elements) {
        std::size_t i = 0;
        for (; i + lanes <= elements; i += lanes) write(to + 4 * i, canonical<float>(Format::decode(from + 2 * i)));
        if (i == elements) return;
        char floats[vector_bytes];
        char coded[coded_bytes] = {};
        __builtin_memcpy(coded, from + 2 * i, 2 * (elements - i));
        write(floats, canonical<float>(Format::decode(coded)));
        __builtin_memcpy(to + 4 * i, floats, 4 * (elements - i));
    }
};

// ---- int8: a block of elements and their scale at a time ------------------------------------------------------------

struct Int8 {
    static constexpr std::size_t block_floats = 4 * kScaledElements;  // bytes
    static constexpr std::uint32_t infinity = 0x7f800000U;
    static constexpr std::uint32_t least = (127U - 119U) << 23;  // 2^-119
    static constexpr std::uint32_t lost_bits = 0x7fU;  // cleared bits of a scale, so that 127 * scale is exact
    static constexpr float nearest = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

    static void encode(char* to, const char* from, std::size_t elements) {
        for (; elements >= kScaledElements; elements -= kScaledElements) {
            encode_block(to, from);
            to += block_bytes(Wire::int8);
            from += block_floats;
        }
        if (elements == 0) return;
        char floats[block_floats] = {};
        char coded[block_bytes(Wire::int8)];
        __builtin_memcpy(floats, from, 4 * elements);
        encode_block(coded, floats);
        __builtin_memcpy(to, coded, sizeof(float) + elements);
    }

    static void decode(char* to, const char* from, std::size_t elements) {
        for (; elements >= kScaledElements; elements -= kScaledElements) {
            decode_block(to, from);
            to += block_floats;
            from += block_bytes(Wire::int8);
        }
        if (elements == 0) return;
        char floats[block_floats];
        char coded[block_bytes(Wire::int8)] = {};
        __builtin_memcpy(coded, from, sizeof(float) + elements);
        decode_block(floats, coded);
        __builtin_memcpy(to, floats, 4 * elements);
    }

  private:
    // Returns the bits of the largest magnitude. Compared as integers, infinity exceeds all numbers, and NaN exceeds
    // infinity.
    MULTIRING_INLINE static std::uint32_t largest(const char* from) {
        Ints most[2] = {};
        for (std::size_t i = 0; i < block_floats; i += 2 * vector_bytes) {
            for (std::size_t half = 0; half < 2; ++half) {
                const Ints magnitude = read<Ints>(from + i + half * vector_bytes) & 0x7fffffff;
                most[half] = magnitude > most[half] ? magnitude : most[half];
            }
        }
        most[0] = most[0] > most[1] ? most[0] : most[1];
        std::int32_t result = 0;
        for (std::size_t lane = 0; lane < lanes; ++lane) result = most[0][lane] > result ? most[0][lane] : result;
        return static_cast<std::uint32_t>(result);
    }

    MULTIRING_INLINE static void encode_block(char* to, const char* from) {
        const std::uint32_t most = largest(from);
        if (most >= infinity || most < least) {
            const float scale = most < least ? 0.0F : quiet_nan<float>;
            __builtin_memcpy(to, &scale, sizeof scale);
            __builtin_memset(to + sizeof scale, 0, kScaledElements);
            return;
        }
        const float scale = as_float(as_word(as_float(most) / 127.0F) & ~lost_bits);
        const Floats inverse = splat(1.0F / scale);
        __builtin_memcpy(to, &scale, sizeof scale);
        char* const values = to + sizeof scale;
        for (std::size_t i = 0; i < kScaledElements; i += lanes) {
            const Floats rounded = read<Floats>(from + 4 * i) * inverse + splat(nearest);
            // The lowest bits of the sum hold the integer, because the constant's lowest bits are 0.
            write(values + i, __builtin_convertvector(reinterpret_cast<Ints>(rounded), Narrow<std::int8_t>));
        }
    }

    MULTIRING_INLINE static void decode_block(char* to, const char* from) {
        float scale;
        __builtin_memcpy(&scale, from, sizeof scale);
        const float factor = scale == scale ? scale : quiet_nan<float>;
        const char* const values = from + sizeof scale;
        // A plain loop: with vectors, GCC 12 converts bytes one by one and takes six times as long.
        for (std::size_t i = 0; i < kScaledElements; ++i) {
            const float value = static_cast<float>(static_cast<std::int8_t>(values[i])) * factor;
            __builtin_memcpy(to + 4 * i, &value, sizeof value);
        }
    }

    MULTIRING_INLINE static std::uint32_t as_word(float value) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, &value, sizeof bits);
        return bits;
    }
    MULTIRING_INLINE static float as_float(std::uint32_t bits) {
        float value;
        __builtin_memcpy(&value, &bits, sizeof value);
        return value;
    }
};

inline Codec find_codec(Wire wire) {
    switch (wire) {
        case Wire::fp16: return {By16Bits<HalfCodec>::encode, By16Bits<HalfCodec>::decode};
        case Wire::bf16: return {By16Bits<Brain16Codec>::encode, By16Bits<Brain16Codec>::decode};
        case Wire::int8: return {Int8::encode, Int8::decode};
        case Wire::none: break;
    }
    return {nullptr, nullptr};
}

}  // namespace
}  // namespace multiring
