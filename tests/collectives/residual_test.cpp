// residual=bf16|int8: error feedback stored in fewer bits is unbiased, is restored from a checkpoint, and
// saves memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <span>

#include "collectives/codec/codec.h"
#include "collectives/transport/transport.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"

namespace gradwire::testing {
namespace {

// A residual with a workspace and a step number that seeds the residual's random draws.
class Kept {
 public:
  Kept(Device device, const std::string& format, int64_t count, uint64_t seed = 7)
      : transport_(1, 2, device),
        stream_(Stream::create(device, "test")),
        step_(make_buffer<uint64_t>(device, 1)),
        residual_(context(format, count, seed), true),
        workspace_(device, residual_.workspace_bytes()) {
    fill_zero(stream_, step_.data(), step_.bytes());
    residual_.bind(workspace_.data());
  }
  // Stores `values` as the residual. Returns the residual that the next step reads.
  std::vector<float> keep(const std::vector<float>& values) {
    BucketPhases phases;
    to_device(stream_, residual_.values(), std::span<const float>(values));
    residual_.store(stream_, phases);
    increment(stream_, step_.as<uint64_t>());
    // other residuals also use the workspace
    if (residual_.encoded()) fill_zero(stream_, residual_.values(), 4 * values.size());
    residual_.load(stream_, phases);
    return to_host<float>(stream_, residual_.values(), static_cast<int64_t>(values.size()));
  }
  std::vector<float> read(int64_t first, int64_t count) {
    std::vector<float> values(count);
    residual_.read(stream_, 4 * first, std::as_writable_bytes(std::span(values)));
    stream_.synchronize();
    return values;
  }
  void write(int64_t first, std::span<const float> values) {
    residual_.write(stream_, 4 * first, std::as_bytes(values));
    stream_.synchronize();
  }
  void clear(int64_t first, int64_t count) { residual_.clear(stream_, 4 * first, 4 * count); }
  int64_t bytes() const { return residual_.bytes(); }

 private:
  BucketContext context(const std::string& format, int64_t count, uint64_t seed) {
    BucketContext c;
    c.transport = &transport_;
    c.spec = CompressionSpec::parse("bf16:residual=" + format);
    c.stream = stream_;
    c.elements = count;
    c.rounding_seed = seed;
    c.step = step_.as<const uint64_t>();
    return c;
  }

