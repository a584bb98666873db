// The reference for `combine`: scalar arithmetic that decodes and encodes values with ldexp and frexp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels/combine.h"

namespace multiring::checks {

using multiring::DType;
using multiring::ReduceOp;
using Bits = std::uint64_t;  // one element, zero-extended
using Bytes = std::vector<unsigned char>;

inline constexpr DType dtypes[] = {
    DType::i8,  DType::i16, DType::i32,  DType::i64, DType::u8,  DType::u16,    DType::u32,
                            DType::u64, DType::f16, DType::bf16, DType::f32, DType::f64, DType::boolean};
inline constexpr const char* dtype_names[] = {"i8",  "i16", "i32",  "i64", "u8",  "u16", "u32",
                                       "u64", "f16", "bf16", "f32", "f64", "bool"};
inline constexpr std::size_t dtype_sizes[] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1};
inline constexpr ReduceOp ops[] = {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product};
inline constexpr const char* op_names[] = {"sum", "min", "max", "product"};

inline const char* name_of(DType dtype) { return dtype_names[static_cast<std::size_t>(dtype)]; }
inline const char* name_of(ReduceOp op) { return op_names[static_cast<std::size_t>(op)]; }

inline bool is_signed(DType dtype) { return dtype <= DType::i64; }
inline bool is_integer(DType dtype) { return dtype <= DType::u64; }

inline std::string hex(Bits bits) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(bits));
    return text;
}

// ---- the reference: values ----------------------------------------------------------------------------------------

struct Format {
    int exponent_bits;
    int fraction_bits;
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    Bits exponent_mask() const { return (Bits{1} << exponent_bits) - 1; }
    Bits infinity() const { return exponent_mask() << fraction_bits; }
    Bits quiet_nan() const { return infinity() | (Bits{1} << (fraction_bits - 1)); }
};
inline constexpr Format float16{5, 10};
inline constexpr Format bfloat16{8, 7};

inline double decoded(Bits bits, Format format) {
    const Bits fraction = bits & ((Bits{1} << format.fraction_bits) - 1);
    const int exponent = static_cast<int>((bits >> format.fraction_bits) & format.exponent_mask());
    const bool negative = (bits >> (format.fraction_bits + format.exponent_bits)) != 0;
    double magnitude = 0;
    if (exponent == static_cast<int>(format.exponent_mask())) {
        magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<double>(fraction), 1 - format.bias() - format.fraction_bits);
    } else {
        const Bits significand = fraction | (Bits{1} << format.fraction_bits);
        magnitude = std::ldexp(static_cast<double>(significand), exponent - format.bias() - format.fraction_bits);
    }
    return negative ? -magnitude : magnitude;
}

inline Bits encoded(double value, Format format) {
    if (std::isnan(value)) return format.quiet_nan();
    const Bits sign = std::signbit(value) ? Bits{1} << (format.fraction_bits + format.exponent_bits) : 0;
    const double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | format.infinity();
    int exponent = 0;  // the magnitude is in [0.5, 1) * 2^exponent
    std::frexp(magnitude, &exponent);
    const int least = 1 - format.bias() - format.fraction_bits;  // the unit of denormals
    int unit = std::max(exponent - 1 - format.fraction_bits, least);
    auto units = static_cast<Bits>(std::nearbyint(std::ldexp(magnitude, -unit)));
    if (units >> (format.fraction_bits + 1) != 0) {  // rounded up to the next power of two
        units >>= 1;
        ++unit;
    }
    if (units >> format.fraction_bits == 0) return sign | units;  // denormal or zero
    const Bits biased = static_cast<Bits>(unit - least + 1);
    if (biased >= format.exponent_mask()) return sign | format.infinity();
    return sign | (biased << format.fraction_bits) | (units & ((Bits{1} << format.fraction_bits) - 1));
}

template <class Float>
Float combined(ReduceOp op, Float a, Float b) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<Float>::quiet_NaN();
    switch (op) {
        case ReduceOp::sum: return a + b;
        case ReduceOp::product: return a * b;
        case ReduceOp::min: return a < b ? a : b;
        case ReduceOp::max: return a > b ? a : b;
    }
    throw std::logic_error("unknown operation");
}

template <class Float, class Decode>
Float accumulated(ReduceOp op, const std::vector<Bits>& operands, Bits divisor, Decode decode) {
    Float value = decode(operands[0]);
    for (std::size_t i = 1; i < operands.size(); ++i) value = combined(op, value, decode(operands[i]));
    return divisor > 1 ? value / static_cast<Float>(divisor) : value;
}

inline Bits floating_reference(DType dtype, ReduceOp op, const std::vector<Bits>& operands, Bits divisor) {
    if (dtype == DType::f64) {
        const auto decode = [](Bits bits) { return std::bit_cast<double>(bits); };
        const auto value = accumulated<double>(op, operands, divisor, decode);
        return std::isnan(value) ? 0x7ff8000000000000U : std::bit_cast<Bits>(value);
    }
    if (dtype == DType::f32) {
        const auto decode = [](Bits bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits)); };
        const auto value = accumulated<float>(op, operands, divisor, decode);
        return std::isnan(value) ? 0x7fc00000U : std::bit_cast<std::uint32_t>(value);
    }
    const Format format = dtype == DType::f16 ? float16 : bfloat16;
    const auto decode = [format](Bits bits) { return static_cast<float>(decoded(bits, format)); };
    return encoded(static_cast<double>(accumulated<float>(op, operands, divisor, decode)), format);
}

