// XLA's element types (XLA_FFI_DataType) that multiring has: the one table of their numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace multiring::jax {

struct ElementType {
  int xla;       // XLA's number
  size_t bytes;  // of an element
};

// In the order of multiring.h's types.
constexpr std::array<ElementType, 15> kElementTypes{{{1, 1},
                                                     {2, 1},
                                                     {3, 2},
                                                     {4, 4},
                                                     {5, 8},
                                                     {6, 1},
                                                     {7, 2},
                                                     {8, 4},
                                                     {9, 8},
                                                     {10, 2},
                                                     {16, 2},
                                                     {11, 4},
                                                     {12, 8},
                                                     {15, 8},
                                                     {18, 16}}};

// Returns the number of multiring.h's type for a number of XLA's, or -1 if there is none.
constexpr int32_t element_type(int xla) {
  for (size_t type = 0; type < kElementTypes.size(); ++type)
    if (kElementTypes[type].xla == xla) return static_cast<int32_t>(type);
  return -1;
}

}  // namespace multiring::jax