  PlannedTransport transport_;
  Stream stream_;
  Buffer step_;
  Residual residual_;
  Buffer workspace_;
};

class ResidualTest : public ::testing::TestWithParam<Device> {};
GW_INSTANTIATE_ON_DEVICES(ResidualTest);

// Returns values with one large value in each block of 128. The other values are as small as 1/10000 of the
// large value, far below half a step of int8. All values exceed a step of bf16.
std::vector<float> small_beside_large(int64_t count) {
  std::vector<float> values = normal(count, 3);
  for (int64_t i = 0; i < count; ++i) {
    values[i] *= i % 128 == 0 ? 4.0f : i % 2 == 0 ? 1.0f : 1e-3f;
  }
  return values;
}

// Returns the distance between representable numbers next to `value` in the format. For int8, the largest
// value of the block is 127/2 to 127 such distances.
double spacing(const std::string& format, double value, double largest) {
  if (format == "bf16") return std::exp2(std::floor(std::log2(std::abs(value))) - 7);
  return std::exp2(std::ceil(std::log2(largest / 127)));
}

// Expects the mean over N draws within 5 standard deviations, each at most half a spacing over sqrt(N).
// Rounding to nearest, which write() uses, is off by up to half a spacing in every draw. For int8, that is
// the whole of a small value.
TEST_P(ResidualTest, MeanOfManyDrawsIsTheExactResidual) {
  constexpr int kDraws = 4096;
  constexpr int64_t kCount = 384;
  const std::vector<float> values = small_beside_large(kCount);
  for (const std::string format : {"bf16", "int8"}) {
    Kept kept(GetParam(), format, kCount);
    std::vector<double> sum(kCount);
    for (int draw = 0; draw < kDraws; ++draw) {
      const auto now = kept.keep(values);
      for (int64_t i = 0; i < kCount; ++i) sum[i] += now[i];
    }
    Kept nearest(GetParam(), format, kCount);
    nearest.write(0, values);
    const std::vector<float> rounded = nearest.read(0, kCount);
    int far = 0, lost = 0;  // number of elements with large errors under rounding to nearest
    for (int64_t i = 0; i < kCount; ++i) {
      double largest = 0;
      for (int64_t k = i / 128 * 128; k < i / 128 * 128 + 128; ++k)
        largest = std::max(largest, std::abs(double{values[k]}));
      const double bound = 5 * 0.5 * spacing(format, values[i], largest) / std::sqrt(kDraws);
      EXPECT_NEAR(sum[i] / kDraws, values[i], bound) << format << " " << i;
      far += std::abs(double{rounded[i]} - double{values[i]}) > bound;
      lost += values[i] != 0 && rounded[i] == 0;
    }
    EXPECT_GT(far, kCount / 2) << format << ": nearest would also have passed";
    if (format == "int8") {
      EXPECT_GT(lost, kCount / 3);
    }
  }
}

// Expects the squared error of stochastic rounding to be twice the squared error of rounding to nearest.
// conservation_test.cpp relies on this ratio.
TEST_P(ResidualTest, SquaredErrorOfOneStepIsTwiceThatOfNearest) {
  constexpr int64_t kCount = 1 << 16;
  const std::vector<float> values = normal(kCount, 5);
  for (const std::string format : {"bf16", "int8"}) {
    const auto kept = Kept(GetParam(), format, kCount).keep(values);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      error += std::pow(double{kept[i]} - double{values[i]}, 2);
      norm += std::pow(double{values[i]}, 2);
    }
    EXPECT_NEAR(error / norm / (2 * find_wire_format(format)->gaussian_error), 1, 0.1) << format;
  }
}

TEST_P(ResidualTest, Fp32IsExactAndTakesNoWorkspace) {
  const std::vector<float> values = small_beside_large(300);
  Kept kept(GetParam(), "fp32", 300);
  EXPECT_TRUE(same_bits(kept.keep(values), values));
  EXPECT_EQ(kept.bytes(), 1200);
}

TEST_P(ResidualTest, DrawsDifferBetweenStepsAndRanksAndRepeatWithThem) {
  const std::vector<float> values = small_beside_large(1000);
  for (const std::string format : {"bf16", "int8"}) {
    Kept one(GetParam(), format, 1000, 7), same(GetParam(), format, 1000, 7),
        other(GetParam(), format, 1000, 8);
    const auto first = one.keep(values), second = one.keep(values);
    EXPECT_FALSE(same_bits(first, second)) << format;
    EXPECT_FALSE(same_bits(first, other.keep(values))) << format;
    EXPECT_TRUE(same_bits(first, same.keep(values))) << format;
    EXPECT_TRUE(same_bits(second, same.keep(values))) << format;
  }
}

// Saves and restores ranges of a residual in any order, over other values, as for the tensors of a bucket.
TEST_P(ResidualTest, PiecesAreRestoredBitForBit) {
  constexpr int64_t kCount = 5003;
  for (const std::string format : {"bf16", "int8"}) {
    Kept from(GetParam(), format, kCount), to(GetParam(), format, kCount, 8);
    const std::vector<float> saved = from.keep(small_beside_large(kCount));
    to.keep(normal(kCount, 9));
    const std::vector<std::pair<int64_t, int64_t>> pieces{{2100, 2000}, {0, 1}, {1, 2099}, {4100, 903}};
    for (auto [first, count] : pieces) to.clear(first, count);
    for (auto [first, count] : pieces) {
      const std::vector<float> piece = from.read(first, count);
      EXPECT_TRUE(same_bits(piece, {saved.begin() + first, saved.begin() + first + count})) << format;
      to.write(first, piece);
    }
    EXPECT_TRUE(same_bits(to.read(0, kCount), saved)) << format;
  }
}

// Checks memory: 4 bytes per element become 2 or 1.008 bytes, plus two shared FP32 buckets.
TEST(Residual, ManyBucketsTakeFewerBytesThanFp32) {
  const std::vector<GradientTensor> tensors(16, GradientTensor{"w", {512, 512}});
  constexpr int64_t kElements = 16 * 512 * 512, kBucket = 1 << 20;
  for (const char* method : {"int8:", "powersgd:rank=4,"}) {
    auto memory = [&](const std::string& format) {
      Communicator comm(std::make_unique<PlannedTransport>(1, 4, Device::host()));
      comm.set_link_costs({});  // a rank without peers cannot measure links
      return Reducer(comm, CompressionSpec::parse(method + ("residual=" + format)), tensors,
                     {.bucket_bytes = kBucket})
          .memory();
    };
    const ReducerMemory fp32 = memory("fp32"), bf16 = memory("bf16"), int8 = memory("int8");
    SCOPED_TRACE(method);
    EXPECT_EQ(fp32.residual, 4 * kElements);
    EXPECT_EQ(bf16.residual, 2 * kElements);
    EXPECT_EQ(int8.residual, kElements / 128 * 129);
    for (const ReducerMemory& m : {bf16, int8}) {
      EXPECT_EQ(m.factors, fp32.factors);
      EXPECT_EQ(m.staging, fp32.staging + 2 * kBucket);
      EXPECT_LT(m.total(), fp32.total());
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
