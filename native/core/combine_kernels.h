// The reduction kernels, written once on the compiler's vector types and compiled once per instruction set.
//
// Included by combine_<variant>.cc only, after it has defined MULTIRING_VECTOR_BYTES. Everything is in an unnamed
// namespace and nothing of the standard library is instantiated: an inline function shared with other files could be
// the copy the linker keeps, and its AVX-512 code would then run on a processor that has none.
#ifndef MULTIRING_VECTOR_BYTES
#error "combine_kernels.h is for combine_<variant>.cc, which defines MULTIRING_VECTOR_BYTES"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "16-bit types are unpacked in pairs from little-endian words"
#endif
#ifdef __FAST_MATH__
#error "NaN, signed zeros and the order of operations are part of the contract: build without -ffast-math"
#endif

#include <cstddef>
#include <cstdint>

#include "combine_variants.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

#define MULTIRING_INLINE [[gnu::always_inline]] inline

namespace multiring {
namespace {

constexpr std::size_t vector_bytes = MULTIRING_VECTOR_BYTES;
// With more than two sources, what is accumulated of this many bytes per source stays in the level-1 cache.
constexpr std::size_t block_bytes = 4096;

template <class T>
struct VectorOf {
    typedef T type __attribute__((vector_size(vector_bytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;

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

// ---- operations, on vectors of T -----------------------------------------------------------------------------------

struct Sum {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) { return a + b; }
};

struct Product {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) { return a * b; }
};

struct Min {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        const Vector<T> less = a < b ? a : b;  // b when either is NaN
        if constexpr (is_floating<T>) return a == a ? less : a;
        return less;
    }
};

struct Max {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) {
        const Vector<T> more = a > b ? a : b;
        if constexpr (is_floating<T>) return a == a ? more : a;
        return more;
    }
};

struct Or {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) { return a | b; }
};

struct And {
    template <class T>
    MULTIRING_INLINE static Vector<T> apply(Vector<T> a, Vector<T> b) { return a & b; }
};

// ---- formats: vector_bytes of memory <-> what is accumulated -------------------------------------------------------

template <class T>
MULTIRING_INLINE Vector<T> canonical(Vector<T> value) {
    if constexpr (is_floating<T>) return value == value ? value : splat(quiet_nan<T>);
    return value;
}

// The memory's type is the accumulation type.
template <class T>
struct Plain {
    using Element = T;
    using Accumulator = Vector<T>;

    MULTIRING_INLINE static Accumulator load(const char* from) { return read<Vector<T>>(from); }
    MULTIRING_INLINE static void store(char* to, Accumulator value) { write(to, canonical<T>(value)); }

    template <class Op>
    MULTIRING_INLINE static Accumulator apply(Accumulator a, Accumulator b) { return Op::template apply<T>(a, b); }
    MULTIRING_INLINE static Accumulator divide(Accumulator value, T divisor) { return value / splat(divisor); }
};

struct Boolean {
    using Element = std::uint8_t;
    using Accumulator = Vector<std::uint8_t>;

    MULTIRING_INLINE static Accumulator load(const char* from) {
        const Accumulator bytes = read<Accumulator>(from);
        return bytes != 0 ? splat<std::uint8_t>(1) : splat<std::uint8_t>(0);
    }
    MULTIRING_INLINE static void store(char* to, Accumulator value) { write(to, value); }

    template <class Op>
    MULTIRING_INLINE static Accumulator apply(Accumulator a, Accumulator b) {
        return Op::template apply<std::uint8_t>(a, b);
    }
};

// Two float32 vectors: what one vector of 16-bit elements widens to. Which lane holds which element is the format's.
struct FloatPair {
    Floats first;
    Floats second;
};

struct Widened {
    using Element = float;
    using Accumulator = FloatPair;

    template <class Op>
    MULTIRING_INLINE static FloatPair apply(FloatPair a, FloatPair b) {
        return {Op::template apply<float>(a.first, b.first), Op::template apply<float>(a.second, b.second)};
    }
    MULTIRING_INLINE static FloatPair divide(FloatPair value, float divisor) {
        return {value.first / splat(divisor), value.second / splat(divisor)};
    }
};

// first: the even elements, second: the odd ones. Splitting 32-bit words so needs no shuffle on any processor.
// (AVX512_BF16's conversion is of no use: it flushes denormals.)
struct BFloat16 : Widened {
    MULTIRING_INLINE static FloatPair load(const char* from) {
        const Words words = read<Words>(from);
        return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xffff0000U)};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, (rounded(value.first) >> 16) | (rounded(value.second) & 0xffff0000U));
    }

  private:
    // Nearest even at bit 16; a carry out of the significand is the right exponent, up to and including infinity.
    MULTIRING_INLINE static Words rounded(Floats value) {
        const Words bits = reinterpret_cast<Words>(canonical<float>(value));
        return bits + 0x7fffU + ((bits >> 16) & 1U);
    }
};

