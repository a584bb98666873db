// Tests every wire type on every variant that this processor supports, at lengths around the block sizes. The reference
// is scalar arithmetic in double precision; it shares no code and no method with the kernels.
#include "kernels/codec.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/combine.h"

namespace {

using multiring::Wire;
using Bytes = std::vector<unsigned char>;

long failed = 0;

void check(bool right, const std::string& what) {
    if (!right && ++failed <= 30) std::printf("FAILED %s\n", what.c_str());
}

constexpr Wire wires[] = {Wire::fp16, Wire::bf16, Wire::int8};
constexpr const char* names[] = {"none", "fp16", "bf16", "int8"};

// Rounds `value` to `digits` binary digits with no place below 2^lowest, ties to even. Values from 2^beyond on become
// infinity.
double nearest(double value, int digits, int lowest, int beyond) {
    if (value == 0 || !std::isfinite(value)) return value;
    int exponent = 0;
    std::frexp(value, &exponent);
    const int place = std::max(exponent - digits, lowest);
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -place)), place);
    return std::abs(rounded) >= std::ldexp(1.0, beyond) ? std::copysign(HUGE_VAL, value) : rounded;
}

// Computes the expected values after encoding and decoding.
void arrive(Wire wire, const float* from, float* to, std::size_t count) {
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    if (wire != Wire::int8) {
        for (std::size_t i = 0; i < count; ++i) {
            const double value = wire == Wire::fp16 ? nearest(from[i], 11, -24, 16) : nearest(from[i], 8, -133, 128);
            to[i] = std::isnan(value) ? nan : static_cast<float>(value);
        }
        return;
    }
    for (std::size_t begin = 0; begin < count; begin += 256) {
        const std::size_t end = std::min<std::size_t>(begin + 256, count);
        float most = 0;
        bool finite = true;
        for (std::size_t i = begin; i < end; ++i) {
            finite &= std::isfinite(from[i]);
            most = std::max(most, std::abs(from[i]));
        }
        // Round the scale down to 17 binary digits.
        int exponent = 0;
        const double fraction = std::frexp(most / 127.0F, &exponent);
        const double scale = std::ldexp(std::floor(std::ldexp(fraction, 17)), exponent - 17);
        for (std::size_t i = begin; i < end; ++i) {
            if (!finite) {
                to[i] = nan;
            } else if (most < std::ldexp(1.0, -119)) {
                to[i] = 0;
            } else {
                const float inverse = static_cast<float>(1 / scale);  // rounds to the same float32 as 1.0F / scale
                const float quotient = from[i] * inverse;
                to[i] = static_cast<float>(std::nearbyint(static_cast<double>(quotient)) * scale);
                if (to[i] == 0) to[i] = 0;  // an encoded byte has no negative zero
            }
        }
    }
}

std::vector<float> numbers(std::size_t count, int style, std::mt19937& random) {
    std::vector<float> values(count);
    std::normal_distribution<float> normal;
    for (float& value : values) {
        if (style == 0) value = normal(random);
        if (style == 1) value = std::ldexp(normal(random), static_cast<int>(random() % 250) - 125);
        if (style == 2) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        if (style == 3) value = random() % 50 == 0 ? std::numeric_limits<float>::max() : 1e38F * normal(random);
        if (style == 4) value = 1e-38F * normal(random);
    }
    if (style == 5 && count > 0) values[random() % count] = random() % 2 == 0 ? -HUGE_VALF : NAN;
    return values;
}

void compare(Wire wire, std::size_t count, int style, std::mt19937& random) {
    const std::string what = std::string(multiring::combine_isa()) + " " + names[static_cast<int>(wire)] + " of " +
                             std::to_string(count) + ", style " + std::to_string(style);
    std::vector<float> values = numbers(count, style, random);
    values.reserve(1);  // memcpy needs an address even for 0 bytes
    std::vector<float> want(count + 1);
    arrive(wire, values.data(), want.data(), count);
    const std::size_t coded = multiring::encoded_bytes(wire, count);
    const std::size_t shift = random() % 5;
    // Use unaligned addresses, and check that the bytes behind the results do not change.
    Bytes source(4 * count + shift + 1), wired(coded + shift + 64, 0xa5), target(4 * count + shift + 64, 0xa5);
    std::memcpy(source.data() + shift, values.data(), 4 * count);
    multiring::encode(wire, wired.data() + shift, source.data() + shift, count);
    multiring::decode(wire, target.data() + shift, wired.data() + shift, count);
    check(std::memcmp(target.data() + shift, want.data(), 4 * count) == 0, what + ": values");
    for (std::size_t i = 0; i < 64; ++i) {
      check(wired[coded + shift + i] == 0xa5 && target[4 * count + shift + i] == 0xa5, what + ": wrote beyond the end");
    }
    // Encoding decoded values again must not change them, as a whole or in pieces.
    Bytes again(coded), piecewise(coded);
    std::vector<float> twice(count + 1);
    multiring::encode(wire, again.data(), want.data(), count);
    multiring::decode(wire, twice.data(), again.data(), count);
    check(std::memcmp(twice.data(), want.data(), 4 * count) == 0, what + ": encoded twice");
    const std::size_t step = 3 * multiring::block_elements(wire);
    std::size_t at = 0;
    for (std::size_t begin = 0; begin < count; begin += step) {
        const std::size_t size = std::min(step, count - begin);
        multiring::encode(wire, piecewise.data() + at, want.data() + begin, size);
        at += multiring::encoded_bytes(wire, size);
    }
    check(at == coded && piecewise == again, what + ": encoded in pieces");
}

}  // namespace

int main() {
    const std::string best = multiring::combine_isa();
    for (const char* isa : {"baseline", "neon", "avx2", "avx512"}) {
        try {
            multiring::force_isa(isa);
        } catch (const std::invalid_argument&) {
            continue;
        }
        std::mt19937 random(1);
        for (const Wire wire : wires) {
            for (const std::size_t count : {0, 1, 3, 15, 16, 17, 31, 64, 255, 256, 257, 511, 513, 1024, 4099}) {
                for (int style = 0; style < 6; ++style) compare(wire, count, style, random);
            }
        }
    }
    multiring::force_isa(best.c_str());
    const float values[] = {1.0F, -2.0F};
    float copies[2];
    multiring::encode(Wire::none, copies, values, 2);
    multiring::decode(Wire::none, copies, values, 2);
    check(copies[1] == -2.0F, "the wire `none` copies");
    std::printf("%ld failed\n", failed);
    return failed == 0 ? 0 : 1;
}
