// Properties specific to the BF16 wire format. wire_test.cpp tests the properties of all formats.
#include "kernels/wire/floats.h"

#include <fmt/format.h>

#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {
namespace {

class Bf16 : public ::testing::TestWithParam<Backend>, public WireFixture {
 public:
  Bf16() : WireFixture(GetParam()) {}
};

std::vector<float> values_of(const Bytes& wire) {
  return reference_decoded(kBf16, wire, static_cast<int64_t>(wire.size() / 2));
}

Bytes bytes_of(const std::vector<uint16_t>& wire) {
  Bytes bytes(wire.size() * 2);
  std::memcpy(bytes.data(), wire.data(), bytes.size());
  return bytes;
}

TEST_P(Bf16, WiresMayStartAnywhere) {
  uint32_t seed = 0;
  for (int64_t n : {0, 1, 7, 33, 1025, 4099}) {
    for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
      for (int64_t shift : {1, 3, 4, 5}) {
        WireProblem p{.own = wild(n, ++seed),
                      .residual = wild(n, ++seed),
                      .inputs = {reference_encoded(kBf16, wild(n, ++seed))},
                      .own_position = static_cast<int>(shift % 2),
                      .rounding = {.mode = mode, .seed = 99, .first_element = shift},
                      .misalign_wires = 2 * shift};
        // Some cases shift all floats alike (a vector loop with a head). Other cases shift each array
        // differently.
        if (shift == 3) p.misalign = {3, 3, 3};
        if (shift == 5) p.misalign = {1, 2, 3};
        SCOPED_TRACE(fmt::format("n {} shift {}", n, shift));
        expect_same_result(kBf16, p, run(kBf16, p), reference_result(kBf16, p));
        p.inputs.clear();
        p.own_position = 0;
        const WireResult got = run(kBf16, p);
        expect_same_result(kBf16, p, got, reference_result(kBf16, p));
        expect_same_floats(WireFixture::decoded(kBf16, got.wire, n, 0.3f, shift % 4, 2 * shift),
                           reference_decoded(kBf16, got.wire, n, 0.3f), "decoded");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Bf16, WirePlusResidualIsExactlyTheSum) {
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    auto own = wild(20000, 1), residual = wild(20000, 2);
    for (float s : special_values()) {
      if (!is_finite(s)) continue;
      own.push_back(s);  // saturation, denormals, ties
      residual.push_back(0.0f);
    }
    const WireResult got =
        run(kBf16, {.own = own, .residual = residual, .rounding = {.mode = mode, .seed = 3}});
    const auto sent = values_of(got.wire);
    for (size_t i = 0; i < own.size(); ++i) {
      float s = own[i] + residual[i];
      if (!is_finite(s)) continue;
      ASSERT_TRUE(is_finite(sent[i])) << s;
      ASSERT_EQ(static_cast<double>(sent[i]) + got.residual[i], static_cast<double>(s)) << "element " << i;
    }
  }
}

TEST_P(Bf16, SendsNonFiniteSumsUnchanged) {
  std::vector<float> own = {kInf, -kInf, kNan, FLT_MAX, -FLT_MAX, 1.0f, bits_float(0x7f800001u)};
  std::vector<float> residual = {1.0f, 2.0f, 3.0f, FLT_MAX, -FLT_MAX, kNan, 0.0f};
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    const WireResult got = run(kBf16, {.own = own, .residual = residual, .rounding = {.mode = mode}});
    const auto sent = values_of(got.wire);
    for (size_t i = 0; i < own.size(); ++i) {
      float s = own[i] + residual[i];
      EXPECT_EQ(std::isnan(sent[i]), std::isnan(s)) << i;
      EXPECT_TRUE(sent[i] == s || std::isnan(s)) << i;
      EXPECT_EQ(got.residual[i], 0.0f) << i;
      EXPECT_FALSE(is_finite(got.out[i])) << i;
    }
  }
}

TEST_P(Bf16, EveryPatternSurvivesDecodeAndEncode) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  const auto values = WireFixture::decoded(kBf16, bytes_of(patterns), 65536);
  for (size_t i = 0; i < patterns.size(); ++i) {
    float exact = bits_float(static_cast<uint32_t>(i) << 16);
    ASSERT_TRUE(std::isnan(exact) ? std::isnan(values[i]) : float_bits(values[i]) == float_bits(exact)) << i;
  }
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    const WireResult got = run(kBf16, {.own = values, .residual = {}, .rounding = {.mode = mode}});
    expect_same_floats(values_of(got.wire), values, "patterns");  // a NaN remains a NaN
  }
}

