// The reduction kernels, written with the compiler's vector types and compiled once per instruction set.
//
// Only combine_<variant>.cc includes this file, after defining MULTIRING_VECTOR_BYTES; see vectors.h.

#include "combine_variants.h"
#include "vectors.h"

namespace multiring {
namespace {

// With more than two sources, a block of accumulated values of this size stays in the level-1 cache.
constexpr std::size_t block_bytes = 4096;

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

// ---- formats: vector_bytes of memory <-> accumulator ---------------------------------------------------------------

// The type in memory is also the accumulation type.
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

// Two float32 vectors, widened from one vector of 16-bit elements. The format defines which lane holds which element.
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

// `first` holds the even elements, `second` the odd elements. This split of 32-bit words needs no shuffle on any
// processor.
struct BFloat16 : Widened {
    MULTIRING_INLINE static FloatPair load(const char* from) {
        const Words words = read<Words>(from);
        return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xffff0000U)};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, (rounded_to_bf16(value.first) >> 16) | (rounded_to_bf16(value.second) & 0xffff0000U));
    }
};

#ifdef __F16C__

// `first` holds the lower half of the elements, `second` the upper half.
struct Float16 : Widened {
    MULTIRING_INLINE static FloatPair load(const char* from) {
        return {widened_f16(read<Halves>(from)), widened_f16(read<Halves>(from + sizeof(Halves)))};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, rounded_to_f16(value.first));
        write(to + sizeof(Halves), rounded_to_f16(value.second));
    }
};

#else

// `first` holds the even elements, `second` the odd elements.
struct Float16 : Widened {
    MULTIRING_INLINE static FloatPair load(const char* from) {
        const Words words = read<Words>(from);
        return {widened_f16(words & 0xffffU), widened_f16(words >> 16)};
    }
    MULTIRING_INLINE static void store(char* to, FloatPair value) {
        write(to, rounded_to_f16(value.first) | (rounded_to_f16(value.second) << 16));
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

    // A block is written only after the same block of every source has been read, so dst may be any of the sources.
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

    // Handles the remaining bytes, fewer than a vector, with the same arithmetic on copies padded with zeros.
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

// Sums and products use unsigned arithmetic: the bits are the same, and unsigned overflow is defined.
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
