#include "combine.h"

#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "codec_variants.h"
#include "combine_variants.h"

namespace multiring {
namespace {

struct Variant {
    const char* name;
    CombineKernel (*find)(DType, ReduceOp, bool average);
    Codec (*codec)(Wire);
    bool (*runs_here)();
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// The fastest variant comes first.
constexpr Variant variants[] = {{"avx512", avx512_kernel, avx512_codec, has_avx512},
                                {"avx2", avx2_kernel, avx2_codec, has_avx2},
                                {"baseline", baseline_kernel, baseline_codec, always}};
#elif defined(__aarch64__)
constexpr Variant variants[] = {{"neon", baseline_kernel, baseline_codec, always}};
#else
#error "multiring runs on x86-64 and aarch64"
#endif

const Variant* best_variant() {
#if defined(__x86_64__)
    __builtin_cpu_init();  // needed because a static initializer of another file may call this function first
#endif
    const Variant* variant = variants;
    while (!variant->runs_here()) ++variant;
    return variant;
}

std::atomic<const Variant*>& chosen_variant() {
    static std::atomic<const Variant*> chosen{best_variant()};
    return chosen;
}

__extension__ typedef __int128 Signed128;
__extension__ typedef unsigned __int128 Unsigned128;

// Averages one element at a time. The division takes most of the time, and no variant has a vector instruction for it.
// `Wide` can hold the sum of 2^31 elements, so the sum does not wrap.
template <class T, class Wide>
void average_integers(void* dst, const void* const* sources, int source_count, std::size_t bytes,
                      std::uint64_t divisor) {
    for (std::size_t offset = 0; offset < bytes; offset += sizeof(T)) {
        Wide sum = 0;
        for (int source = 0; source < source_count; ++source) {
            T element;
            std::memcpy(&element, static_cast<const char*>(sources[source]) + offset, sizeof element);
            sum += static_cast<Wide>(element);
        }
        const T average = static_cast<T>(sum / static_cast<Wide>(divisor));
        std::memcpy(static_cast<char*>(dst) + offset, &average, sizeof average);
    }
}

CombineKernel integer_average(DType dtype) {
    switch (dtype) {
        case DType::i8: return average_integers<std::int8_t, std::int64_t>;
        case DType::i16: return average_integers<std::int16_t, std::int64_t>;
        case DType::i32: return average_integers<std::int32_t, std::int64_t>;
        case DType::i64: return average_integers<std::int64_t, Signed128>;
        case DType::u8: return average_integers<std::uint8_t, std::uint64_t>;
        case DType::u16: return average_integers<std::uint16_t, std::uint64_t>;
        case DType::u32: return average_integers<std::uint32_t, std::uint64_t>;
        case DType::u64: return average_integers<std::uint64_t, Unsigned128>;
        case DType::f16:
        case DType::bf16:
        case DType::f32:
        case DType::f64:
        case DType::boolean: break;
    }
    return nullptr;
}

void check_arguments(DType dtype, ReduceOp op, int source_count, std::uint64_t divisor) {
    if (source_count < 1) {
        throw std::invalid_argument("combine needs at least one source, not " + std::to_string(source_count));
    }
    if (divisor == 1) return;
    if (divisor == 0 || divisor > std::numeric_limits<std::int32_t>::max()) {
        throw std::invalid_argument("combine: the divisor is a number of ranks, 1 to 2^31 - 1, not " +
                                    std::to_string(divisor));
    }
    if (op != ReduceOp::sum || dtype == DType::boolean) {
        throw std::invalid_argument("combine averages only sums of numbers: divisor " + std::to_string(divisor) +
                                    (dtype == DType::boolean ? " with booleans" : " with another operation"));
    }
}

}  // namespace

std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::i8:
        case DType::u8:
        case DType::boolean: return 1;
        case DType::i16:
        case DType::u16:
        case DType::f16:
        case DType::bf16: return 2;
        case DType::i32:
        case DType::u32:
        case DType::f32: return 4;
        case DType::i64:
        case DType::u64:
        case DType::f64: return 8;
    }
    throw std::invalid_argument("no DType has the number " + std::to_string(static_cast<int>(dtype)));
}

void combine(DType dtype, ReduceOp op, void* dst, const void* const* sources, int source_count, std::size_t count,
             std::uint64_t divisor) {
    check_arguments(dtype, op, source_count, divisor);
    const std::size_t bytes = count * size_of(dtype);
    const bool average = divisor > 1;
    CombineKernel kernel = average ? integer_average(dtype) : nullptr;
    if (kernel == nullptr) kernel = chosen_variant().load(std::memory_order_relaxed)->find(dtype, op, average);
    if (kernel == nullptr) {
        throw std::invalid_argument("no ReduceOp has the number " + std::to_string(static_cast<int>(op)));
    }
    kernel(dst, sources, source_count, bytes, divisor);
}

Codec codec_in_use(Wire wire) { return chosen_variant().load(std::memory_order_relaxed)->codec(wire); }

const char* combine_isa() { return chosen_variant().load(std::memory_order_relaxed)->name; }

void force_isa(const char* name) {
    std::string available;
    for (const Variant& variant : variants) {
        if (!variant.runs_here()) continue;
        if (std::strcmp(variant.name, name) == 0) {
            chosen_variant().store(&variant, std::memory_order_relaxed);
            return;
        }
        available += std::string(available.empty() ? "" : ", ") + variant.name;
    }
    throw std::invalid_argument(std::string("no variant \"") + name + "\" on this processor; there are: " + available);
}

}  // namespace multiring