TEST_P(Bf16, RoundsTiesToEven) {
  // The value 1 + k/256 with odd k is halfway between two BF16 numbers, which are 1/128 apart.
  const WireResult got =
      run(kBf16, {.own = {1.0f + 1.0f / 256, 1.0f + 3.0f / 256, -1.0f - 1.0f / 256, 1.0f + 1.001f / 256},
                  .residual = {0, 0, 0, 0}});
  EXPECT_EQ(values_of(got.wire), (std::vector<float>{1.0f, 1.0f + 4.0f / 256, -1.0f, 1.0f + 2.0f / 256}));
}

TEST_P(Bf16, StochasticRoundingIsUnbiasedAndVariesWithTheStep) {
  // The values are a quarter of the way from 1 to the next BF16 number, so a quarter of the draws rounds up.
  constexpr int64_t kCount = 40000;
  WireProblem p{.own = std::vector<float>(kCount, 1.0f + 0.25f / 128),
                .residual = std::vector<float>(kCount, 0.0f),
                .rounding = {.mode = Rounding::stochastic, .seed = 11},
                .step = 0};
  const auto first = values_of(run(kBf16, p).wire);
  p.step = 1;
  const auto second = values_of(run(kBf16, p).wire);
  int64_t up = 0, same = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    up += first[i] > 1.0f;
    same += first[i] == second[i];
  }
  double sigma = std::sqrt(0.25 * 0.75 / kCount);
  EXPECT_NEAR(static_cast<double>(up) / kCount, 0.25, 5 * sigma);
  // the draws are independent
  EXPECT_NEAR(static_cast<double>(same) / kCount, 0.25 * 0.25 + 0.75 * 0.75, 5 * sigma);
}

TEST_P(Bf16, CuttingTheBufferChangesNoBit) {
  constexpr int64_t kCount = 1100;
  const WireProblem p{.own = normal(kCount, 7),
                      .residual = normal(kCount, 8, 0.01f),
                      .rounding = {.mode = Rounding::stochastic, .seed = 4, .first_element = 1000001}};
  const WireResult whole = run(kBf16, p);
  for (int64_t piece : {57, 64, 401}) {
    WireResult joined;
    for (int64_t begin = 0; begin < kCount; begin += piece) {
      const int64_t end = std::min(kCount, begin + piece);
      WireProblem part = p;
      part.own = {p.own.begin() + begin, p.own.begin() + end};
      part.residual = {p.residual.begin() + begin, p.residual.begin() + end};
      part.rounding.first_element += begin;
      const WireResult got = run(kBf16, part);
      joined.wire.insert(joined.wire.end(), got.wire.begin(), got.wire.end());
      joined.residual.insert(joined.residual.end(), got.residual.begin(), got.residual.end());
    }
    EXPECT_EQ(joined.wire, whole.wire);
    EXPECT_EQ(joined.residual, whole.residual);
  }
}

TEST_P(Bf16, AddsInInputOrder) {
  // The order of the terms matters, because 1 vanishes next to 2^30 in FP32: (2^30 - 2^30) + 1 = 1, but (1 +
  // 2^30) - 2^30 = 0.
  const float big = 1073741824.0f;
  auto sum = [&](float first, float second, float own, int own_position) {
    const WireResult got =
        run(kBf16, {.own = {own},
                    .residual = {},
                    .inputs = {reference_encoded(kBf16, {first}), reference_encoded(kBf16, {second})},
                    .own_position = own_position});
    return values_of(got.wire)[0];
  };
  EXPECT_EQ(sum(big, -big, 1.0f, 2), 1.0f);
  EXPECT_EQ(sum(big, -big, 1.0f, 1), 0.0f);
  EXPECT_EQ(sum(big, -big, 1.0f, 0), 0.0f);
  EXPECT_EQ(sum(big, 1.0f, -big, 1), 1.0f);
  EXPECT_EQ(sum(big, 1.0f, -big, 2), 0.0f);
}

GW_INSTANTIATE_BACKENDS(Bf16);

}  // namespace
}  // namespace gradwire::testing
