// The number of CUDA launches per op, counted as in runtime/device/device.h. The kernel tests compare the
// numbers with the ops' launches (tests/kernels/launches_test.cpp). The model's tests check a budget
// (tests/trainer/launches_test.cpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "runtime/device/device.h"

namespace gradwire::testing {

// Returns the number of kernels, cuBLAS products, copies and fills per call, for rows that fit in registers.
// `op` is the dispatcher's name of the op.
inline int64_t cuda_launches(const std::string& op) {
  // These ops use a second kernel that adds up partial sums over rows.
  constexpr std::array<const char*, 6> kTwo = {
      "assemble_tokens_backward", "attention_backward", "bias_gelu_backward", "column_sum", "cross_entropy",
      "layer_norm_backward"};
  return std::find(kTwo.begin(), kTwo.end(), op) != kTwo.end() ? 2 : 1;
}

inline int64_t cuda_launches(const OpCount::ByName& ops) {
  int64_t sum = 0;
  for (const auto& [op, calls] : ops) sum += calls * cuda_launches(op);
  return sum;
}

}  // namespace gradwire::testing
