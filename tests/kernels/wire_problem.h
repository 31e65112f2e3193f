// One call of a wire format's op, described as data, so that a backend and the reference can run the call.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/wire/format.h"
#include "tests/kernels/backend.h"

namespace gradwire::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using Bytes = std::vector<uint8_t>;

struct WireProblem {
  std::vector<float> own, residual;  // empty residual: no error feedback
  std::vector<Bytes> inputs = {};
  int own_position = 0;
  std::vector<float> input_scales = {};  // inputs without an entry have scale 1
  float own_scale = 1.0f, residual_scale = 1.0f;
  bool wire = true, out = true, in_place = false;  // in_place: `own` is also the output
  float out_scale = 0.5f;
  WireRounding rounding = {};
  uint64_t step = 3;
  std::array<int64_t, 3> misalign = {};  // of own, residual and out, in elements
  int64_t misalign_wires = 0;            // in bytes; some formats require alignment
};

struct WireResult {
  Bytes wire;  // unwritten bytes are 0xcd
  std::vector<float> residual, out;
};

inline ReduceEncode arguments(const WireProblem& p) {
  ReduceEncode args;
  args.num_inputs = static_cast<int>(p.inputs.size());
  args.own_position = p.own_position;
  std::copy(p.input_scales.begin(), p.input_scales.end(), args.input_scales.of);
  args.own_scale = p.own_scale;
  args.residual_scale = p.residual_scale;
  args.out_scale = p.out_scale;
  args.count = static_cast<int64_t>(p.own.size());
  args.rounding = p.rounding;
  return args;
}

inline WireResult reference_result(Wire format, const WireProblem& p) {
  ReduceEncode args = arguments(p);
  WireResult want{Bytes(static_cast<size_t>(format->bytes(args.count)), 0xcd), p.residual,
                  std::vector<float>(p.own.size())};
  for (size_t k = 0; k < p.inputs.size(); ++k) args.inputs[k] = p.inputs[k].data();
  args.own = p.own.data();
  if (!p.residual.empty()) args.residual = want.residual.data();
  if (p.wire) args.wire = want.wire.data();
  if (p.out) args.out = want.out.data();
  args.rounding.step = &p.step;
  format->reference_reduce_encode(args);
  return want;
}

inline std::vector<float> reference_decoded(Wire format, const Bytes& wire, int64_t count, float scale = 1) {
  std::vector<float> out(count);
  format->reference_decode({.wire = wire.data(), .out = out.data(), .scale = scale, .count = count});
  return out;
}

inline Bytes reference_encoded(Wire format, const std::vector<float>& values) {
  return reference_result(format, {.own = values, .residual = {}, .out = false}).wire;
}

class WireFixture : public OpFixture {
 public:
  using OpFixture::OpFixture;

  WireResult run(Wire format, const WireProblem& p) {
    ReduceEncode args = arguments(p);
    auto own = array(p.own, p.misalign[0]), residual = array(p.residual, p.misalign[1]);
    auto out = array<float>(args.count, p.misalign[2]);
    auto wire = array<uint8_t>(format->bytes(args.count), p.misalign_wires);
    auto step = array(std::vector<uint64_t>{p.step});
    std::vector<Array<uint8_t>> inputs;
    for (size_t k = 0; k < p.inputs.size(); ++k) {
      inputs.push_back(array(p.inputs[k], p.misalign_wires));
      args.inputs[k] = inputs[k].data();
    }
    args.own = own.data();
    if (!p.residual.empty()) args.residual = residual.data();
    if (p.wire) args.wire = wire.data();
    if (p.out) args.out = p.in_place ? own.data() : out.data();
    args.rounding.step = step.data();
    format->reduce_encode(stream, args);
    stream.synchronize();
    for (auto* a : {&own, &residual, &out}) a->expect_guards_intact("floats");
    wire.expect_guards_intact("wire");
    if (!p.in_place && !p.own.empty()) {
      EXPECT_EQ(std::memcmp(own.host().data(), p.own.data(), p.own.size() * sizeof(float)), 0)
          << "own is read only";
    }
    return {wire.host(), residual.host(), (p.in_place ? own : out).host()};
  }

  std::vector<float> decoded(Wire format, const Bytes& wire, int64_t count, float scale = 1.0f,
                             int64_t misalign = 0, int64_t misalign_wire = 0) {
    auto from = array(wire, misalign_wire);
    auto out = array<float>(count, misalign);
    format->decode(stream, {.wire = from.data(), .out = out.data(), .scale = scale, .count = count});
    stream.synchronize();
    out.expect_guards_intact("out");
    return out.host();
  }

  // Returns the residual that remains after decoding a wire.
  std::vector<float> kept_after_decode(Wire format, const Bytes& wire, const std::vector<float>& residual,
                                       int64_t misalign = 0) {
    const auto count = static_cast<int64_t>(residual.size());
    auto from = array(wire);
    auto out = array<float>(count, misalign), kept = array(residual, misalign);
    format->decode(stream, {.wire = from.data(), .out = out.data(), .count = count, .residual = kept.data()});
    stream.synchronize();
    kept.expect_guards_intact("residual");
    return kept.host();
  }
};

// Returns finite values of every magnitude.
inline std::vector<float> wild(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(count);
  for (auto& v : values) {
    do v = bits_float(generator());
    while (!is_finite(v));
  }
  return values;
}

// Returns normal draws times powers of ten within +-spread, so that values differ in size within and between
// blocks.
inline std::vector<float> spread_values(int64_t count, uint32_t seed, float spread) {
  auto x = OpFixture::normal(count, seed), exponent = OpFixture::normal(count, seed + 1000);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] *= std::pow(10.0f, std::max(-spread, std::min(spread, exponent[i] * spread)));
  }
  return x;
}

inline std::vector<float> special_values() {
  return {0.0f,        -0.0f,  1.0f,    -1.0f,    FLT_MAX, -FLT_MAX, 3.3895e38f, 3.39e38f,    FLT_MIN,
          FLT_MIN / 2, 1e-45f, -1e-45f, 9.2e-41f, kInf,    -kInf,    kNan,       1.00390625f, 1.01171875f};
}

// Expects equal bits. Any NaN equals any other, because devices choose different payloads.
inline void expect_same_floats(const std::vector<float>& got, const std::vector<float>& want,
                               const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    ASSERT_EQ(float_bits(got[i]), float_bits(want[i]))
        << what << "[" << i << "] of " << got.size() << ": got " << got[i] << ", want " << want[i];
  }
}

// Expects equal encoded bytes. If the encoded values contain a NaN, expects equal decoded values instead.
inline void expect_same_result(Wire format, const WireProblem& p, const WireResult& got,
                               const WireResult& want) {
  const auto count = static_cast<int64_t>(p.own.size());
  if (p.wire) {
    const auto decoded = reference_decoded(format, want.wire, count);
    expect_same_floats(reference_decoded(format, got.wire, count), decoded, "decoded wire");
    if (std::none_of(decoded.begin(), decoded.end(), [](float x) { return std::isnan(x); })) {
      for (size_t i = 0; i < want.wire.size(); ++i) ASSERT_EQ(got.wire[i], want.wire[i]) << "wire byte " << i;
    }
  }
  expect_same_floats(got.residual, want.residual, "residual");
  if (p.out) expect_same_floats(got.out, want.out, "out");
}

}  // namespace gradwire::testing
