// Tests every type, operation and number of sources on every variant that this processor supports. The reference is
// scalar arithmetic (combine_reference.h); it shares no code and no method with the kernels.
#include "core/kernels/combine.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "combine_reference.h"

using namespace multiring::checks;

namespace {

// ---- counting ------------------------------------------------------------------------------------------------------

long passed = 0;
long failed = 0;

void check(bool right, const std::string& what) {
    if (right) {
        ++passed;
        return;
    }
    ++failed;
    constexpr long shown = 30;
    if (failed <= shown) std::printf("FAILED %s\n", what.c_str());
}

// ---- one comparison ------------------------------------------------------------------------------------------------

struct Case {
    DType dtype;
    ReduceOp op;
    Bits divisor;
    std::vector<Bytes> sources;
    Bytes expected;

    std::size_t size() const { return dtype_sizes[static_cast<std::size_t>(dtype)]; }
    std::size_t count() const { return expected.size() / size(); }

    std::vector<Bits> operands(std::size_t index) const {
        std::vector<Bits> all;
        for (const Bytes& source : sources) all.push_back(element(source, index, size()));
        return all;
    }
    void expect() {
        expected.resize(sources[0].size());
        for (std::size_t i = 0; i < count(); ++i) {
            set_element(expected, i, size(), reference(dtype, op, operands(i), divisor));
        }
    }
};

std::string describe(const Case& tried, int in_place, std::size_t shift, const Bytes& got) {
    char head[200];
    std::snprintf(head, sizeof head, "%s %s %s: count %zu, sources %zu, divisor %llu, in place of %d, shift %zu",
                  multiring::combine_isa(), name_of(tried.dtype), name_of(tried.op), tried.count(),
                  tried.sources.size(), static_cast<unsigned long long>(tried.divisor), in_place, shift);
    std::string text = head;
    for (std::size_t i = 0; i < tried.count(); ++i) {
        const Bits found = element(got, i, tried.size());
        const Bits wanted = element(tried.expected, i, tried.size());
        if (found == wanted) continue;
        text.append(": [").append(std::to_string(i)).append("] is ").append(hex(found));
        text.append(", should be ").append(hex(wanted)).append(", of");
        for (const Bits operand : tried.operands(i)) text.append(" ").append(hex(operand));
        break;
    }
    return text;
}

// `in_place`: index of the source that is also dst, or -1. Buffers end at the end of their allocation, so that
// AddressSanitizer detects overruns. With a shift, each buffer begins at a different odd address.
void run(const Case& tried, int in_place, std::size_t shift) {
    std::vector<Bytes> copies;
    std::vector<const void*> sources;
    for (std::size_t i = 0; i < tried.sources.size(); ++i) {
        Bytes copy(shift * (2 * i + 1));
        copy.insert(copy.end(), tried.sources[i].begin(), tried.sources[i].end());
        copy.shrink_to_fit();
        copies.push_back(std::move(copy));
        sources.push_back(copies.back().data() + shift * (2 * i + 1));
    }
    const std::size_t bytes = tried.expected.size();
    Bytes fresh(shift * 5 + bytes, 0xa5);
    unsigned char* dst = fresh.data() + shift * 5;
    if (in_place >= 0) {
        const auto at = static_cast<std::size_t>(in_place);
        dst = copies[at].data() + shift * (2 * at + 1);
    }
    multiring::combine(tried.dtype, tried.op, dst, sources.data(), static_cast<int>(sources.size()), tried.count(),
                       tried.divisor);
    const Bytes got(dst, dst + bytes);
    bool right = got == tried.expected;
    for (std::size_t i = 0; i < copies.size(); ++i) {  // the other sources must be unchanged
        if (static_cast<int>(i) == in_place) continue;
        right = right && (bytes == 0 || std::memcmp(sources[i], tried.sources[i].data(), bytes) == 0);
    }
    if (right) check(true, "");
    else check(false, describe(tried, in_place, shift, got));
}

void run_everywhere(const Case& tried, const std::vector<std::string>& variants) {
    const int sources = static_cast<int>(tried.sources.size());
    for (const std::string& variant : variants) {
        multiring::force_isa(variant.c_str());
        for (int in_place = -1; in_place < sources; ++in_place) {
            const bool inner = in_place > 0 && in_place < sources - 1;
            if (sources > 5 && inner && in_place != sources / 2) continue;
            run(tried, in_place, 0);
            run(tried, in_place, 1);
        }
    }
}

// ---- tests ---------------------------------------------------------------------------------------------------------

void test_all_combinations(const std::vector<std::string>& variants) {
    std::mt19937_64 random(20240607);
    std::vector<std::size_t> counts;
    for (std::size_t count = 0; count <= 70; ++count) counts.push_back(count);
    counts.push_back(1000);
    counts.push_back(4500);  // more than one block for every type
    for (const DType dtype : dtypes) {
        for (const ReduceOp op : ops) {
            for (const std::size_t sources : {1U, 2U, 3U, 4U, 5U, 17U}) {
                for (const std::size_t count : counts) {
                    if (count == 4500 && sources != 3 && sources != 4) continue;
                    Case tried{dtype, op, 1, {}, {}};
                    for (std::size_t i = 0; i < sources; ++i) {
                        tried.sources.push_back(random_buffer(dtype, count, random));
                    }
                    tried.expect();
                    run_everywhere(tried, variants);
                    if (op != ReduceOp::sum || dtype == DType::boolean || sources == 1) continue;
                    tried.divisor = sources;
                    tried.expect();
                    run_everywhere(tried, variants);
                }
            }
        }
    }
}

// Tests every 16-bit pattern: alone (rounding must undo widening), divided, and with a random partner.
void test_all_sixteen_bit_values(const std::vector<std::string>& variants) {
    std::mt19937_64 random(7);
    constexpr std::size_t count = 65536;
    for (const DType dtype : {DType::f16, DType::bf16}) {
        Bytes all(2 * count);
        for (std::size_t i = 0; i < count; ++i) set_element(all, i, 2, i);
        for (const Bits divisor : {Bits{1}, Bits{3}, Bits{2147483647}}) {
            Case alone{dtype, ReduceOp::sum, divisor, {all}, {}};
            alone.expect();
            run_everywhere(alone, variants);
        }
        for (int round = 0; round < 4; ++round) {
            for (const ReduceOp op : ops) {
                Case pair{dtype, op, 1, {all, random_buffer(dtype, count, random)}, {}};
                pair.expect();
                run_everywhere(pair, variants);
            }
        }
    }
}

struct Literal {
    DType dtype;
    ReduceOp op;
    std::vector<Bits> operands;
    Bits divisor;
    Bits result;
    const char* why;
};

// Cases worked out by hand. They test the reference as well as the kernels.
void test_literals(const std::vector<std::string>& variants) {
    const Literal literals[] = {
        {DType::i8, ReduceOp::sum, {0x7f, 0x01}, 1, 0x80, "127 + 1 wraps to -128"},
        {DType::i8, ReduceOp::sum, {0x7f, 0x7f}, 2, 0x7f, "an average of 127s does not wrap"},
        {DType::i8, ReduceOp::sum, {0xff, 0xfe}, 2, 0xff, "-3 / 2 is -1, truncated"},
        {DType::u8, ReduceOp::sum, {0xff, 0xfe}, 2, 0xfe, "509 / 2 is 254"},
        {DType::i16, ReduceOp::product, {0x4000, 0x0004}, 1, 0, "65536 wraps to 0"},
        {DType::i32, ReduceOp::min, {0x80000000, 0x7fffffff}, 1, 0x80000000, "signed"},
        {DType::u32, ReduceOp::min, {0x80000000, 0x7fffffff}, 1, 0x7fffffff, "unsigned"},
        {DType::i64, ReduceOp::sum, {0x7fffffffffffffff, 1}, 2, 0x4000000000000000, "the sum has more than 64 bits"},
        {DType::i64, ReduceOp::sum, {0x8000000000000000, 0xffffffffffffffff}, 2, 0xc000000000000000, "truncated"},
        {DType::u64, ReduceOp::sum, {0xfffffffffffffffe, 1}, 2, 0x7fffffffffffffff, "unsigned average"},
        {DType::u64, ReduceOp::sum, {0xffffffffffffffff, 0xfffffffffffffffd}, 2, 0xfffffffffffffffe, "a 65-bit sum"},
        {DType::f16, ReduceOp::sum, {0x7bff, 0x4c00}, 1, 0x7c00, "65504 + 16 = 65520 ties to 2^16: infinity"},
        {DType::f16, ReduceOp::sum, {0x7bff, 0x4b80}, 1, 0x7bff, "65504 + 15 rounds down"},
        {DType::f16, ReduceOp::sum, {0x7bff, 0x7bff}, 2, 0x7bff, "the average is divided before the rounding"},
        {DType::f16, ReduceOp::sum, {0x6800, 0x3c00}, 1, 0x6800, "2048 + 1 ties to even: 2048"},
        {DType::f16, ReduceOp::sum, {0x6801, 0x3c00}, 1, 0x6802, "2050 + 1 ties to even: 2052"},
        {DType::f16, ReduceOp::sum, {0x6800, 0x3c00, 0x3c00}, 1, 0x6801, "2048 + 1 + 1 rounded once: 2050"},
        {DType::f16, ReduceOp::sum, {0x0001, 0x0001}, 1, 0x0002, "denormals stay"},
        {DType::f16, ReduceOp::sum, {0x03ff, 0x0001}, 1, 0x0400, "denormal to normal"},
        {DType::f16, ReduceOp::sum, {0x0001, 0x0000}, 2, 0x0000, "half the least denormal ties to zero"},
        {DType::f16, ReduceOp::sum, {0x8001, 0x8002}, 2, 0x8002, "1.5 least denormals tie to 2"},
        {DType::f16, ReduceOp::sum, {0x74ac, 0xc500}, 7, 0x6956, "19131 / 7 = 2733 ties; times float(1 / 7) is more"},
        {DType::f16, ReduceOp::sum, {0x7c00, 0xfc00}, 1, 0x7e00, "inf - inf is the positive quiet NaN"},
        {DType::f16, ReduceOp::min, {0x7d01, 0xfc00}, 1, 0x7e00, "NaN before -inf"},
        {DType::bf16, ReduceOp::sum, {0x4380, 0x3f80}, 1, 0x4380, "256 + 1 ties to even: 256"},
        {DType::bf16, ReduceOp::sum, {0x4381, 0x3f80}, 1, 0x4382, "258 + 1 ties to even: 260"},
        {DType::bf16, ReduceOp::sum, {0x4517, 0xbf80}, 7, 0x43ac, "2415 / 7 = 345 ties; times float(1 / 7) is more"},
        {DType::bf16, ReduceOp::sum, {0x7f7f, 0x7b00}, 1, 0x7f80, "half a unit above the greatest: infinity"},
        {DType::bf16, ReduceOp::sum, {0x7f81, 0x0000}, 1, 0x7fc0, "a signalling NaN does not become infinity"},
        {DType::bf16, ReduceOp::product, {0xffff, 0x3f80}, 1, 0x7fc0, "NaN does not round up to zero"},
        {DType::bf16, ReduceOp::max, {0x3f80, 0xffff}, 1, 0x7fc0, "NaN from the right operand"},
        {DType::f32, ReduceOp::sum, {0x4b800000, 0x3f800000, 0x3f800000}, 1, 0x4b800000, "2^24 + 1 + 1, left to right"},
        {DType::f32, ReduceOp::sum, {0x3f800000, 0x3f800000, 0x4b800000}, 1, 0x4b800001, "1 + 1 + 2^24"},
        {DType::f32, ReduceOp::sum, {0x3f800000, 0x00000000, 0x00000000}, 3, 0x3eaaaaab, "1 / 3"},
        {DType::f32, ReduceOp::sum, {0x40e00000, 0x00000000}, 10, 0x3f333333, "7 / 10, not 7 * (1 / 10)"},
        {DType::f32, ReduceOp::sum, {0x00000001, 0x00000002}, 1, 0x00000003, "denormals stay"},
        {DType::f32, ReduceOp::max, {0xffc12345, 0x7f800000}, 1, 0x7fc00000, "NaN without sign and payload"},
        {DType::f32, ReduceOp::min, {0x00000000, 0x80000000}, 1, 0x80000000, "the later of two equal operands"},
        {DType::f32, ReduceOp::max, {0x00000000, 0x80000000}, 1, 0x80000000, "the later of two equal operands"},
        {DType::f64, ReduceOp::sum, {0xfff8000000000001, 0x7ff8000000000002}, 1, 0x7ff8000000000000, "two NaNs"},
        {DType::f64, ReduceOp::sum, {0x3ff0000000000000, 0}, 3, 0x3fd5555555555555, "1 / 3"},
        {DType::boolean, ReduceOp::sum, {0, 2}, 1, 1, "or of bytes other than 1"},
        {DType::boolean, ReduceOp::product, {1, 2}, 1, 1, "and of bytes without a common bit"},
        {DType::boolean, ReduceOp::min, {1, 0}, 1, 0, "and"},
        {DType::boolean, ReduceOp::max, {0, 0}, 1, 0, "or"},
    };
    for (const Literal& literal : literals) {
        const std::size_t size = dtype_sizes[static_cast<std::size_t>(literal.dtype)];
        check(reference(literal.dtype, literal.op, literal.operands, literal.divisor) == literal.result,
              std::string("reference: ") + literal.why);
        for (const std::size_t count : {std::size_t{1}, 64 / size + 1}) {
            Case tried{literal.dtype, literal.op, literal.divisor, {}, Bytes(count * size)};
            for (const Bits operand : literal.operands) {
                Bytes source(count * size);
                for (std::size_t i = 0; i < count; ++i) set_element(source, i, size, operand);
                tried.sources.push_back(source);
            }
            for (std::size_t i = 0; i < count; ++i) set_element(tried.expected, i, size, literal.result);
            run_everywhere(tried, variants);
        }
    }
}

template <class Call>
void check_refused(const char* what, const char* shown, Call call) {
    try {
        call();
    } catch (const std::invalid_argument& error) {
        check(std::string(error.what()).find(shown) != std::string::npos, std::string(what) + ": " + error.what());
        return;
    }
    check(false, std::string(what) + " was not refused");
}

void test_refusals() {
    float value = 1;
    const void* const sources[] = {&value, &value};
    const auto attempt = [&](DType dtype, ReduceOp op, int source_count, Bits divisor) {
        return [&value, &sources, dtype, op, source_count, divisor] {
            multiring::combine(dtype, op, &value, sources, source_count, 1, divisor);
        };
    };
    check_refused("no source", "not 0", attempt(DType::f32, ReduceOp::sum, 0, 1));
    check_refused("fewer than no source", "not -1", attempt(DType::f32, ReduceOp::sum, -1, 1));
    check_refused("divisor 0", "not 0", attempt(DType::f32, ReduceOp::sum, 2, 0));
    check_refused("divisor 2^31", "not 2147483648", attempt(DType::f32, ReduceOp::sum, 2, Bits{1} << 31));
    check_refused("average of products", "divisor 2", attempt(DType::f32, ReduceOp::product, 2, 2));
    check_refused("average of minima", "divisor 2", attempt(DType::i32, ReduceOp::min, 2, 2));
    check_refused("average of booleans", "booleans", attempt(DType::boolean, ReduceOp::sum, 2, 2));
    check_refused("unknown type", "200", attempt(static_cast<DType>(200), ReduceOp::sum, 2, 1));
    for (const DType dtype : {DType::f32, DType::u8, DType::boolean}) {
        check_refused("unknown operation", "99", attempt(dtype, static_cast<ReduceOp>(99), 2, 1));
    }
    check_refused("size of an unknown type", "13", [] { multiring::size_of(static_cast<DType>(13)); });
    check_refused("unknown variant", "\"sse9\"", [] { multiring::force_isa("sse9"); });
    check(value == 1, "a refused call wrote to dst");
}

void test_sizes() {
    for (const DType dtype : dtypes) {
        check(multiring::size_of(dtype) == dtype_sizes[static_cast<std::size_t>(dtype)],
              std::string("size_of ") + name_of(dtype));
    }
}

// Returns the variants that this processor supports, the fastest first.
std::vector<std::string> find_variants() {
    std::vector<std::string> variants;
    for (const char* name : {"avx512", "avx2", "baseline", "neon"}) {
        try {
            multiring::force_isa(name);
        } catch (const std::invalid_argument&) {
            std::printf("not on this processor: %s\n", name);
            continue;
        }
        check(std::string(multiring::combine_isa()) == name, std::string("combine_isa is not ") + name);
        variants.push_back(name);
    }
    return variants;
}

}  // namespace

int main() {
    const std::string by_default = multiring::combine_isa();
    const std::vector<std::string> variants = find_variants();
    check(!variants.empty() && variants[0] == by_default, "the default variant is not the best one: " + by_default);
    test_sizes();
    test_refusals();
    test_literals(variants);
    test_all_sixteen_bit_values(variants);
    test_all_combinations(variants);
    std::printf("%ld passed, %ld failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
