// The BF16 wire format: bits as the reference's, nothing lost, non-finite values seen but never kept.
#include "kernels/wire/bf16.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cstring>

#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "tests/kernels/backend.h"

namespace gradwire {
namespace {

using testing::Array;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Equal bits, except that any NaN equals any other (devices choose payloads differently).
template <typename T>
void expect_same_bits(const std::vector<T>& got, const std::vector<T>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  auto is_nan = [](T x) {
    if constexpr (sizeof(T) == 2) return std::isnan(bf16_to_float(x));
    if constexpr (sizeof(T) == 4) return std::isnan(static_cast<float>(x));
  };
  for (size_t i = 0; i < got.size(); ++i) {
    if (is_nan(got[i]) && is_nan(want[i])) continue;
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(T)), 0)
        << what << "[" << i << "] of " << got.size() << ": got " << got[i] << ", want " << want[i];
  }
}

// Values of every magnitude a gradient can have: normal draws scaled from denormal to the largest finite
// float.
std::vector<float> wild(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (auto& v : values) {
    do v = bits_float(generator());
    while (!is_finite(v));
  }
  return values;
}

std::vector<float> special_values() {
  return {0.0f,        -0.0f,  1.0f,    -1.0f,    FLT_MAX, -FLT_MAX, 3.3895e38f, 3.39e38f,    FLT_MIN,
          FLT_MIN / 2, 1e-45f, -1e-45f, 9.2e-41f, kInf,    -kInf,    kNan,       1.00390625f, 1.01171875f};
}

struct Encoded {
  std::vector<uint16_t> wire;
  std::vector<float> residual, out;
};

class Bf16 : public testing::OpTest {
 public:
  struct Options {
    bool residual = true, out = false, in_place = false;
    Bf16Rounding rounding = {};
    uint64_t step = 0;
    std::array<int64_t, 4> misalign = {0, 0, 0, 0};  // of grad, residual, wire, out
  };

  Encoded encode(const std::vector<float>& grad, const std::vector<float>& residual, const Options& o) {
    int64_t n = static_cast<int64_t>(grad.size());
    auto g = array(grad, o.misalign[0]);
    auto e = array(residual, o.misalign[1]);
    auto wire = array<uint16_t>(n, o.misalign[2]);
    auto out = array<float>(n, o.misalign[3]);
    auto step = array(std::vector<uint64_t>{o.step});
    Bf16Encode args{
        .grad = g.data(), .wire = wire.data(), .out_scale = 0.25f, .count = n, .rounding = o.rounding};
    args.rounding.step = step.data();
    if (o.residual) args.residual = e.data();
    if (o.out) args.out = o.in_place ? g.data() : out.data();
    GW_RUN(bf16_encode, args);
    for (auto* a : {&g, &e, &out}) a->expect_guards_intact("floats");
    wire.expect_guards_intact("wire");
    if (!o.in_place) expect_same_bits(g.host(), grad, "grad is read only");
    return {wire.host(), e.host(), (o.in_place ? g : out).host()};
  }
};

Encoded reference_encode(std::vector<float> grad, std::vector<float> residual, const Bf16::Options& o) {
  Encoded want{std::vector<uint16_t>(grad.size()), residual, std::vector<float>(grad.size())};
  Bf16Encode args{.grad = grad.data(), .wire = want.wire.data(), .out_scale = 0.25f, .rounding = o.rounding};
  args.count = static_cast<int64_t>(grad.size());
  args.rounding.step = &o.step;
  if (o.residual) args.residual = want.residual.data();
  if (o.out) args.out = want.out.data();
  reference::bf16_encode(args);
  return want;
}

