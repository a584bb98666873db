// Vector types of the including file's instruction set, and conversions of 16-bit floats on them.
//
// Only combine_kernels.h and codec_kernels.h include this file, after combine_<variant>.cc or codec_<variant>.cc has
// defined MULTIRING_VECTOR_BYTES. Everything is in an unnamed namespace and uses no template of the standard library.
// Otherwise the linker could keep the AVX-512 copy of a shared inline function, and run it on a processor without
// AVX-512.
#ifndef MULTIRING_VECTOR_BYTES
#error "vectors.h is for files compiled once per instruction set, which define MULTIRING_VECTOR_BYTES"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "16-bit types are unpacked in pairs from little-endian words"
#endif
#ifdef __FAST_MATH__
#error "NaN, signed zeros and the order of operations are part of the contract: build without -ffast-math"
#endif

#include <cstddef>
#include <cstdint>

#ifdef __F16C__
#include <immintrin.h>
#endif

#define MULTIRING_INLINE [[gnu::always_inline]] inline

namespace multiring {
namespace {

constexpr std::size_t vector_bytes = MULTIRING_VECTOR_BYTES;

template <class T>
struct VectorOf {
    typedef T type __attribute__((vector_size(vector_bytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;
using Ints = Vector<std::int32_t>;

template <class V>
MULTIRING_INLINE V read(const char* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
MULTIRING_INLINE void write(char* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

template <class T>
MULTIRING_INLINE Vector<T> splat(T value) {
    return value - Vector<T>{};  // a broadcast; compilers do not always recognize a loop over the lanes as one
}

template <class T>
constexpr bool is_floating = static_cast<T>(0.5F) != T{0};
template <class T>
constexpr T quiet_nan = static_cast<T>(__builtin_nanf(""));

template <class T>
MULTIRING_INLINE Vector<T> canonical(Vector<T> value) {
    if constexpr (is_floating<T>) return value == value ? value : splat(quiet_nan<T>);
    return value;
}

// ---- 16-bit floats
// ---------------------------------------------------------------------------------------------------

// Rounds to bfloat16 and returns it in the upper half of each word; the lower half is undefined. Rounds to nearest even
// at bit 16. A carry out of the significand gives the correct exponent, up to infinity. (AVX512_BF16's conversion
// flushes denormals, so it cannot be used.)
MULTIRING_INLINE Words rounded_to_bf16(Floats value) {
    const Words bits = reinterpret_cast<Words>(canonical<float>(value));
    return bits + 0x7fffU + ((bits >> 16) & 1U);
}

#ifdef __F16C__

#if MULTIRING_VECTOR_BYTES == 64
// The masks are all ones. GCC 12 warns about the unmasked intrinsics
// (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593).
using Halves = __m256i;
MULTIRING_INLINE Floats widened_f16(Halves half) { return _mm512_maskz_cvtph_ps(0xffff, half); }
MULTIRING_INLINE Halves rounded_to_f16(Floats value) {
    return _mm512_maskz_cvtps_ph(0xffff, canonical<float>(value), _MM_FROUND_TO_NEAREST_INT);
}
#else
using Halves = __m128i;
MULTIRING_INLINE Floats widened_f16(Halves half) { return _mm256_cvtph_ps(half); }
MULTIRING_INLINE Halves rounded_to_f16(Floats value) {
    return _mm256_cvtps_ph(canonical<float>(value), _MM_FROUND_TO_NEAREST_INT);
}
#endif

#else

// Each word holds one float16. The conversions follow Fabian Giesen's public-domain "half_to_float_fast" and
// "float_to_half_fast3_rtne" (https://gist.github.com/rygorous/2156668), with selections instead of branches.

// Returns a mask of the magnitudes >= `least`. The comparison is signed, because SSE2 has no unsigned one; magnitudes
// have no sign bit.
MULTIRING_INLINE Vector<std::int32_t> reaches(Words magnitude, std::int32_t least) {
    return reinterpret_cast<Vector<std::int32_t>>(magnitude) > splat(least - 1);
}

MULTIRING_INLINE Floats widened_f16(Words half) {
    const Words magnitude = (half & 0x7fffU) << 13;
    const Words normal = magnitude + (112U << 23);  // exponent bias 15 -> 127
    // A denormal gets the exponent of 2^-14 and an implicit 1, and then 2^-14 is subtracted. Both steps are exact.
    const Words denormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(normal + (1U << 23)) -
                                                   reinterpret_cast<Floats>(splat<std::uint32_t>(113U << 23)));
    const Words special = normal + (112U << 23);
    const Words finite = reaches(magnitude, 1 << 23) ? normal : denormal;
    const Words bits = reaches(magnitude, 31 << 23) ? special : finite;
    return reinterpret_cast<Floats>(bits | ((half & 0x8000U) << 16));
}

MULTIRING_INLINE Words rounded_to_f16(Floats value) {
    const Words bits = reinterpret_cast<Words>(canonical<float>(value));
    const Words magnitude = bits & 0x7fffffffU;
    // Adding 1/2 moves the bits of a float16 denormal to the end of the significand, and rounds there.
    const Words half = splat<std::uint32_t>(126U << 23);
    const Words denormal =
        reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + reinterpret_cast<Floats>(half)) - half;
    const Words normal = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    // Values from 2^16 on become infinity. A quiet NaN keeps the highest bit of its significand.
    const Words special = ((magnitude >> 13) & 0x200U) | 0x7c00U;
    const Words nan_or_infinity = reaches(magnitude, 255 << 23) ? special : splat<std::uint32_t>(0x7c00U);
    const Words finite = reaches(magnitude, 113 << 23) ? normal : denormal;
    return (reaches(magnitude, 143 << 23) ? nan_or_infinity : finite) | ((bits >> 16) & 0x8000U);
}

#endif

}  // namespace
}  // namespace multiring