#ifdef __F16C__

// first: the lower half of the elements, second: the upper half.
struct Float16 : Widened {
#if MULTIRING_VECTOR_BYTES == 64
    // Masked by all ones, because GCC 12 warns of the plain ones (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593).
    using Half = __m256i;
    MULTIRING_INLINE static Floats widened(Half half) { return _mm512_maskz_cvtph_ps(0xffff, half); }
    MULTIRING_INLINE static Half rounded(Floats value) {
        return _mm512_maskz_cvtps_ph(0xffff, canonical<float>(value), _MM_FROUND_TO_NEAREST_INT);
    }
#else
    using Half = __m128i;
    MULTIRING_INLINE static Floats widened(Half half) { return _mm256_cvtph_ps(half); }
    MULTIRING_INLINE static Half rounded(Floats value) {
        return _mm256_cvtps_ph(canonical<float>(value), _MM_FROUND_TO_NEAREST_INT);
    }
#endif
    MULTIRING_INLINE static FloatPair load(const char* from) {
        return {widened(read<Half>(from)), widened(read<Half>(from + sizeof(Half)))};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, rounded(value.first));
        write(to + sizeof(Half), rounded(value.second));
    }
};

#else

// first: the even elements, second: the odd ones. Conversions after Fabian Giesen's public-domain "half_to_float_fast"
// and "float_to_half_fast3_rtne" (https://gist.github.com/rygorous/2156668), with selections in place of branches.
struct Float16 : Widened {
    MULTIRING_INLINE static FloatPair load(const char* from) {
        const Words words = read<Words>(from);
        return {widened(words & 0xffffU), widened(words >> 16)};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, rounded(value.first) | (rounded(value.second) << 16));
    }

  private:
    // Magnitudes have no sign bit; SSE2 compares signed integers only.
    MULTIRING_INLINE static Vector<std::int32_t> reaches(Words magnitude, std::int32_t least) {
        return reinterpret_cast<Vector<std::int32_t>>(magnitude) > splat(least - 1);
    }

    MULTIRING_INLINE static Floats widened(Words half) {
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

    MULTIRING_INLINE static Words rounded(Floats value) {
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
};

#endif

// ---- loops ---------------------------------------------------------------------------------------------------------

template <class Format, class Op, bool average>
struct Kernel {
    using Accumulator = typename Format::Accumulator;
    using Element = typename Format::Element;

    static void run(void* dst, const void* const* sources, int source_count, std::size_t bytes,
                    std::uint64_t divisor) {
        const std::size_t whole = bytes - bytes % vector_bytes;
        const auto quotient = static_cast<Element>(divisor);
        char* const to = static_cast<char*>(dst);
        if (source_count == 1) {
            one(to, at(sources, 0, 0), whole, quotient);
        } else if (source_count == 2) {
            two(to, at(sources, 0, 0), at(sources, 1, 0), whole, quotient);
        } else {
            many(to, sources, source_count, whole, quotient);
        }
        if (whole < bytes) tail(to + whole, sources, source_count, whole, bytes - whole, quotient);
    }

  private:
    MULTIRING_INLINE static const char* at(const void* const* sources, int source, std::size_t offset) {
        return static_cast<const char*>(sources[source]) + offset;
    }
    MULTIRING_INLINE static Accumulator apply(Accumulator a, Accumulator b) { return Format::template apply<Op>(a, b); }

    MULTIRING_INLINE static void finish(char* to, Accumulator value, [[maybe_unused]] Element divisor) {
        if constexpr (average) value = Format::divide(value, divisor);
        Format::store(to, value);
    }

    static void one(char* to, const char* a, std::size_t bytes, Element divisor) {
        for (std::size_t i = 0; i < bytes; i += vector_bytes) finish(to + i, Format::load(a + i), divisor);
    }

    static void two(char* to, const char* a, const char* b, std::size_t bytes, Element divisor) {
        for (std::size_t i = 0; i < bytes; i += vector_bytes) {
            finish(to + i, apply(Format::load(a + i), Format::load(b + i)), divisor);
        }
    }

    // A block is written only when every source's share of it has been read, so dst may be any of the sources.
    static void many(char* to, const void* const* sources, int source_count, std::size_t bytes, Element divisor) {
        Accumulator sums[block_bytes / vector_bytes];
        for (std::size_t begin = 0; begin < bytes; begin += block_bytes) {
            const std::size_t length = bytes - begin < block_bytes ? bytes - begin : block_bytes;
            const char* a = at(sources, 0, begin);
            const char* b = at(sources, 1, begin);
            for (std::size_t i = 0; i < length; i += vector_bytes) {
                sums[i / vector_bytes] = apply(Format::load(a + i), Format::load(b + i));
            }
            for (int source = 2; source < source_count - 1; ++source) {
                const char* next = at(sources, source, begin);
                for (std::size_t i = 0; i < length; i += vector_bytes) {
                    sums[i / vector_bytes] = apply(sums[i / vector_bytes], Format::load(next + i));
                }
            }
            const char* last = at(sources, source_count - 1, begin);
            for (std::size_t i = 0; i < length; i += vector_bytes) {
                finish(to + begin + i, apply(sums[i / vector_bytes], Format::load(last + i)), divisor);
            }
        }
    }

    // Less than a vector is left: the same arithmetic on copies padded with zeros.
    static void tail(char* to, const void* const* sources, int source_count, std::size_t offset, std::size_t bytes,
                     Element divisor) {
        Accumulator value = padded(at(sources, 0, offset), bytes);
        for (int source = 1; source < source_count; ++source) {
            value = apply(value, padded(at(sources, source, offset), bytes));
        }
        char whole[vector_bytes];
        finish(whole, value, divisor);
        __builtin_memcpy(to, whole, bytes);
    }

    MULTIRING_INLINE static Accumulator padded(const char* from, std::size_t bytes) {
        char whole[vector_bytes] = {};
        __builtin_memcpy(whole, from, bytes);
        return Format::load(whole);
    }
};

// ---- the table -----------------------------------------------------------------------------------------------------

template <class Format>
CombineKernel floating_kernel(ReduceOp op, bool average) {
    if (average) return op == ReduceOp::sum ? Kernel<Format, Sum, true>::run : nullptr;
    switch (op) {
        case ReduceOp::sum: return Kernel<Format, Sum, false>::run;
        case ReduceOp::min: return Kernel<Format, Min, false>::run;
        case ReduceOp::max: return Kernel<Format, Max, false>::run;
        case ReduceOp::product: return Kernel<Format, Product, false>::run;
    }
    return nullptr;
}

// Sums and products are formed of unsigned numbers: the same bits, and they may wrap.
template <class T, class Unsigned>
CombineKernel integer_kernel(ReduceOp op, bool average) {
    if (average) return nullptr;
    switch (op) {
        case ReduceOp::sum: return Kernel<Plain<Unsigned>, Sum, false>::run;
        case ReduceOp::min: return Kernel<Plain<T>, Min, false>::run;
        case ReduceOp::max: return Kernel<Plain<T>, Max, false>::run;
        case ReduceOp::product: return Kernel<Plain<Unsigned>, Product, false>::run;
    }
    return nullptr;
}

inline CombineKernel boolean_kernel(ReduceOp op, bool average) {
    if (average) return nullptr;
    switch (op) {
        case ReduceOp::sum:
        case ReduceOp::max: return Kernel<Boolean, Or, false>::run;
        case ReduceOp::min:
        case ReduceOp::product: return Kernel<Boolean, And, false>::run;
    }
    return nullptr;
}

inline CombineKernel find_kernel(DType dtype, ReduceOp op, bool average) {
    switch (dtype) {
        case DType::i8: return integer_kernel<std::int8_t, std::uint8_t>(op, average);
        case DType::i16: return integer_kernel<std::int16_t, std::uint16_t>(op, average);
        case DType::i32: return integer_kernel<std::int32_t, std::uint32_t>(op, average);
        case DType::i64: return integer_kernel<std::int64_t, std::uint64_t>(op, average);
        case DType::u8: return integer_kernel<std::uint8_t, std::uint8_t>(op, average);
        case DType::u16: return integer_kernel<std::uint16_t, std::uint16_t>(op, average);
        case DType::u32: return integer_kernel<std::uint32_t, std::uint32_t>(op, average);
        case DType::u64: return integer_kernel<std::uint64_t, std::uint64_t>(op, average);
        case DType::f16: return floating_kernel<Float16>(op, average);
        case DType::bf16: return floating_kernel<BFloat16>(op, average);
        case DType::f32: return floating_kernel<Plain<float>>(op, average);
        case DType::f64: return floating_kernel<Plain<double>>(op, average);
        case DType::boolean: return boolean_kernel(op, average);
    }
    return nullptr;
}

}  // namespace
}  // namespace multiring

#undef MULTIRING_INLINE
