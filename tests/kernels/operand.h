// Operands that exist twice, so that a test writes an op's arguments once and runs the op on both sides: in
// FP32 for the reference, and in the storage type T on the test's backend.
//
//   Operand<Bf16> x(*this, normal(n, 1)), y(*this, n);
//   GW_RUN_BOTH(gelu, [&](auto on) { return Gelu{.x = on(x), .y = on(y), .count = n}; });
//   y.expect_rounded("y");
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/op.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {

template <typename T>
std::vector<T> narrowed(const std::vector<float>& values) {
  std::vector<T> out;
  out.reserve(values.size());
  for (float v : values) out.push_back(narrow<T>(v));
  return out;
}
template <typename T>
std::vector<float> widened(const std::vector<T>& values) {
  std::vector<float> out;
  out.reserve(values.size());
  for (T v : values) out.push_back(widen(v));
  return out;
}

// An operand on both sides. The destructor expects the guards around the backend's array to be unchanged.
template <typename T>
class Operand {
 public:
  // Creates an input. Both sides hold `values`, rounded to T.
  Operand(OpFixture& test, const std::vector<float>& values, int64_t misalign = 0)
      : host(widened(narrowed<T>(values))), device(test.array(narrowed<T>(values), misalign)) {}
  // Creates an output of `count` elements, zero on the host and poisoned on the backend.
  Operand(OpFixture& test, int64_t count, int64_t misalign = 0)
      : host(static_cast<size_t>(count)), device(test.array<T>(count, misalign)) {}
  ~Operand() { device.expect_guards_intact("operand"); }
  Operand(const Operand&) = delete;
  Operand& operator=(const Operand&) = delete;

  std::vector<float> got() const { return widened(device.host()); }
  void expect_close(const std::string& what, double tolerance, double scale = 1.0) const {
    testing::expect_close(got(), host, tolerance, what, scale);
  }
  void expect_same_bits(const std::string& what) const { testing::expect_same_bits(got(), host, what); }
  // Compares the backend's values with the host's. For T = float, expects `tolerance` and `scale` as
  // expect_close() does, or the same bits if both parameters are 0. For T = Bf16, expects the host's values
  // after one rounding to nearest, which is off by at most 2^-8 of the value. `slack` is the absolute error
  // of FP32 arithmetic.
  void expect_rounded(const std::string& what, double tolerance = 0.0, double scale = 0.0,
                      double slack = 4e-6) const {
    if constexpr (std::is_same_v<T, float>) {
      if (tolerance == 0.0) return expect_same_bits(what);
      return expect_close(what, tolerance, scale);
    }
    const auto values = got();
    ASSERT_EQ(values.size(), host.size()) << what;
    for (size_t i = 0; i < host.size(); ++i) {
      if (std::isnan(values[i]) && std::isnan(host[i])) continue;
      const double want = host[i];
      ASSERT_LE(std::abs(values[i] - want), std::abs(want) / 256 * (1 + 1e-4) + slack)
          << what << "[" << i << "] of " << host.size() << ": got " << values[i] << ", want " << want;
    }
  }

  std::vector<float> host;
  Array<T> device;
};

// The two sides on which a builder of arguments places its operands.
struct OnHost {
  template <typename T>
  float* operator()(Operand<T>& x) const {
    return x.host.data();
  }
};
struct OnDevice {
  template <typename T>
  T* operator()(Operand<T>& x) const {
    return x.device.data();
  }
};

struct RowsByWidth {
  int64_t rows, width;
  int64_t size() const { return rows * width; }
  std::string name() const { return fmt::format("{}x{}", rows, width); }
};

// Calls check(shape, misalign) for every shape, with aligned and misaligned operands.
template <typename Shape, typename Check>
void for_shapes(const std::vector<Shape>& shapes, const Check& check) {
  for (const Shape& shape : shapes) {
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", shape.name(), misalign));
      check(shape, misalign);
    }
  }
}

}  // namespace gradwire::testing

// Runs the op and its reference. `args` is a generic function that returns the op's arguments on a side.
#define GW_RUN_BOTH(op, ...)                                  \
  do {                                                        \
    const auto both_sides = __VA_ARGS__;                      \
    ::gradwire::reference::op(both_sides(testing::OnHost{})); \
    const auto on_device = both_sides(testing::OnDevice{});   \
    GW_RUN(op, on_device);                                    \
  } while (false)
