// Properties specific to top-k: its selection, the size of its positions, NaN in 2 bits, and any bytes.
// wire_test.cpp tests the properties of all formats.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "tests/kernels/wire_problem.h"

namespace gradwire::testing {
namespace {

class TopKWire : public ::testing::TestWithParam<Backend>, public WireFixture {
 public:
  TopKWire() : WireFixture(GetParam()) {}
};

Wire topk(int k, int of, const char* values) {
  return wire_format(fmt::format("topk:k={},of={},values={}", k, of, values));
}

// Returns the k values of largest magnitude at their positions, of equal magnitudes the lower positions, and
// zeros elsewhere.
std::vector<float> largest(const std::vector<float>& values, int k) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return std::abs(values[a]) > std::abs(values[b]); });
  std::vector<float> sent(values.size());
  for (int j = 0; j < k; ++j) sent[order[j]] = values[order[j]];
  return sent;
}

TEST_P(TopKWire, SendsTheLargestValuesForAnyNumberOfThem) {
  for (auto [of, stride] : {std::pair{64, 1}, std::pair{256, 37}, std::pair{4096, 1365}}) {
    if (GetParam().simt) stride *= 5;
    auto values = normal(of, 7);
    for (size_t i = 0; i < values.size(); i += 2) values[i] = std::round(4 * values[i]) / 4;  // ties
    for (int k = 1; k <= of; k += stride) {
      SCOPED_TRACE(fmt::format("k={},of={}", k, of));
      const Wire format = topk(k, of, "fp32");
      const WireResult got = run(format, {.own = values, .residual = {}, .out_scale = 1});
      expect_same_floats(got.out, largest(values, k), "sent");
      expect_same_floats(decoded(format, got.wire, of), got.out, "decoded");
      const int low = std::bit_width(static_cast<unsigned>(of / k)) - 1;
      EXPECT_EQ(static_cast<int>(got.wire.size()), (k + (of >> low) + 7) / 8 + (k * low + 7) / 8 + 4 * k);
    }
  }
}

// The host takes a bound for a block's largest values from the block before.
TEST_P(TopKWire, BlocksOfDifferentKindsAgreeWithTheReference) {
  const int of = 512;
  std::vector<float> own = normal(16 * of, 3), residual = normal(16 * of, 4);
  for (int i = 0; i < 16 * of; ++i) {
    const int kind = i / of % 8;
    const float scale = kind == 1 ? 1e30f : kind == 3 ? 1e-30f : kind == 5 ? 0.0f : 1.0f;
    own[i] *= scale, residual[i] *= scale;
    if (kind == 2) own[i] = std::round(own[i]), residual[i] = 0;
    if (kind == 4 && i % of >= 40) own[i] = residual[i] = 0;
    if (kind == 6 && i % 3 == 0) own[i] = i % 2 == 0 ? kInf : kNan;
    if (kind == 7) own[i] = i % 2 == 0 ? kInf : -kInf;
  }
  for (const char* values : {"fp32", "bf16", "int8", "int2"}) {
    for (const int k : {1, 8, 100, of}) {
      SCOPED_TRACE(fmt::format("k={},values={}", k, values));
      const Wire format = topk(k, of, values);
      for (const float scale : {1.0f, 0.25f}) {
        const WireProblem p{.own = own, .residual = residual, .own_scale = scale, .out = false};
        expect_same_result(format, p, run(format, p), reference_result(format, p));
      }
    }
  }
}

TEST_P(TopKWire, PositionsOfTheDefaultTakeEightBits) {
  EXPECT_EQ(topk(64, 4096, "bf16")->bytes(4096), 64 + 128);
  EXPECT_EQ(topk(64, 4096, "int2")->bytes(4096), 64 + 16 + 8);
}

TEST_P(TopKWire, TwoBitsCarryNanAndTheFiniteMean) {
  std::vector<float> values(256, 0.0f);
  values[3] = -2.0f, values[77] = kNan, values[78] = 1.0f, values[200] = -kInf, values[255] = 6.0f;
  const auto sent = run(topk(5, 256, "int2"), {.own = values, .residual = {}, .out_scale = 1}).out;
  EXPECT_EQ(sent[3], -3.0f);
  EXPECT_TRUE(std::isnan(sent[77]));
  EXPECT_EQ(sent[78], 3.0f);
  EXPECT_TRUE(std::isnan(sent[200]));
  EXPECT_EQ(sent[255], 3.0f);
}

TEST_P(TopKWire, DecodesAnyBytesWithinTheBlock) {
  if (GetParam().device.is_cuda() || GetParam().simt) return;  // equal positions are a race between threads
  for (const char* kind : {"fp32", "bf16", "int8", "int2"}) {
    for (int k : {1, 2, 41, 64}) {
      const Wire format = topk(k, 64, kind);
      for (uint32_t seed = 0; seed < 20; ++seed) {
        Bytes wire(static_cast<size_t>(format->bytes(100)));
        std::mt19937 generator(seed);
        for (uint8_t& byte : wire) byte = seed == 0 ? 0xff : static_cast<uint8_t>(generator());
        EXPECT_EQ(decoded(format, wire, 100).size(), 100u);
      }
    }
  }
}

GW_INSTANTIATE_BACKENDS(TopKWire);

}  // namespace
}  // namespace gradwire::testing
