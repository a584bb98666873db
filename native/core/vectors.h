// Vectors of this file's instruction set, and the conversions of 16-bit floats on them.
//
// Included by <kernels>.h of combine_<variant>.cc and codec_<variant>.cc only, after these have defined
// MULTIRING_VECTOR_BYTES. Everything is in an unnamed namespace and nothing of the standard library is instantiated: an
// inline function shared with other files could be the copy the linker keeps, and its AVX-512 code would then run on a
// processor that has none.
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
    return value - Vector<T>{};  // the compiler's own broadcast; a loop over the lanes is not always seen as one
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

// The bfloat16 in the upper half of each word. Nearest even at bit 16; a carry out of the significand is the right
// exponent, up to and including infinity. The lower half is left over. (AVX512_BF16's conversion is of no use: it
// flushes denormals.)
MULTIRING_INLINE Words rounded_to_bf16(Floats value) {
    const Words bits = reinterpret_cast<Words>(canonical<float>(value));
    return bits + 0x7fffU + ((bits >> 16) & 1U);
}

#ifdef __F16C__

#if MULTIRING_VECTOR_BYTES == 64
// Masked by all ones, because GCC 12 warns of the plain ones (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593).
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

// One float16 in each word. Conversions after Fabian Giesen's public-domain "half_to_float_fast"
// and "float_to_half_fast3_rtne" (https://gist.github.com/rygorous/2156668), with selections in place of branches.

// Magnitudes have no sign bit; SSE2 compares signed integers only.
MULTIRING_INLINE Vector<std::int32_t> reaches(Words magnitude, std::int32_t least) {
    return reinterpret_cast<Vector<std::int32_t>>(magnitude) > splat(least - 1);
}

MULTIRING_INLINE Floats widened_f16(Words half) {
    const Words magnitude = (half & 0x7fffU) << 13;
    const Words normal = magnitude + (112U << 23);  // exponent bias 15 -> 127
    // A denormal is given the exponent of 2^-14 and an implicit one, which is then subtracted: both exact.
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
    // Adding 1/2 brings a float16 denormal's bits to the end of the significand, and rounds there.
    const Words half = splat<std::uint32_t>(126U << 23);
    const Words denormal =
        reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + reinterpret_cast<Floats>(half)) - half;
    const Words normal = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    // From 2^16 on there is infinity, and the quiet NaN, whose highest bit of the significand stays set.
    const Words special = ((magnitude >> 13) & 0x200U) | 0x7c00U;
    const Words nan_or_infinity = reaches(magnitude, 255 << 23) ? special : splat<std::uint32_t>(0x7c00U);
    const Words finite = reaches(magnitude, 113 << 23) ? normal : denormal;
    return (reaches(magnitude, 143 << 23) ? nan_or_infinity : finite) | ((bits >> 16) & 0x8000U);
}

#endif

}  // namespace
}  // namespace multiring
