// dense=: named tensors are averaged in FP32, and other tensors are unaffected.
#include "collectives/codec/codec.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/math/small_float.h"
#include "runtime/util/error.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

class DenseTensors : public ::testing::TestWithParam<Device> {};
GW_INSTANTIATE_ON_DEVICES(DenseTensors);

// Rank 0's results of three steps by tensor, and the number of bytes that rank 0 sent in the last step.
struct Averages {
  std::vector<std::vector<float>> tensors;
  uint64_t wire_bytes = 0;
  std::string description;
};
Averages averages_of(Device device, const std::string& spec, int64_t bucket_bytes = 16 << 10) {
  Averages out;
  run_ranks(3, device, [&](Communicator& comm) {
    Rank rank(comm, spec, model(), bucket_bytes);
    std::vector<float> last;
    for (uint32_t s = 0; s < 3; ++s) last = rank.step(gradients_for(rank.tensors, 3 * s + comm.rank()));
    if (comm.rank() != 0) return;
    for (int i = 0; i < rank.reducer.tensors(); ++i) {
      const auto first = last.begin() + rank.reducer.offset(i);
      out.tensors.emplace_back(first, first + rank.tensors[i].count());
    }
    out.wire_bytes = rank.reducer.stats(2).wire_bytes;
    out.description = rank.reducer.describe();
  });
  return out;
}

std::set<std::string> exact_tensors(const Averages& out, const Averages& fp32) {
  std::set<std::string> names;
  for (size_t i = 0; i < out.tensors.size(); ++i) {
    if (model()[i].count() > 0 && same_bits(out.tensors[i], fp32.tensors[i])) names.insert(model()[i].name);
  }
  return names;
}

using Names = std::set<std::string>;

TEST_P(DenseTensors, HaveTheBitsOfAnFp32Allreduce) {
  const Averages fp32 = averages_of(GetParam(), "fp32:schedule=two_shot");
  for (const std::string spec :
       {"int8:", "fp8:round=stochastic,residual=int8,", "powersgd:rank=2,wire=int8,"}) {
    auto exact = [&](const std::string& dense) {
      return exact_tensors(averages_of(GetParam(), spec + "schedule=two_shot,dense=" + dense), fp32);
    };
    EXPECT_EQ(exact("off"), Names{}) << spec;
    EXPECT_EQ(exact("auto"), (Names{"bias", "tiny", "scalar", "one"})) << spec;
    EXPECT_EQ(exact("conv"), (Names{"conv"})) << spec;
    EXPECT_EQ(exact("s*+?ide"), (Names{"scalar", "square", "wide"})) << spec;
    EXPECT_EQ(exact("auto+*"), exact_tensors(fp32, fp32)) << spec;
  }
}

// Expects a tensor that shares a block with dense tensors to be compressed as if the dense tensors were zero.
// In another block, the tensor is compressed as without dense=.
TEST_P(DenseTensors, DoNotAffectOtherTensors) {
  const Averages plain = averages_of(GetParam(), "bf16:schedule=two_shot");
  const Averages dense = averages_of(GetParam(), "bf16:schedule=two_shot,dense=auto");
  for (size_t i = 0; i < model().size(); ++i) {
    if (is_dense(CompressionSpec::parse("bf16:dense=auto"),
                 {model()[i].name, matrix_of(model()[i]).first, matrix_of(model()[i]).second}))
      continue;
    EXPECT_TRUE(same_bits(plain.tensors[i], dense.tensors[i])) << model()[i].name;
  }
}

TEST_P(DenseTensors, BucketsWithoutDenseTensorsSendTheSameBytes) {
  const Averages plain = averages_of(GetParam(), "int8:schedule=two_shot");
  const Averages none = averages_of(GetParam(), "int8:schedule=two_shot,dense=nothing");
  EXPECT_EQ(none.wire_bytes, plain.wire_bytes);
  EXPECT_EQ(none.description, plain.description);
  for (size_t i = 0; i < model().size(); ++i) {
    EXPECT_TRUE(same_bits(none.tensors[i], plain.tensors[i])) << model()[i].name;
  }
}

