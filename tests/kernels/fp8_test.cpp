// Properties specific to the block-scaled FP8 wire format: E4M3 codes, scales, and the error of the sent
// values. wire_test.cpp tests the properties of all formats.
#include "kernels/wire/fp8.h"

#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {
namespace {

TEST(E4m3, AllCodesSurviveARoundTrip) {
  for (int code = 0; code < 256; ++code) {
    float value = e4m3_to_float(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(float_to_e4m3_nearest(value), code);
      EXPECT_EQ(float_to_e4m3_stochastic(value, 0xffff), code) << "an exact value must not be rounded";
    }
  }
  EXPECT_EQ(e4m3_to_float(0x7e), 448.0f);
  EXPECT_EQ(e4m3_to_float(0x01), std::ldexp(1.0f, -9));
  EXPECT_EQ(e4m3_to_float(0x08), std::ldexp(1.0f, -6));
}

TEST(E4m3, RoundsToNearestEven) {
  for (int code = 0; code < 0x7e; ++code) {
    float low = e4m3_to_float(static_cast<uint8_t>(code)),
          high = e4m3_to_float(static_cast<uint8_t>(code + 1));
    float middle = (low + high) / 2;
    EXPECT_EQ(float_to_e4m3_nearest(std::nextafter(middle, 0.0f)), code);
    EXPECT_EQ(float_to_e4m3_nearest(std::nextafter(middle, 1000.0f)), code + 1);
    EXPECT_EQ(float_to_e4m3_nearest(middle), code % 2 == 0 ? code : code + 1);
  }
  EXPECT_EQ(float_to_e4m3_nearest(1e30f), 0x7e);
  EXPECT_EQ(float_to_e4m3_nearest(-1e30f), 0xfe);
  EXPECT_EQ(float_to_e4m3_nearest(kInf), 0x7f);
}

TEST(E4m3, ScaleFitsTheLargestValueAndIsNonzero) {
  for (float largest : {0.0f, 1e-45f, FLT_MIN, 1.0f, 1.75f, 1.7500001f, 448.0f, 449.0f, 2.9e38f}) {
    uint8_t byte = fp8_scale_byte(float_bits(largest));
    EXPECT_GT(fp8_scale(byte), 0.0f);
    EXPECT_EQ(fp8_scale(byte) * fp8_inverse_scale(byte), 1.0f);
    EXPECT_LE(largest * fp8_inverse_scale(byte), 448.0f);
    if (largest > 1e-30f) {
      EXPECT_GT(largest * fp8_inverse_scale(byte), 224.0f) << "unused range at " << largest;
    }
  }
}

TEST(E4m3, ScaleIsTheLeastThatDoesNotClamp) {
  for (uint32_t bits = 0; bits <= 0x7f800000u; bits += 0x1fffffu) {
    const float largest = bits_float(bits - (bits == 0x7f800000u ? 1 : 0));
    const uint8_t byte = fp8_scale_byte(float_bits(largest));
    EXPECT_TRUE(byte == 246 || largest <= 448.0f * fp8_scale(byte)) << largest;
    EXPECT_TRUE(byte == 1 || largest > 448.0f * fp8_scale(static_cast<uint8_t>(byte - 1))) << largest;
    EXPECT_EQ(float_bits(largest) <= kFp8MostBits, largest <= 448.0f * fp8_scale(byte)) << largest;
  }
}

TEST(E4m3, FourCodesAtOnceEqualSingleCodes) {
  for (uint32_t code = 0; code < 256; ++code) {
    float x[4];
    e4m3x4_to_floats(code | (code ^ 0x5au) << 8 | (255u - code) << 16 | code << 24, x);
    expect_same_floats(
        {x, x + 4},
        {e4m3_to_float(code), e4m3_to_float(code ^ 0x5au), e4m3_to_float(255u - code), e4m3_to_float(code)},
        "decoded");
  }
  for (uint32_t bits = 0; bits <= float_bits(448.0f); bits += 0xfedu) {
    const float x[4] = {bits_float(bits), -bits_float(bits), bits_float(bits | 0xfffffu), 448.0f};
    uint32_t word = 0, drawn = 0;
    float rounded[4];
    for (int k = 0; k < 4; ++k) {
      const uint32_t random = (bits * 0x9e3779b1u >> 16) ^ static_cast<uint32_t>(k % 2 * 0xffff);
      rounded[k] = e4m3_stochastic(x[k], random);
      word |= static_cast<uint32_t>(float_to_e4m3_nearest(x[k])) << (8 * k);
      drawn |= static_cast<uint32_t>(float_to_e4m3_stochastic(x[k], random)) << (8 * k);
    }
    ASSERT_EQ(floats_to_e4m3x4(x), word) << x[0];
    ASSERT_EQ(floats_to_e4m3x4(rounded), drawn) << x[0];
    float decoded[4];
    e4m3x4_to_floats(drawn, decoded);
    for (int k = 0; k < 4; ++k) ASSERT_EQ(float_bits(decoded[k]), float_bits(rounded[k])) << x[0];
    ASSERT_EQ(largest_magnitude(x), float_bits(448.0f));
  }
}

template <int kMantissa>
void expect_same_minis() {
  for (uint32_t code = 0; code < 8u << kMantissa; ++code) {
    float x[4];
    const uint32_t words[] = {code | code << 16 | code << 24};
    Mini<kMantissa>()(words, x);
    for (int k : {0, 2, 3})
      EXPECT_EQ(float_bits(64.0f * x[k]), float_bits(Mini<kMantissa>::value_of(code))) << code;
    EXPECT_EQ(float_bits(x[1]), 0u);
  }
}
TEST(E4m3, HoldsAllCodesOfE2m1AndE2m3) {
  expect_same_minis<1>();
  expect_same_minis<3>();
}

class Fp8Wire : public ::testing::TestWithParam<Backend>, public WireFixture {
 public:
  Fp8Wire() : WireFixture(GetParam()) {}
};

TEST_P(Fp8Wire, SentPlusResidualIsTheSumWithABoundedError) {
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    const WireProblem p{.own = spread_values(5000, 5, 8.0f),
                        .residual = spread_values(5000, 6, 8.0f),
                        .rounding = {.mode = mode, .seed = 9}};
    const WireResult got = run(wire_format("fp8"), p);
    for (size_t i = 0; i < p.own.size(); ++i) {
      float s = p.own[i] + p.residual[i], sent = got.out[i] * 2;
      float scale = fp8_scale(got.wire[static_cast<size_t>(fp8_scales_offset(5000)) + i / kFp8Block]);
      if (mode == Rounding::nearest) {
        ASSERT_EQ(static_cast<double>(sent) + got.residual[i], static_cast<double>(s)) << i;
      } else {
        ASSERT_NEAR(static_cast<double>(sent) + got.residual[i], s, 1e-7 * std::max(std::abs(s), scale / 512))
            << i;
      }
      double ulps = mode == Rounding::nearest ? 0.5 : 1.0;
      ASSERT_LE(std::abs(got.residual[i]), ulps * std::max(std::abs(s) / 8, scale / 512)) << i;
    }
  }
}

