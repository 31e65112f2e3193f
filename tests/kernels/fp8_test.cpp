// The block-scaled FP8 wire format: codes as E4M3 defines them, bits as the reference's, nothing lost.
#include "kernels/wire/fp8.h"

#include <cfloat>
#include <cstring>

#include "kernels/math/random.h"
#include "tests/kernels/backend.h"

namespace gradwire {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

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

TEST(E4m3, NearestIsNearestAndTiesGoToEven) {
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

TEST(E4m3, ScaleFitsTheLargestAndIsNeverZero) {
  for (float largest : {0.0f, 1e-45f, FLT_MIN, 1.0f, 1.75f, 1.7500001f, 448.0f, 449.0f, 2.9e38f}) {
    uint8_t byte = fp8_scale_byte(float_bits(largest));
    EXPECT_GT(fp8_scale(byte), 0.0f);
    EXPECT_EQ(fp8_scale(byte) * fp8_inverse_scale(byte), 1.0f);
    EXPECT_LE(largest * fp8_inverse_scale(byte), 448.0f);
    if (largest > 1e-30f) {
      EXPECT_GT(largest * fp8_inverse_scale(byte), 224.0f) << "wastes range at " << largest;
    }
  }
}

struct Result {
  std::vector<uint8_t> wire;
  std::vector<float> residual, out;
};

class Fp8 : public testing::OpTest {
 public:
  // Three inputs that are wires of their own, so that every op takes part.
  struct Inputs {
    std::vector<std::vector<uint8_t>> wires;
    std::vector<float> grad, residual;
  };
  static Inputs inputs(int64_t n, uint32_t seed, float spread) {
    Inputs in;
    in.grad = values(n, seed, spread);
    in.residual = values(n, seed + 1, spread);
    for (uint32_t k = 0; k < 3; ++k) {
      std::vector<float> x = values(n, seed + 2 + k, spread);
      in.wires.emplace_back(static_cast<size_t>(fp8_wire_bytes(n)));
      reference::fp8_encode({.grad = x.data(), .wire = in.wires.back().data(), .count = n});
    }
    return in;
  }
  // Normal draws times powers of ten within +-spread, so that blocks differ in size inside and between.
  static std::vector<float> values(int64_t n, uint32_t seed, float spread) {
    auto x = normal(n, seed), exponent = normal(n, seed + 1000);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] *= std::pow(10.0f, std::max(-spread, std::min(spread, exponent[i] * spread)));
    return x;
  }

  static void expect_same(const Result& got, const Result& want) {
    ASSERT_EQ(got.wire.size(), want.wire.size());
    for (size_t i = 0; i < want.wire.size(); ++i) ASSERT_EQ(got.wire[i], want.wire[i]) << "wire byte " << i;
    for (auto [g, w, name] :
         {std::tuple{&got.residual, &want.residual, "residual"}, std::tuple{&got.out, &want.out, "out"}}) {
      for (size_t i = 0; i < w->size(); ++i) {
        if (std::isnan((*g)[i]) && std::isnan((*w)[i])) continue;
        ASSERT_EQ(float_bits((*g)[i]), float_bits((*w)[i]))
            << name << " " << i << ": " << (*g)[i] << " " << (*w)[i];
      }
    }
  }

  Result hop(const Inputs& in, int num_inputs, int own_position, Bf16Rounding rounding, bool with_residual,
             int64_t misalign, uint64_t step_value) {
    int64_t n = static_cast<int64_t>(in.grad.size());
    auto grad = array(in.grad, misalign), residual = array(in.residual, misalign),
         out = array<float>(n, misalign);
    auto wire = array<uint8_t>(fp8_wire_bytes(n));
    wire.set(std::vector<uint8_t>(static_cast<size_t>(fp8_wire_bytes(n)), 0));  // the padding is nobody's
    auto step = array(std::vector<uint64_t>{step_value});
    std::vector<testing::Array<uint8_t>> wires;
    for (int k = 0; k < num_inputs; ++k) wires.push_back(array(in.wires[static_cast<size_t>(k)]));
    rounding.step = step.data();
    Fp8DecodeAddEncode args;
    for (int k = 0; k < num_inputs; ++k) args.inputs[k] = wires[static_cast<size_t>(k)].data();
    args.num_inputs = num_inputs;
    args.own_position = own_position;
    args.grad = grad.data();
    args.residual = with_residual ? residual.data() : nullptr;
    args.wire = wire.data();
    args.out = out.data();
    args.out_scale = 0.5f;
    args.count = n;
    args.rounding = rounding;
    if (num_inputs == 0) {
      GW_RUN(fp8_encode, (Fp8Encode{args.grad, args.residual, args.wire, args.out, 0.5f, n, args.rounding}));
    } else {
      GW_RUN(fp8_decode_add_encode, args);
    }
    grad.expect_guards_intact("grad");
    residual.expect_guards_intact("residual");
    out.expect_guards_intact("out");
    wire.expect_guards_intact("wire");
    return {wire.host(), residual.host(), out.host()};
  }

  static Result reference_hop(const Inputs& in, int num_inputs, int own_position, Bf16Rounding rounding,
                              bool with_residual, uint64_t step) {
    Result want{
        std::vector<uint8_t>(static_cast<size_t>(fp8_wire_bytes(static_cast<int64_t>(in.grad.size()))), 0),
        in.residual, std::vector<float>(in.grad.size())};
    Fp8DecodeAddEncode args;
    for (int k = 0; k < num_inputs; ++k) args.inputs[k] = in.wires[static_cast<size_t>(k)].data();
    args.num_inputs = num_inputs;
    args.own_position = own_position;
    args.grad = in.grad.data();
    args.residual = with_residual ? want.residual.data() : nullptr;
    args.wire = want.wire.data();
    args.out = want.out.data();
    args.out_scale = 0.5f;
    args.count = static_cast<int64_t>(in.grad.size());
    args.rounding = rounding;
    args.rounding.step = &step;
    reference::fp8_decode_add_encode(args);
    return want;
  }
};

TEST_P(Fp8, HopsHaveTheReferencesBitsForAnySizeAlignmentAndOrder) {
  uint32_t seed = 1;
  for (int64_t n : testing::awkward_sizes()) {
    for (int variant = 0; variant < 8; ++variant) {
      Inputs in = inputs(n, seed += 10, variant % 2 == 0 ? 1.0f : 12.0f);
      if (n > 40 && variant >= 4)
        in.grad[3] = kNan, in.grad[33] = kInf, in.residual[7] = -kInf, in.grad[9] = -0.0f;
      int num_inputs = variant % 4, own = num_inputs == 0 ? 0 : variant % (num_inputs + 1);
      Bf16Rounding rounding{
          .mode = variant < 4 ? Rounding::nearest : Rounding::stochastic, .seed = 7, .first_element = 5};
      bool with_residual = variant != 2;
      SCOPED_TRACE("n " + std::to_string(n) + " variant " + std::to_string(variant));
      expect_same(hop(in, num_inputs, own, rounding, with_residual, variant == 1 || variant == 6 ? 1 : 0, 3),
                  reference_hop(in, num_inputs, own, rounding, with_residual, 3));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Fp8, DecodeAndDecodeAddAgreeWithTheReference) {
  for (int64_t n : testing::awkward_sizes()) {
    for (int64_t misalign : {0, 1}) {
      Inputs in = inputs(n, 77, 6.0f);
      auto wire = array(in.wires[0]);
      auto out = array<float>(n, misalign), acc = array(in.grad, misalign);
      GW_RUN(fp8_decode, (Fp8Decode{wire.data(), out.data(), 0.25f, n}));
      GW_RUN(fp8_decode_add, (Fp8DecodeAdd{wire.data(), acc.data(), n}));
      out.expect_guards_intact("out");
      acc.expect_guards_intact("acc");
      std::vector<float> want_out(in.grad.size()), want_acc = in.grad;
      reference::fp8_decode({in.wires[0].data(), want_out.data(), 0.25f, n});
      reference::fp8_decode_add({in.wires[0].data(), want_acc.data(), n});
      ASSERT_EQ(out.host(), want_out);
      ASSERT_EQ(acc.host(), want_acc);
    }
  }
}

TEST_P(Fp8, WhatIsSentPlusTheResidualIsTheSumAndTheErrorIsBounded) {
  for (Rounding mode : {Rounding::nearest, Rounding::stochastic}) {
    Inputs in = inputs(5000, 5, 8.0f);
    Result got = hop(in, 0, 0, {.mode = mode, .seed = 9}, true, 0, 0);
    for (size_t i = 0; i < in.grad.size(); ++i) {
      float s = in.grad[i] + in.residual[i], sent = got.out[i] * 2;
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

TEST_P(Fp8, StochasticRoundingIsUnbiased) {
  std::vector<float> grad(128 * 2000, 1.03f);  // between the codes of 1.0 and 1.125
  for (size_t i = 0; i < grad.size(); i += kFp8Block) grad[i] = 448.0f;
  Inputs in{{}, grad, std::vector<float>(grad.size(), 0.0f)};
  Result got = hop(in, 0, 0, {.mode = Rounding::stochastic, .seed = 11}, true, 0, 1);
  double sum = 0;
  int64_t counted = 0;
  for (size_t i = 0; i < grad.size(); ++i) {
    if (i % kFp8Block == 0) continue;
    sum += got.out[i] * 2;
    ++counted;
  }
  EXPECT_NEAR(sum / counted, 1.03, 0.001);  // standard error 1e-4
}

TEST_P(Fp8, NonFiniteValuesTravelAreNotKeptAndDisturbNobody) {
  Inputs in = inputs(300, 21, 1.0f);
  Result clean = hop(in, 0, 0, {}, true, 0, 0);
  for (float poison : {kNan, kInf, -kInf}) {
    Inputs bad = in;
    bad.grad[130] = poison;
    Result got = hop(bad, 0, 0, {}, true, 0, 0);
    EXPECT_TRUE(std::isnan(got.out[130]));
    EXPECT_EQ(got.residual[130], 0.0f);
    for (size_t i = 0; i < in.grad.size(); ++i) {
      if (i / kFp8Block == 1) continue;  // the scale of its block may have been its own
      ASSERT_EQ(got.out[i], clean.out[i]);
      ASSERT_EQ(got.residual[i], clean.residual[i]);
    }
    for (size_t i = 128; i < 256; ++i) {
      ASSERT_EQ(std::isfinite(got.out[i]), i != 130);
      ASSERT_TRUE(std::isfinite(got.residual[i]));
    }
  }
}

TEST_P(Fp8, ZerosAndTheLargestFloatsSurvive) {
  for (float value : {0.0f, FLT_MAX, -FLT_MAX, FLT_MIN, 1e-45f}) {
    Inputs in{{}, std::vector<float>(200, value), std::vector<float>(200, 0.0f)};
    Result got = hop(in, 0, 0, {}, true, 0, 0);
    for (size_t i = 0; i < 200; ++i) {
      ASSERT_TRUE(std::isfinite(got.out[i]));
      ASSERT_EQ(static_cast<double>(got.out[i]) * 2 + got.residual[i], static_cast<double>(value));
    }
  }
}

GW_INSTANTIATE_BACKENDS(Fp8);

}  // namespace
}  // namespace gradwire