TEST_P(Bf16, EncodeHasTheReferencesBitsForAnySizeAndAlignment) {
  auto sizes = testing::awkward_sizes();
  sizes.push_back(70001);  // more than one piece per thread
  uint32_t seed = 0;
  for (int64_t n : sizes) {
    for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
      for (int variant = 0; variant < 8; ++variant) {
        Options o{.residual = (variant & 1) != 0, .out = (variant & 2) != 0, .in_place = variant == 7};
        o.rounding = {.mode = mode, .seed = 99, .first_element = variant == 4 ? 13 : 8 * variant};
        o.step = 5;
        // Aligned, all shifted alike (a vector loop with a head), and each shifted its own way.
        if (variant == 2 || variant == 3) o.misalign = {3, 3, 3, 3};
        if (variant >= 4) o.misalign = {1, 2, 5, variant % 4};
        auto grad = wild(n, ++seed), residual = wild(n, ++seed);
        for (size_t i = 0; i < grad.size() && n == 4099; ++i) {
          if (i % 7 == 0) grad[i] = special_values()[i / 7 % special_values().size()];
        }
        auto got = encode(grad, residual, o);
        auto want = reference_encode(grad, residual, o);
        SCOPED_TRACE("n " + std::to_string(n) + " variant " + std::to_string(variant));
        expect_same_bits(got.wire, want.wire, "wire");
        if (o.residual) expect_same_bits(got.residual, want.residual, "residual");
        if (o.out) expect_same_bits(got.out, want.out, "out");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Bf16, WirePlusResidualIsExactlyTheSum) {
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    auto grad = wild(20000, 1), residual = wild(20000, 2);
    for (float s : special_values()) {
      if (!is_finite(s)) continue;
      grad.push_back(s);  // saturation, denormals, ties
      residual.push_back(0.0f);
    }
    auto got = encode(grad, residual, {.rounding = {.mode = mode, .seed = 3}});
    for (size_t i = 0; i < grad.size(); ++i) {
      float s = grad[i] + residual[i], sent = bf16_to_float(got.wire[i]);
      if (!is_finite(s)) continue;
      ASSERT_TRUE(is_finite(sent)) << s;
      ASSERT_EQ(static_cast<double>(sent) + got.residual[i], static_cast<double>(s)) << "element " << i;
    }
  }
}

TEST_P(Bf16, NonFiniteSumsTravelButAreNotKept) {
  std::vector<float> grad = {kInf, -kInf, kNan, FLT_MAX, -FLT_MAX, 1.0f, bits_float(0x7f800001u)};
  std::vector<float> residual = {1.0f, 2.0f, 3.0f, FLT_MAX, -FLT_MAX, kNan, 0.0f};
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    auto got = encode(grad, residual, {.out = true, .rounding = {.mode = mode}});
    for (size_t i = 0; i < grad.size(); ++i) {
      float s = grad[i] + residual[i], sent = bf16_to_float(got.wire[i]);
      EXPECT_EQ(std::isnan(sent), std::isnan(s)) << i;
      EXPECT_TRUE(sent == s || std::isnan(s)) << i;
      EXPECT_EQ(got.residual[i], 0.0f) << i;
      EXPECT_FALSE(is_finite(got.out[i])) << i;
    }
  }
}

TEST_P(Bf16, EveryPatternSurvivesDecodeAndEncode) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  auto wire = array(patterns);
  auto values = array<float>(65536);
  GW_RUN(bf16_decode, (Bf16Decode{.wire = wire.data(), .out = values.data(), .count = 65536}));
  auto decoded = values.host();
  for (size_t i = 0; i < patterns.size(); ++i) {
    float exact = bits_float(static_cast<uint32_t>(i) << 16);
    ASSERT_TRUE(std::isnan(exact) ? std::isnan(decoded[i]) : float_bits(decoded[i]) == float_bits(exact))
        << i;
  }
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    auto got =
        encode(decoded, std::vector<float>(65536, 0.0f), {.residual = false, .rounding = {.mode = mode}});
    expect_same_bits(got.wire, patterns, "patterns");  // a NaN stays some NaN
  }
}

TEST_P(Bf16, NearestBreaksTiesToEven) {
  // 1 + k/256 with k odd lies half way between two BF16 numbers, which are 1/128 apart.
  auto got = encode({1.0f + 1.0f / 256, 1.0f + 3.0f / 256, -1.0f - 1.0f / 256, 1.0f + 1.001f / 256},
                    {0, 0, 0, 0}, {});
  EXPECT_EQ(bf16_to_float(got.wire[0]), 1.0f);
  EXPECT_EQ(bf16_to_float(got.wire[1]), 1.0f + 4.0f / 256);
  EXPECT_EQ(bf16_to_float(got.wire[2]), -1.0f);
  EXPECT_EQ(bf16_to_float(got.wire[3]), 1.0f + 2.0f / 256);
}

