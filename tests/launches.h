// How many launches on CUDA an op comes to: what a count of ops (runtime/op_count.h) is worth. The tests of the kernels
// hold it to what the ops launch (tests/kernels/launches_test.cpp), the model's to a budget
// (tests/trainer/launches_test.cpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "runtime/op_count.h"

namespace gradwire::testing {

// Kernels, cuBLAS products, copies and fills per call, for rows that registers hold. The name is the dispatcher's.
inline int64_t cuda_launches(const std::string& op) {
  // A second kernel adds up partial sums over rows.
  constexpr std::array<const char*, 5> kTwo = {"attention_backward", "bias_gelu_backward", "column_sum",
                                               "cross_entropy", "layer_norm_backward"};
  return std::find(kTwo.begin(), kTwo.end(), op) != kTwo.end() ? 2 : 1;
}

inline int64_t cuda_launches(const OpCount::ByName& ops) {
  int64_t sum = 0;
  for (const auto& [op, calls] : ops) sum += calls * cuda_launches(op);
  return sum;
}

}  // namespace gradwire::testing
