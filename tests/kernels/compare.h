// Comparisons shared by the op tests.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "runtime/threads/thread_pool.h"

namespace gradwire::testing {

// Expects |got - want| <= tolerance * (scale + |want|) for every element. A NaN matches only a NaN.
inline void expect_close(const std::vector<float>& got, const std::vector<float>& want, double tolerance,
                         const std::string& what, double scale = 1.0) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (got[i] == want[i]) continue;  // equal infinities
    double error = std::abs(static_cast<double>(got[i]) - want[i]);
    ASSERT_LE(error, tolerance * (scale + std::abs(static_cast<double>(want[i]))))
        << what << "[" << i << "] of " << got.size() << ": got " << got[i] << ", want " << want[i];
  }
}

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& want,
                             const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << "[" << i << "]: " << got[i] << " and " << want[i];
  }
}

// Returns d loss / d x(i) by central differences. Evaluates `loss` after each change of `x`.
template <typename Loss>
double central_difference(std::vector<float>& x, size_t i, const Loss& loss, float step = 1.0f / 128) {
  const float old = x[i];
  x[i] = old + step;
  const double above = loss(), high = x[i];
  x[i] = old - step;
  const double below = loss(), low = x[i];
  x[i] = old;
  return (above - below) / (high - low);
}

// Returns the numbers of host threads to test. The shim does not use host threads.
inline std::vector<int> thread_counts() {
#ifdef GRADWIRE_SIMT_TESTS
  return {1};
#else
  return {1, 2, 5};
#endif
}

using Arrays = std::vector<std::vector<float>>;

// Expects `run`, which returns arrays, to return the same bits on every call and with any number of threads.
template <typename Run>
void expect_same_bits_with_any_threads(const Run& run) {
  const int before = host_threads();
  const Arrays first = run();
  for (int threads : thread_counts()) {
    set_host_threads(threads);
    const Arrays again = run();
    for (size_t i = 0; i < first.size(); ++i)
      expect_same_bits(again.at(i), first[i], fmt::format("array {} with {} threads", i, threads));
  }
  set_host_threads(before);
}

inline double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace gradwire::testing
