#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/op.h"

namespace gradwire::testing {
namespace {

TEST(Bf16Operand, RoundsToNearestEvenAndPreservesNanAndInfinity) {
  EXPECT_EQ(narrow<Bf16>(1.0f).bits, 0x3f80);
  EXPECT_EQ(narrow<Bf16>(1.0f + 1.0f / 256).bits, 0x3f80);  // ties round to even
  EXPECT_EQ(narrow<Bf16>(1.0f + 3.0f / 256).bits, 0x3f82);
  EXPECT_EQ(narrow<Bf16>(1.0f + 1.001f / 256).bits, 0x3f81);
  EXPECT_EQ(narrow<Bf16>(-0.0f).bits, 0x8000);
  EXPECT_EQ(narrow<Bf16>(3.4e38f).bits, 0x7f80);  // beyond the largest finite value
  EXPECT_EQ(narrow<Bf16>(-std::numeric_limits<float>::infinity()).bits, 0xff80);
  EXPECT_TRUE(std::isnan(widen(narrow<Bf16>(std::numeric_limits<float>::quiet_NaN()))));
  // the payload is only in the dropped half
  EXPECT_TRUE(std::isnan(widen(narrow<Bf16>(bits_float(0x7f800001u)))));
}

}  // namespace
}  // namespace gradwire::testing