TEST_P(Bf16, StochasticRoundingIsUnbiasedAndVariesWithTheStep) {
  // A quarter of the way from 1 to the next BF16 number: a quarter of the draws goes up.
  constexpr int64_t kCount = 40000;
  std::vector<float> grad(kCount, 1.0f + 0.25f / 128), zero(kCount, 0.0f);
  Options o{.rounding = {.mode = Rounding::stochastic, .seed = 11}};
  auto first = encode(grad, zero, o);
  o.step = 1;
  auto second = encode(grad, zero, o);
  int64_t up = 0, same = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    up += bf16_to_float(first.wire[i]) > 1.0f;
    same += first.wire[i] == second.wire[i];
  }
  double sigma = std::sqrt(0.25 * 0.75 / kCount);
  EXPECT_NEAR(static_cast<double>(up) / kCount, 0.25, 5 * sigma);
  EXPECT_NEAR(static_cast<double>(same) / kCount, 0.25 * 0.25 + 0.75 * 0.75, 5 * sigma);  // independent draws
}

TEST_P(Bf16, SplittingACallChangesNothing) {
  constexpr int64_t kCount = 1100;
  auto grad = normal(kCount, 7), residual = normal(kCount, 8, 0.01f);
  Options o{.rounding = {.mode = Rounding::stochastic, .seed = 4, .first_element = 1000001}};
  auto whole = encode(grad, residual, o);
  for (int64_t piece : {57, 64, 401}) {
    Encoded joined;
    for (int64_t begin = 0; begin < kCount; begin += piece) {
      int64_t end = std::min(kCount, begin + piece);
      Options part = o;
      part.rounding.first_element += begin;
      auto got = encode({grad.begin() + begin, grad.begin() + end},
                        {residual.begin() + begin, residual.begin() + end}, part);
      joined.wire.insert(joined.wire.end(), got.wire.begin(), got.wire.end());
      joined.residual.insert(joined.residual.end(), got.residual.begin(), got.residual.end());
    }
    expect_same_bits(joined.wire, whole.wire, "wire");
    expect_same_bits(joined.residual, whole.residual, "residual");
  }
}

TEST_P(Bf16, DecodeAndDecodeAddHaveTheReferencesBits) {
  uint32_t seed = 100;
  for (int64_t n : testing::awkward_sizes()) {
    for (int64_t shift : {0, 1, 4}) {
      std::vector<uint16_t> wire(static_cast<size_t>(n));
      std::mt19937 generator(++seed);
      for (auto& w : wire) w = static_cast<uint16_t>(generator());
      auto start = wild(n, ++seed);
      auto w = array(wire, shift);
      auto out = array<float>(n, shift == 4 ? 1 : shift);
      auto acc = array(start, shift == 4 ? 1 : shift);
      GW_RUN(bf16_decode, (Bf16Decode{.wire = w.data(), .out = out.data(), .scale = 0.3f, .count = n}));
      GW_RUN(bf16_decode_add, (Bf16DecodeAdd{.wire = w.data(), .acc = acc.data(), .count = n}));
      std::vector<float> want_out(wire.size()), want_acc = start;
      reference::bf16_decode({.wire = wire.data(), .out = want_out.data(), .scale = 0.3f, .count = n});
      reference::bf16_decode_add({.wire = wire.data(), .acc = want_acc.data(), .count = n});
      expect_same_bits(out.host(), want_out, "out");
      expect_same_bits(acc.host(), want_acc, "acc");
      out.expect_guards_intact("out");
      acc.expect_guards_intact("acc");
    }
  }
}