__extension__ typedef __int128 Wide;

Wide integer_value(DType dtype, Bits bits) {
    const std::size_t width = 8 * dtype_sizes[static_cast<std::size_t>(dtype)];
    const bool negative = is_signed(dtype) && (bits >> (width - 1)) != 0;
    return static_cast<Wide>(bits) - (negative ? Wide{1} << width : Wide{0});
}

inline Bits integer_reference(DType dtype, ReduceOp op, const std::vector<Bits>& operands, Bits divisor) {
    Wide value = integer_value(dtype, operands[0]);
    for (std::size_t i = 1; i < operands.size(); ++i) {
        const Wide next = integer_value(dtype, operands[i]);
        switch (op) {
            case ReduceOp::sum: value += next; break;
            case ReduceOp::product: value = integer_value(DType::i64, static_cast<Bits>(value)) * next; break;
            case ReduceOp::min: value = std::min(value, next); break;
            case ReduceOp::max: value = std::max(value, next); break;
        }
    }
    if (divisor > 1) {
        const Wide whole = (value < 0 ? -value : value) / static_cast<Wide>(divisor);
        value = value < 0 ? -whole : whole;
    }
    const std::size_t size = dtype_sizes[static_cast<std::size_t>(dtype)];
    return size == 8 ? static_cast<Bits>(value) : static_cast<Bits>(value) & ((Bits{1} << (8 * size)) - 1);
}

inline Bits boolean_reference(ReduceOp op, const std::vector<Bits>& operands) {
    std::size_t count_true = 0;
    for (const Bits operand : operands) count_true += operand != 0;
    if (op == ReduceOp::sum || op == ReduceOp::max) return count_true > 0;
    return count_true == operands.size();
}

inline Bits reference(DType dtype, ReduceOp op, const std::vector<Bits>& operands, Bits divisor) {
    if (dtype == DType::boolean) return boolean_reference(op, operands);
    if (is_integer(dtype)) return integer_reference(dtype, op, operands, divisor);
    return floating_reference(dtype, op, operands, divisor);
}

// ---- buffers -------------------------------------------------------------------------------------------------------

inline Bits element(const Bytes& buffer, std::size_t index, std::size_t size) {
    Bits bits = 0;
    std::memcpy(&bits, buffer.data() + index * size, size);
    return bits;
}

inline void set_element(Bytes& buffer, std::size_t index, std::size_t size, Bits bits) {
    std::memcpy(buffer.data() + index * size, &bits, size);
}

inline const std::vector<Bits>& special_values(DType dtype) {
    static const std::vector<Bits> f16{0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00, 0x6800, 0x6801,
                                       0x7bff, 0xfbff, 0x4c00, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 0xfd55};
    static const std::vector<Bits> bf16{0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0xbf80, 0x4380, 0x3b80,
                                        0x7f7f, 0xff7f, 0x7b00, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81, 0xffaa};
    static const std::vector<Bits> f32{0x00000000, 0x80000000, 0x00000001, 0x807fffff, 0x00800000, 0x3f800000,
                                       0xbf800000, 0x4b800000, 0x33800000, 0x7f7fffff, 0xff7fffff, 0x7f800000,
                                       0xff800000, 0x7fc00000, 0xffc12345, 0x7f800001, 0x7fffffff};
    static const std::vector<Bits> f64{
        0, 0x8000000000000000, 1, 0x800fffffffffffff, 0x0010000000000000, 0x3ff0000000000000, 0xbff0000000000000,
        0x4340000000000000, 0x7fefffffffffffff, 0xffefffffffffffff, 0x7ff0000000000000, 0xfff0000000000000,
        0x7ff8000000000000, 0xfff8000012345678, 0x7ff0000000000001};
    static const std::vector<Bits> integers{
        0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x7fffffffffffffff,
        0x8000000000000000, 0xffffffffffffffff};
    static const std::vector<Bits> booleans{0, 1, 1, 1, 1, 1, 1, 2, 0x80, 0xff};
    switch (dtype) {
        case DType::f16: return f16;
        case DType::bf16: return bf16;
        case DType::f32: return f32;
        case DType::f64: return f64;
        case DType::boolean: return booleans;
        default: return integers;
    }
}

// Returns a buffer with one third special values, one third values of moderate size (so that sums round), and one third
// random bits.
inline Bytes random_buffer(DType dtype, std::size_t count, std::mt19937_64& random) {
    const std::size_t size = dtype_sizes[static_cast<std::size_t>(dtype)];
    const std::vector<Bits>& special = special_values(dtype);
    Bytes buffer(count * size);
    for (std::size_t i = 0; i < count; ++i) {
        const Bits any = random();
        const double moderate = std::ldexp(static_cast<double>(random() >> 11), -50) - 4;
        Bits bits = any;
        if (dtype == DType::boolean || any % 3 == 0) {
            bits = special[(any >> 8) % special.size()];
        } else if (any % 3 == 1) {
            if (dtype == DType::f16) bits = encoded(moderate, float16);
            else if (dtype == DType::bf16) bits = encoded(moderate, bfloat16);
            else if (dtype == DType::f32) bits = std::bit_cast<std::uint32_t>(static_cast<float>(moderate));
            else if (dtype == DType::f64) bits = std::bit_cast<Bits>(moderate);
            else bits = static_cast<Bits>(static_cast<std::int64_t>(moderate));
        }
        set_element(buffer, i, size, bits);
    }
    return buffer;
}

}  // namespace multiring::checks