TEST_P(Fp8Wire, StochasticRoundingIsUnbiased) {
  std::vector<float> own(128 * 2000, 1.03f);  // between the codes of 1.0 and 1.125
  for (size_t i = 0; i < own.size(); i += kFp8Block) own[i] = 448.0f;
  const WireResult got = run(wire_format("fp8"), {.own = own,
                                                  .residual = std::vector<float>(own.size(), 0.0f),
                                                  .rounding = {.mode = Rounding::stochastic, .seed = 11},
                                                  .step = 1});
  double sum = 0;
  int64_t counted = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    if (i % kFp8Block == 0) continue;
    sum += got.out[i] * 2;
    ++counted;
  }
  EXPECT_NEAR(sum / static_cast<double>(counted), 1.03, 0.001);  // the standard error is 1e-4
}

TEST_P(Fp8Wire, SendsNonFiniteValuesAsNan) {
  WireProblem p{.own = spread_values(300, 21, 1.0f), .residual = spread_values(300, 22, 1.0f)};
  const WireResult clean = run(wire_format("fp8"), p);
  for (float poison : {kNan, kInf, -kInf}) {
    WireProblem bad = p;
    bad.own[130] = poison;
    const WireResult got = run(wire_format("fp8"), bad);
    EXPECT_TRUE(std::isnan(got.out[130]));
    EXPECT_EQ(got.residual[130], 0.0f);
    for (size_t i = 0; i < p.own.size(); ++i) {
      if (i / kFp8Block == 1) continue;  // the changed value may have set this block's scale
      ASSERT_EQ(got.out[i], clean.out[i]);
      ASSERT_EQ(got.residual[i], clean.residual[i]);
    }
    for (size_t i = 128; i < 256; ++i) {
      ASSERT_EQ(std::isfinite(got.out[i]), i != 130);
      ASSERT_TRUE(std::isfinite(got.residual[i]));
    }
  }
}

GW_INSTANTIATE_BACKENDS(Fp8Wire);

}  // namespace
}  // namespace gradwire::testing