TEST_P(Bf16, HopHasTheReferencesBits) {
  uint32_t seed = 500;
  struct Case {
    int64_t count;
    int inputs, own;
    bool residual, out;
    Rounding mode;
    int64_t shift;
  };
  for (const Case& c : std::vector<Case>{{1025, 0, 0, true, true, Rounding::nearest, 0},
                                         {1025, 1, 0, true, false, Rounding::nearest, 0},
                                         {1025, 1, 1, true, true, Rounding::stochastic, 3},
                                         {4099, 7, 3, true, true, Rounding::nearest, 1},
                                         {4099, 7, 3, false, true, Rounding::stochastic, 0},
                                         {129, 64, 64, true, false, Rounding::nearest, 0},
                                         {129, 64, 17, true, true, Rounding::stochastic, 5},
                                         {70001, 3, 2, true, true, Rounding::stochastic, 0},
                                         {1, 2, 1, true, true, Rounding::nearest, 0},
                                         {0, 2, 1, true, true, Rounding::nearest, 0}}) {
    Bf16DecodeAddEncode args{
        .num_inputs = c.inputs, .own_position = c.own, .out_scale = 0.5f, .count = c.count};
    args.rounding = {.mode = c.mode, .seed = 21, .first_element = 3};
    auto reference_args = args;
    std::vector<std::vector<uint16_t>> inputs;
    std::vector<Array<uint16_t>> device_inputs;
    for (int k = 0; k < c.inputs; ++k) {
      auto values = normal(c.count, ++seed);
      inputs.emplace_back();
      for (float v : values) inputs.back().push_back(float_to_bf16_nearest(v));
      if (c.count > 100 && k == 0) inputs.back()[77] = 0x7f80;  // Inf: must be seen, must not stay
      device_inputs.push_back(array(inputs.back(), c.shift == 5 ? k % 8 : c.shift));
    }
    auto grad = normal(c.count, ++seed), residual = normal(c.count, ++seed, 0.01f);
    auto g = array(grad, c.shift), e = array(residual, c.shift), out = array<float>(c.count, c.shift);
    auto wire = array<uint16_t>(c.count, c.shift);
    std::vector<uint16_t> want_wire(grad.size());
    auto want_residual = residual;
    std::vector<float> want_out(grad.size());
    for (int k = 0; k < c.inputs; ++k) {
      args.inputs[k] = device_inputs[k].data();
      reference_args.inputs[k] = inputs[k].data();
    }
    args.grad = g.data(), args.wire = wire.data();
    reference_args.grad = grad.data(), reference_args.wire = want_wire.data();
    if (c.residual) args.residual = e.data(), reference_args.residual = want_residual.data();
    if (c.out) args.out = out.data(), reference_args.out = want_out.data();
    reference::bf16_decode_add_encode(reference_args);
    GW_RUN(bf16_decode_add_encode, args);
    SCOPED_TRACE("count " + std::to_string(c.count) + " inputs " + std::to_string(c.inputs));
    expect_same_bits(wire.host(), want_wire, "wire");
    expect_same_bits(e.host(), want_residual, "residual");
    if (c.out) expect_same_bits(out.host(), want_out, "out");
    for (auto* a : {&e, &out}) a->expect_guards_intact("floats");
    wire.expect_guards_intact("wire");
    if (c.out) {  // the same once more, with the gradient overwritten
      e.set(residual);
      args.out = g.data();
      GW_RUN(bf16_decode_add_encode, args);
      expect_same_bits(g.host(), want_out, "out over grad");
      expect_same_bits(wire.host(), want_wire, "wire with out over grad");
    }
    if (HasFatalFailure()) return;
  }
}

TEST_P(Bf16, HopAddsInTheOrderOfItsInputs) {
  // 1 vanishes beside 2^30 in FP32, so the place of each term shows: (2^30 - 2^30) + 1, but (1 + 2^30) - 2^30
  // = 0.
  float big = 1073741824.0f;
  auto hop = [&](std::vector<float> inputs, float own, int own_position) {
    std::vector<Array<uint16_t>> arrays;
    Bf16DecodeAddEncode args{
        .num_inputs = static_cast<int>(inputs.size()), .own_position = own_position, .count = 1};
    for (size_t k = 0; k < inputs.size(); ++k) {
      arrays.push_back(array(std::vector<uint16_t>{float_to_bf16_nearest(inputs[k])}));
      args.inputs[k] = arrays[k].data();
    }
    auto grad = array(std::vector<float>{own});
    auto wire = array<uint16_t>(1);
    args.grad = grad.data();
    args.wire = wire.data();
    GW_RUN(bf16_decode_add_encode, args);
    return bf16_to_float(wire.host()[0]);
  };
  EXPECT_EQ(hop({big, -big}, 1.0f, 2), 1.0f);
  EXPECT_EQ(hop({big, -big}, 1.0f, 1), 0.0f);
  EXPECT_EQ(hop({big, -big}, 1.0f, 0), 0.0f);
  EXPECT_EQ(hop({big, 1.0f}, -big, 1), 1.0f);
  EXPECT_EQ(hop({big, 1.0f}, -big, 2), 0.0f);
}

GW_INSTANTIATE_BACKENDS(Bf16);

}  // namespace
}  // namespace gradwire