TEST_P(DenseTensors, BucketsOfDenseTensorsOnlyAreAnFp32Allreduce) {
  const Averages fp32 = averages_of(GetParam(), "fp32:schedule=two_shot", 1);  // one bucket per tensor
  const Averages all = averages_of(GetParam(), "int8:schedule=two_shot,dense=*", 1);
  EXPECT_EQ(all.wire_bytes, fp32.wire_bytes);
}

// Returns rank 0's mean, in BF16, of a vector of BF16 values in a bucket with a matrix. `dtype` is the type
// of the gradients.
std::vector<uint16_t> mean_of_bf16(const std::string& spec, DType dtype, int64_t bucket_bytes) {
  std::vector<uint16_t> mean;
  run_ranks(4, Device::host(), [&](Communicator& comm) {
    comm.set_ranks_per_node(2);
    const std::vector<GradientTensor> tensors{{"matrix", {64, 48}, dtype}, {"vector", {300}, dtype}};
    Reducer reducer(comm, CompressionSpec::parse(spec), tensors,
                    {.bucket_bytes = bucket_bytes, .own_gradients = false});
    auto wide = gradients_for(tensors, 7 + comm.rank());
    std::vector<std::vector<uint16_t>> narrow(tensors.size());
    std::vector<void*> addresses;
    for (size_t i = 0; i < tensors.size(); ++i) {
      for (float& x : wide[i]) {
        narrow[i].push_back(float_to_bf16_nearest(x));
        x = bf16_to_float(narrow[i].back());
      }
      addresses.push_back(dtype == DType::f32 ? static_cast<void*>(wide[i].data()) : narrow[i].data());
    }
    Stream stream = Stream::create(comm.device(), "compute");
    reducer.adopt(addresses);
    for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
    reducer.wait(stream);
    stream.synchronize();
    if (comm.rank() != 0) return;
    mean = narrow[1];
    if (dtype == DType::f32)
      std::ranges::transform(wide[1], mean.begin(), [](float x) { return float_to_bf16_nearest(x); });
  });
  return mean;
}

TEST(Dense, Bf16GradientsGetTheBitsOfTheRoundedFp32MeanInEverySchedule) {
  for (const std::string spec :
       {"int8:dense=vector,", "int4:", "sign:", "powersgd:rank=2,wire=int8,dense=auto,"}) {
    for (const std::string schedule : {"two_shot", "ring", "tree", "hierarchical"}) {
      for (const int64_t bucket_bytes : {int64_t{1}, kOneBucket}) {
        const std::string whole = spec + "schedule=" + schedule;
        EXPECT_EQ(mean_of_bf16(whole, DType::bf16, bucket_bytes),
                  mean_of_bf16(whole, DType::f32, bucket_bytes))
            << whole << bucket_bytes;
      }
    }
  }
}

TEST(Dense, AutoSelectsVectorsAndSmallMatricesButNotAFlattenedModel) {
  const CompressionSpec spec = CompressionSpec::parse("int8:dense=auto");
  EXPECT_TRUE(is_dense(spec, {.name = "bias", .rows = 3072, .cols = 1}));
  EXPECT_TRUE(is_dense(spec, {.name = "class_token", .rows = 1, .cols = 768}));
  EXPECT_TRUE(is_dense(spec, {.name = "small", .rows = 31, .cols = 33}));
  EXPECT_FALSE(is_dense(spec, {.name = "matrix", .rows = 32, .cols = 32}));
  EXPECT_FALSE(is_dense(spec, {.name = "flat", .rows = 1 << 20, .cols = 1}));
}

TEST(Dense, NamesPatternsThatMatchNothing) {
  const std::vector<std::string> names{"head.weight", "head.bias"};
  check_dense_names(CompressionSpec::parse("int8:dense=auto+*.bias"), names);
  check_dense_names(CompressionSpec::parse("int8"), names);
  expect_error<BadInput>(
      [&] { check_dense_names(CompressionSpec::parse("int8:dense=*.bias+*.biass"), names); },
      {"dense=*.biass", "head.weight"});
}

}  // namespace
}  // namespace gradwire::testing
