#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace standin {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Half {
  uint16_t bits;
  operator float() const {
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    float value = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                  : std::ldexp(static_cast<float>(fraction | 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -value : value;
  }
  static Half of(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (size == 0) return {sign};
    if (size >= 65520.0F) return {static_cast<uint16_t>(sign | 0x7c00)};
    int exponent = 0;
    std::frexp(size, &exponent);
    const int scale = std::max(exponent - 11, -24);  // of the last digit
    const auto digits = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, -scale)));
    const uint32_t rest = digits + (static_cast<uint32_t>(scale + 24) << 10);  // a carry goes into the exponent
    return {static_cast<uint16_t>(sign | rest)};
  }
};

struct Brain {
  uint16_t bits;
  operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }
  static Brain of(float value) {
    if (std::isnan(value)) return {0x7fc0};
    const uint32_t all = bits_of(value);
    return {static_cast<uint16_t>((all + 0x7fff + (all >> 16 & 1)) >> 16)};
  }
};

template <typename Value>
Value combined(Value left, Value right, int op) {
  switch (op) {
    case 1: return static_cast<Value>(left * right);
    case 2: return std::max(left, right);
    case 3: return std::min(left, right);
    default: return static_cast<Value>(left + right);
  }
}

template <typename Stored, typename Value>
void combine_as(int op, double factor, const std::vector<const void*>& operands, void* result, size_t count) {
  for (size_t at = 0; at < count; ++at) {
    Value sum{};
    for (size_t rank = 0; rank < operands.size(); ++rank) {
      Stored stored{};
      std::memcpy(&stored, static_cast<const char*>(operands[rank]) + at * sizeof stored, sizeof stored);
      auto value = static_cast<Value>(stored);
      if (factor != 1) value = static_cast<Value>(static_cast<double>(value) * factor);
      sum = rank == 0 ? value : combined(sum, value, op);
    }
    if (op == 4) sum = static_cast<Value>(sum / static_cast<Value>(operands.size()));
    Stored stored{};
    if constexpr (std::is_class_v<Stored>) {
      stored = Stored::of(sum);
    } else {
      stored = static_cast<Stored>(sum);
    }
    std::memcpy(static_cast<char*>(result) + at * sizeof stored, &stored, sizeof stored);
  }
}

}  // namespace

size_t width_of(int type) {
  static constexpr size_t kWidths[kTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kWidths[type];
}

double number_of(int type, const void* stored) {
  float single = 0;
  double value = 0;
  Half half{};
  Brain brain{};
  switch (type) {
    case 6: std::memcpy(&half, stored, sizeof half); return static_cast<float>(half);
    case 7: std::memcpy(&single, stored, sizeof single); return single;
    case 9: std::memcpy(&brain, stored, sizeof brain); return static_cast<float>(brain);
    default: std::memcpy(&value, stored, sizeof value); return value;
  }
}

void combine(int type, int op, double factor, const std::vector<const void*>& operands, void* result, size_t count) {
  switch (type) {
    case 0: return combine_as<int8_t, int8_t>(op, factor, operands, result, count);
    case 2: return combine_as<int32_t, int32_t>(op, factor, operands, result, count);
    case 3: return combine_as<uint32_t, uint32_t>(op, factor, operands, result, count);
    case 4: return combine_as<int64_t, int64_t>(op, factor, operands, result, count);
    case 5: return combine_as<uint64_t, uint64_t>(op, factor, operands, result, count);
    case 6: return combine_as<Half, float>(op, factor, operands, result, count);
    case 7: return combine_as<float, float>(op, factor, operands, result, count);
    case 8: return combine_as<double, double>(op, factor, operands, result, count);
    case 9: return combine_as<Brain, float>(op, factor, operands, result, count);
    default: return combine_as<uint8_t, uint8_t>(op, factor, operands, result, count);
  }
}

}  // namespace standin
