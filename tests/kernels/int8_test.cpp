// Properties specific to the int8 wire format: codes, units, and the error of the sent values. wire_test.cpp
// tests the properties of all formats.
#include "kernels/wire/int.h"

#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {
namespace {

TEST(Int8, UnitFitsTheLargestValueAndIsNonzero) {
  for (float largest :
       {0.0f, 1e-45f, FLT_MIN, 1.0f, 1.984375f, 1.9843751f, 127.0f, 128.0f, 2.9e38f, 3.37e38f}) {
    const uint8_t byte = Int8::unit_byte(float_bits(largest));
    EXPECT_GT(fp8_scale(byte), 0.0f);
    EXPECT_EQ(fp8_scale(byte) * fp8_inverse_scale(byte), 1.0f);
    EXPECT_LE(largest * fp8_inverse_scale(byte), 127.0f);
    if (largest > 1e-30f) {
      EXPECT_GT(largest * fp8_inverse_scale(byte), 63.5f) << "unused range at " << largest;
    }
  }
  const uint8_t last = Int8::unit_byte(float_bits(FLT_MAX));
  EXPECT_EQ(Int8::code_of<false>(FLT_MAX * fp8_inverse_scale(last), -1), 127) << "saturates";
  EXPECT_LT(127 * fp8_scale(last), kInf);
}

TEST(Int8, RoundsToNearestEven) {
  auto signed_code = [](float x, int32_t random = -1) { return Int8::code_of<false>(x, random); };
  for (int code = -127; code <= 127; ++code) {
    const auto x = static_cast<float>(code);
    EXPECT_EQ(signed_code(x), code);
    EXPECT_EQ(signed_code(x, 0xffff), code) << "an exact value must not be rounded";
    if (code == 127) continue;
    EXPECT_EQ(signed_code(std::nextafter(x + 0.5f, -1000.0f)), code);
    EXPECT_EQ(signed_code(std::nextafter(x + 0.5f, 1000.0f)), code + 1);
    EXPECT_EQ(signed_code(x + 0.5f), code % 2 == 0 ? code : code + 1);
  }
  for (float x : {kNan, kInf, -kInf}) EXPECT_EQ(signed_code(x), -128);
  EXPECT_EQ(signed_code(2.25f, 0xbfff), 2);  // a quarter of the draws rounds up
  EXPECT_EQ(signed_code(2.25f, 0xc000), 3);
  EXPECT_EQ(signed_code(-2.25f, 0x3fff), -3);  // a quarter of the draws rounds down
  EXPECT_EQ(signed_code(-2.25f, 0x4000), -2);
}

TEST(Int8, BytesBecomeFractionsOfOneUnit) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (uint32_t k = 0; k < 4; ++k)
      EXPECT_EQ(byte_fraction(byte << (8 * k), k), static_cast<float>(byte) * 0x1p-133f);
  }
}

class Int8Wire : public ::testing::TestWithParam<Backend>, public WireFixture {
 public:
  Int8Wire() : WireFixture(GetParam()) {}
};

TEST_P(Int8Wire, SentPlusResidualIsTheSumWithABoundedError) {
  const Wire format = find_wire_format("int8");
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    const WireProblem p{.own = spread_values(5000, 5, 8.0f),
                        .residual = spread_values(5000, 6, 8.0f),
                        .out_scale = 1,
                        .rounding = {.mode = mode, .seed = 9}};
    const WireResult got = run(format, p);
    for (size_t i = 0; i < p.own.size(); ++i) {
      const float s = p.own[i] + p.residual[i];
      const float unit = fp8_scale(got.wire[(i / 128 + 1) * 129 - 1]);
      if (mode == Rounding::nearest) {
        ASSERT_EQ(static_cast<double>(got.out[i]) + got.residual[i], static_cast<double>(s)) << i;
      }
      ASSERT_LE(std::abs(got.residual[i]), (mode == Rounding::nearest ? 0.5 : 1.0) * unit) << i;
    }
  }
}

GW_INSTANTIATE_BACKENDS(Int8Wire);

}  // namespace
}  // namespace gradwire::testing
