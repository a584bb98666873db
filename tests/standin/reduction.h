// Arithmetic of NCCL's element types.
#pragma once

#include <cstddef>
#include <vector>

namespace standin {

constexpr int kTypes = 12;  // int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 and two of 8 bits
constexpr int kSum = 0;
constexpr int kOps = 5;  // sum product max min average

size_t width_of(int type);
double number_of(int type, const void* stored);  // of the types that are floating-point numbers

// Combines the same `count` elements of all ranks, in the order of the ranks. Each operand is multiplied by `factor`.
// 16-bit floats are summed as float and rounded once; averages of integers are truncated, as NCCL's are.
void combine(int type, int op, double factor, const std::vector<const void*>& operands, void* result, size_t count);

}  // namespace standin
