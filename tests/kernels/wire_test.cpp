// Properties of every wire format (kernels/wire/format.h) that rounds: the bits of the reference, sums,
// residuals, non-finite values. wire_error_test.cpp tests the errors.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "tests/kernels/wire_suite.h"

namespace gradwire::testing {
namespace {

TEST(WireFormats, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (Wire format : wire_formats()) {
    EXPECT_TRUE(names.insert(format->name).second) << format->name;
    EXPECT_EQ(find_wire_format(format->name), format);
    EXPECT_EQ(wire_format(format->name), format);
    EXPECT_GT(std::string(format->summary).size(), 0u) << format->name;
    EXPECT_GT(std::string(format->source).size(), 0u) << format->name;
  }
  EXPECT_EQ(wire_formats().front(), kFp32);
  EXPECT_EQ(find_wire_format("fp3"), nullptr);
  EXPECT_EQ(find_wire_format(""), nullptr);
}

TEST(WireFormats, EqualOptionsShareAFormatAndDefaultsMatchTheTable) {
  for (Wire format : example_wire_formats()) {
    SCOPED_TRACE(format->spec());
    EXPECT_EQ(wire_format(format->spec()), format);
    EXPECT_EQ(find_wire_format(format->name) == format, *format->options == 0);
    if (const auto copy = find_wire_format(format->name)->copy()) {
      for (const FormatOption& option : copy->choices()) {
        EXPECT_TRUE(option.set(option.text())) << option.key;
        EXPECT_FALSE(option.set("no such value")) << option.key;
        EXPECT_FALSE(option.set("")) << option.key;
        EXPECT_EQ(wire_format(fmt::format("{}:{}={}", format->name, option.key, option.text())),
                  find_wire_format(format->name));
      }
    }
  }
}

TEST(WireFormats, LengthsAddUpOverChunks) {
  for (Wire format : example_wire_formats()) {
    SCOPED_TRACE(format->spec());
    EXPECT_EQ(format->bytes(0), 0);
    EXPECT_GT(format->granularity, 0);
    int64_t before = 0;
    for (int64_t count : {1, 7, 127, 128, 129, 1000, 4096}) {
      EXPECT_GE(format->bytes(count), before);
      before = format->bytes(count);
    }
    const int64_t chunk = 16 * format->granularity;
    EXPECT_EQ(format->bytes(5 * chunk), 5 * format->bytes(chunk));
    EXPECT_NEAR(static_cast<double>(format->bytes(chunk << 10)) / static_cast<double>(chunk << 10),
                format->bytes_per_value(), 1e-6);
    if (*format->options == 0) {
      EXPECT_EQ(format->exact, format->gaussian_error == 0);
    }
  }
}

class WireFormatTest : public WireSuite {};

TEST_P(WireFormatTest, HasTheReferencesBitsForAnySizeAlignmentAndOrder) {
  auto sizes = awkward_sizes();
  for (int64_t k : {3, 8}) {
    if (kSanitized && k * format->granularity > kManyPieces) continue;
    for (int64_t around : {-1, 0, 1}) sizes.push_back(k * format->granularity + around);
  }
  sizes.push_back(kManyPieces);
  // The keys of random bits change at multiples of 2^32 elements.
  constexpr int64_t kNextKey = int64_t{1} << 32;
  const int64_t first_elements[] = {0, 8, 16, 24, 13, kNextKey - format->granularity - 5, 48, kNextKey - 16};
  uint32_t seed = 0;
  for (int64_t n : sizes) {
    for (Rounding mode : roundings()) {
      for (int variant = 0; variant < 8; ++variant) {
        // Long buffers take as long as all other sizes together, so there is one variant for each rounding.
        if (n == kManyPieces && variant != (mode == Rounding::nearest && !kSanitized ? 7 : 3)) continue;
        if (kSanitized && (variant < 3 || variant == 6)) continue;
        const float spread = variant % 2 == 0 ? 1.0f : 12.0f;
        const int num_inputs = variant == 7 ? 7 : variant % 4;
        WireProblem p{.own = variant == 5 ? wild(n, seed += 20) : spread_values(n, seed += 20, spread),
                      .residual = spread_values(n, seed + 1, spread),
                      .inputs = inputs(num_inputs, n, seed + 2, spread),
                      .own_position = num_inputs == 0 ? 0 : variant % (num_inputs + 1),
                      .out = variant % 3 != 1,
                      .in_place = variant == 3,
                      .rounding = {.mode = mode, .seed = 99, .first_element = first_elements[variant]},
                      .step = 5};
        if (variant == 2) p.residual.clear();
        // The scales are those of an average: values and sums of other ranks, and this rank's value or its
        // node's sum.
        if (variant >= 2) p.input_scales = {0.25f, 1.0f, 0.25f};
        if (variant == 2 || variant == 4 || variant == 6) p.own_scale = 0.25f;
        if (variant >= 3 && variant != 4 && variant != 6) p.residual_scale = 0.25f;
        // The floats are aligned, all shifted alike (a vector loop with a head), or each shifted differently.
        if (variant == 1 || variant == 6) p.misalign = {3, 3, 3};
        if (variant == 4) p.misalign = {1, 2, 0};
        SCOPED_TRACE(fmt::format("n {} variant {}", n, variant));
        expect_same_result(format, p, run(p), reference_result(format, p));
        if (HasFatalFailure()) return;
        if (n > 40 && variant >= 4) {
          for (size_t i = 3; i < p.own.size(); i += 7)
            p.own[i] = special_values()[i / 7 % special_values().size()];
          if (!p.residual.empty()) p.residual[7] = -kInf;
          expect_same_result(format, p, run(p), reference_result(format, p));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(WireFormatTest, TakesAsManyInputsAsTheContractAllows) {
  for (int own : {0, 17, kMaxInputs}) {
    for (Rounding mode : roundings()) {
      WireProblem p{.own = normal(129, 1),
                    .residual = normal(129, 2, 0.01f),
                    .inputs = inputs(kMaxInputs, 129, 3, 1.0f),
                    .own_position = own,
                    .rounding = {.mode = mode, .seed = 21, .first_element = 3}};
      expect_same_result(format, p, run(p), reference_result(format, p));
      if (HasFatalFailure()) return;
    }
  }
}

// A block's inverse scale may overflow.
TEST_P(WireFormatTest, SubnormalBlocksHaveTheReferencesBits) {
  const int64_t n = 3 * format->granularity + 5;
  for (float unit : {0x1p-126f, 0x1p-135f, 0x1p-147f}) {
    WireProblem p{.own = normal(n, 71), .residual = normal(n, 72), .inputs = inputs(2, n, 73, 1.0f)};
    for (auto* values : {&p.own, &p.residual}) {
      for (float& x : *values) x *= unit;
    }
    if (unit < 0x1p-126f) p.inputs.clear();
    SCOPED_TRACE(fmt::format("unit {}", unit));
    expect_same_result(format, p, run(p), reference_result(format, p));
    const Bytes wire = reference_encoded(format, p.own);
    expect_same_floats(decoded(format, wire, n, 1.0f, 0), reference_decoded(format, wire, n, 1.0f),
                       "decoded");
  }
}

TEST_P(WireFormatTest, DecodeHasTheReferencesBits) {
  uint32_t seed = 100;
  for (int64_t n : awkward_sizes()) {
    for (int64_t misalign : {0, 1, 4}) {
      for (float scale : {1.0f, 0.3f}) {
        auto values = spread_values(n, ++seed, 6.0f);
        if (n > 40) values[33] = kNan, values[34] = kInf, values[35] = -0.0f;
        const Bytes wire = reference_encoded(format, values);
        expect_same_floats(decoded(format, wire, n, scale, misalign),
                           reference_decoded(format, wire, n, scale), fmt::format("n {}", n));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(WireFormatTest, DecodeClearsOnlyResidualsOfNonFiniteValues) {
  for (int64_t n :
       {int64_t{7}, 2 * format->granularity + 11, 5 * std::max<int64_t>(format->granularity, 700)}) {
    for (int64_t misalign : {0, 1}) {
      auto values = normal(n, 61);
      const std::vector<float> kept = normal(n, 62);
      for (bool bad : {false, true}) {
        if (bad) values[5] = kNan, values[values.size() - 2] = -kInf, values[values.size() / 2] = kInf;
        const Bytes wire = reference_encoded(format, values);
        const auto sent = reference_decoded(format, wire, n);
        std::vector<float> want = kept;
        int64_t forgotten = 0;
        for (size_t i = 0; i < want.size(); ++i) {
          if (!is_finite(sent[i])) want[i] = 0.0f, ++forgotten;
        }
        EXPECT_EQ(forgotten > 0, bad);
        expect_same_floats(kept_after_decode(format, wire, kept, misalign), want, "residual");
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Expects the result to be S itself without a wire. The terms have very different sizes, so that their order
// matters.
TEST_P(WireFormatTest, WithoutAWireReturnsTheSumAndClearsTheResidual) {
  for (int64_t n : std::initializer_list<int64_t>{0, 1, 7, 128, 1025, kManyPieces}) {
    for (int num_inputs : {0, 1, 2, 7}) {
      if (n == kManyPieces && num_inputs != 2) continue;
      for (int own : {0, num_inputs / 2, num_inputs}) {
        if (kSanitized && n == kManyPieces && own != 1) continue;
        for (bool with_residual : {true, false}) {
          if (n == kManyPieces && with_residual != (own < num_inputs)) continue;
          WireProblem p{.own = spread_values(n, 1, 6.0f),
                        .residual = with_residual ? spread_values(n, 2, 6.0f) : std::vector<float>(),
                        .inputs = inputs(num_inputs, n, 3, 6.0f),
                        .own_position = own,
                        .wire = false,
                        .in_place = own == 0 && with_residual,
                        .out_scale = 0.3f};
          if (n == 1025) p.misalign = {1, 2, 3};
          if (n > 40) p.own[20] = kInf, p.own[21] = kNan;
          std::vector<std::vector<float>> terms;
          for (const Bytes& wire : p.inputs) terms.push_back(reference_decoded(format, wire, n));
          std::vector<float> mine = p.own;
          for (size_t i = 0; i < p.residual.size(); ++i) mine[i] += p.residual[i];
          terms.insert(terms.begin() + own, mine);
          std::vector<float> want = terms[0];
          for (size_t k = 1; k < terms.size(); ++k) {
            for (size_t i = 0; i < want.size(); ++i) want[i] += terms[k][i];
          }
          for (float& x : want) x *= 0.3f;
          SCOPED_TRACE(fmt::format("n {} inputs {} own at {}", n, num_inputs, own));
          const WireResult got = run(p);
          expect_same_floats(got.out, want, "out");
          expect_same_floats(got.residual, std::vector<float>(p.residual.size()), "residual");
          EXPECT_EQ(got.wire, Bytes(got.wire.size(), 0xcd)) << "without a wire, nothing is written";
          expect_same_result(format, p, got, reference_result(format, p));
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(WireFormatTest, WirePlusResidualIsTheSum) {
  for (Rounding mode : roundings()) {
    for (auto [own, residual] : {std::pair{wild(20000, 1), wild(20000, 2)},
                                 std::pair{spread_values(5000, 3, 8.0f), spread_values(5000, 4, 8.0f)}}) {
      for (float s : special_values()) {  // saturation, denormals, ties
        own.push_back(is_finite(s) ? s : 1e38f);
        residual.push_back(0.0f);
      }
      const WireResult got =
          run({.own = own, .residual = residual, .out_scale = 1, .rounding = {.mode = mode, .seed = 3}});
      const auto sent = decoded(format, got.wire, static_cast<int64_t>(own.size()));
      expect_same_floats(got.out, sent, "out is what the wire decodes to");
      for (size_t i = 0; i < own.size(); ++i) {
        const float s = own[i] + residual[i];
        if (!is_finite(s)) continue;
        ASSERT_TRUE(is_finite(sent[i])) << s;
        // The residual is exact except for one FP32 subtraction.
        const double error = static_cast<double>(sent[i]) + got.residual[i] - s;
        ASSERT_LE(std::abs(error), std::ldexp(std::abs(static_cast<double>(got.residual[i])), -24))
            << "element " << i << ": " << s << " went as " << sent[i];
      }
    }
  }
}

// Expects an average to have the same wire up to a power of two, the same result, and a residual in the units
// of the inputs. Sums far beyond FP32's range, and their residuals, are finite in these units.
TEST_P(WireFormatTest, ScalesOfPartsChangeOnlyTheRange) {
  const int64_t n = 3 * format->granularity + 5;
  for (Rounding mode : roundings()) {
    WireProblem p{.own = spread_values(n, 31, 3.0f),
                  .residual = spread_values(n, 32, 2.0f),
                  .inputs = inputs(2, n, 33, 3.0f),
                  .own_position = 1,
                  .out_scale = 0.25f,
                  .rounding = {.mode = mode, .seed = 8}};
    const WireResult plain = run(p);
    p.input_scales = {0.25f, 0.25f};
    p.own_scale = 0.25f;
    p.out_scale = 1.0f;
    const WireResult scaled = run(p);
    expect_same_floats(scaled.out, plain.out, "out");
    expect_same_floats(scaled.residual, plain.residual, "residual");

    p.own.assign(p.own.size(), 1.2e38f);
    p.inputs = {reference_encoded(format, p.own), reference_encoded(format, p.own)};
    const WireResult huge = run(p);
    for (size_t i = 0; i < p.own.size(); ++i) {
      ASSERT_TRUE(is_finite(huge.residual[i])) << i;
      ASSERT_TRUE(is_finite(huge.out[i])) << i;
    }
  }
}

TEST_P(WireFormatTest, NonFiniteValuesAreSentNotKeptAndStayInTheirBlock) {
  const int64_t block = format->granularity, n = 3 * block + 7;
  const auto bad = static_cast<size_t>(block + 2);
  for (Rounding mode : roundings()) {
    WireProblem p{.own = normal(n, 21), .residual = normal(n, 22, 0.01f), .rounding = {.mode = mode}};
    p.own[bad] = 0.0f;
    p.residual[bad] = 0.0f;
    const WireResult clean = run(p);
    for (auto [own, kept] :
         {std::pair{kNan, 0.0f}, std::pair{kInf, 1.0f}, std::pair{-kInf, 1.0f}, std::pair{FLT_MAX, FLT_MAX},
          std::pair{-FLT_MAX, -FLT_MAX}, std::pair{1.0f, kNan}, std::pair{bits_float(0x7f800001u), 0.0f}}) {
      p.own[bad] = own;
      p.residual[bad] = kept;
      const WireResult got = run(p);
      const float sent = decoded(format, got.wire, n)[bad];
      EXPECT_TRUE(std::isnan(sent) || sent == own + kept) << own << " + " << kept << " went as " << sent;
      EXPECT_FALSE(is_finite(got.out[bad]));
      EXPECT_EQ(got.residual[bad], 0.0f);
      for (size_t i = 0; i < p.own.size(); ++i) {
        if (i == bad) continue;
        const bool same_block = static_cast<int64_t>(i) / block == static_cast<int64_t>(bad) / block;
        if (format->masks && same_block) {
          ASSERT_EQ(got.out[i], 0.0f) << i;
          ASSERT_EQ(got.residual[i], p.own[i] + p.residual[i]) << i << ": nothing was sent";
        } else if (format->selects && same_block) {  // another value is dropped, and the means change
          const float s = p.own[i] + p.residual[i];
          ASSERT_NEAR(got.out[i] / p.out_scale + got.residual[i], s, 1e-6) << i;
        } else {
          ASSERT_EQ(got.out[i], clean.out[i]) << i;
          ASSERT_EQ(got.residual[i], clean.residual[i]) << i;
        }
      }
    }
  }
}

TEST_P(WireFormatTest, ZerosAndExtremesSurvive) {
  for (float value : {0.0f, -0.0f, FLT_MAX, -FLT_MAX, 1e38f, FLT_MIN, 1e-45f}) {
    for (Rounding mode : roundings()) {
      WireProblem p{.own = std::vector<float>(200, value),
                    .residual = std::vector<float>(200, 0.0f),
                    .out_scale = 1,
                    .rounding = {.mode = mode}};
      const WireResult got = run(p);
      for (size_t i = 0; i < 200; ++i) {
        ASSERT_TRUE(is_finite(got.out[i])) << value;
        ASSERT_TRUE(is_finite(got.residual[i])) << value;
        if (std::abs(got.residual[i]) == FLT_MAX) continue;  // the exact residual is larger than FLT_MAX
        ASSERT_LE(std::abs(static_cast<double>(got.out[i]) + got.residual[i] - static_cast<double>(value)),
                  std::ldexp(std::abs(static_cast<double>(got.residual[i])), -24));
        if (value == 0.0f) {
          ASSERT_EQ(got.out[i], 0.0f);
        }
      }
    }
  }
}

TEST_P(WireFormatTest, CuttingACallIntoPiecesChangesNothing) {
  const int64_t count = 8 * format->granularity + 5;
  for (Rounding mode : roundings()) {
    const WireProblem whole{
        .own = normal(count, 7),
        .residual = normal(count, 8, 0.01f),
        .rounding = {.mode = mode, .seed = 4, .first_element = (int64_t{1} << 32) - format->granularity - 5}};
    const WireResult want = run(whole);
    for (int64_t blocks : {1, 3}) {
      std::vector<float> residual, out, sent;
      for (int64_t begin = 0; begin < count; begin += blocks * format->granularity) {
        const int64_t end = std::min(count, begin + blocks * format->granularity);
        WireProblem part = whole;
        part.own = {whole.own.begin() + begin, whole.own.begin() + end};
        part.residual = {whole.residual.begin() + begin, whole.residual.begin() + end};
        part.rounding.first_element += begin;
        const WireResult got = run(part);
        const auto decoded_part = decoded(format, got.wire, end - begin);
        residual.insert(residual.end(), got.residual.begin(), got.residual.end());
        out.insert(out.end(), got.out.begin(), got.out.end());
        sent.insert(sent.end(), decoded_part.begin(), decoded_part.end());
      }
      expect_same_floats(residual, want.residual, "residual");
      expect_same_floats(out, want.out, "out");
      expect_same_floats(sent, decoded(format, want.wire, count), "decoded wire");
    }
  }
}

TEST_P(WireFormatTest, BitsDependOnlyOnSeedAndStep) {
  const int64_t count = kManyPieces;
  for (Rounding mode : roundings()) {
    WireProblem p{
        .own = normal(count, 1), .residual = normal(count, 2), .rounding = {.mode = mode, .seed = 5}};
    const int before = host_threads();
    const WireResult first = run(p);
    for (int threads : thread_counts()) {
      set_host_threads(threads);
      const WireResult again = run(p);
      EXPECT_EQ(again.wire, first.wire);
      EXPECT_EQ(again.residual, first.residual);
    }
    set_host_threads(before);
    p.step += 1;
    EXPECT_EQ(run(p).wire == first.wire, mode == Rounding::nearest);
    p.step -= 1;
    p.rounding.seed += 1;
    EXPECT_EQ(run(p).wire == first.wire, mode == Rounding::nearest);
  }
}

GW_INSTANTIATE_ON_FORMATS(WireFormatTest);

}  // namespace
}  // namespace gradwire::testing
