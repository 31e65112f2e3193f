// Gradients in the caller's memory, and 16-bit gradients.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "kernels/math/small_float.h"
#include "runtime/util/error.h"
#include "tests/collectives/reducer_rank.h"

namespace gradwire::testing {
namespace {

class AdoptedGradients : public ::testing::TestWithParam<const char*> {};

// Runs the same steps with gradients in the reducer's buffer, adopted in place (densely packed, as in a
// framework's bucket, which moves once), and adopted one by one. Expects equal bits.
TEST_P(AdoptedGradients, MatchTheReducersBufferBitForBit) {
  constexpr int kSteps = 4;
  enum Where { own, packed, scattered };
  std::vector<std::vector<float>> results;
  for (Where where : {own, packed, scattered}) {
    std::vector<std::vector<float>> steps(2);
    run_ranks(2, Device::host(), [&](Communicator& comm) {
      auto tensors = model();
      Stream stream = Stream::create(comm.device(), "compute");
      Reducer reducer(comm, CompressionSpec::parse(GetParam()), tensors,
                      {.bucket_bytes = 16 << 10, .alignment = 1, .own_gradients = where == own});
      std::vector<std::vector<float>> memory(2);  // two buffers; an address is reused only after a move
      for (auto& m : memory) m.resize(static_cast<size_t>(reducer.elements() + 1));
      std::vector<std::vector<float>> pieces;
      for (const auto& t : tensors) pieces.emplace_back(static_cast<size_t>(count_of(t)) + 1);
      for (int s = 0; s < kSteps; ++s) {
        auto gradients = gradients_for(tensors, static_cast<uint32_t>(s * 2 + comm.rank() + 1));
        std::vector<void*> addresses;
        for (int i = 0; i < reducer.tensors(); ++i) {
          // The offset of one float limits every alignment to 4 bytes.
          addresses.push_back(where == packed ? memory[s / 2].data() + 1 + reducer.offset(i)
                                              : pieces[i].data() + 1);
        }
        if (where != own) {
          reducer.adopt(addresses);
          EXPECT_EQ(reducer.buckets_in_place(), where == packed ? reducer.buckets() : 0);
        }
        for (int i = 0; i < reducer.tensors(); ++i) {
          copy(stream, reducer.gradient(i), gradients[i].data(), gradients[i].size() * sizeof(float));
          reducer.ready(i, stream);
        }
        reducer.wait(stream);
        for (int i = 0; i < reducer.tensors(); ++i) {
          auto result = to_host(stream, static_cast<const float*>(reducer.gradient(i)), count_of(tensors[i]));
          steps[comm.rank()].insert(steps[comm.rank()].end(), result.begin(), result.end());
        }
      }
    });
    EXPECT_TRUE(same_bits(steps[0], steps[1]));
    results.push_back(steps[0]);
  }
  EXPECT_TRUE(same_bits(results[own], results[packed]));
  EXPECT_TRUE(same_bits(results[own], results[scattered]));
}

INSTANTIATE_TEST_SUITE_P(Reducer, AdoptedGradients,
                         ::testing::Values("fp32", "bf16:schedule=ring", "powersgd:rank=2,start=1",
                                           "powersgd:rank=4,wire=bf16", "int8:residual=bf16,dense=auto"));

// Returns the type of a tensor. One bucket contains gradients of all three types.
DType type_of(size_t tensor) {
  return tensor == 5 ? DType::f32 : tensor % 3 == 2 ? DType::f16 : DType::bf16;
}
uint16_t narrowed(DType dtype, float x) {
  return dtype == DType::f16 ? float_to_fp16(x) : float_to_bf16_nearest(x);
}
float widened(DType dtype, uint16_t bits) {
  return dtype == DType::f16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// The same gradients in FP32 and in 16 bits.
struct TwoWidths {
  TwoWidths(const std::vector<GradientTensor>& tensors, uint32_t seed)
      : wide(gradients_for(tensors, seed)), narrow(wide.size()) {
    for (size_t t = 0; t < wide.size(); ++t) {
      for (float& x : wide[t]) {
        narrow[t].push_back(narrowed(type_of(t), x));
        x = widened(type_of(t), narrow[t].back());
      }
    }
  }
  void* address(size_t t, DType dtype) {
    return dtype == DType::f32 ? static_cast<void*>(wide[t].data()) : narrow[t].data();
  }
  // Returns a result that was averaged as `dtype`, rounded to the tensor's type.
  float result(size_t t, size_t i, DType dtype) const {
    if (type_of(t) == DType::f32) return wide[t][i];
    const uint16_t bits = dtype == DType::f32 ? narrowed(type_of(t), wide[t][i]) : narrow[t][i];
    return widened(type_of(t), bits);
  }

  std::vector<std::vector<float>> wide;
  std::vector<std::vector<uint16_t>> narrow;
};

// Averages gradients of the tensors' types in three steps. Returns the results that this rank owns.
std::vector<float> averages_of(Communicator& comm, const char* spec,
                               const std::vector<GradientTensor>& tensors, int64_t alignment, bool sharded) {
  std::vector<float> results;
  Stream stream = Stream::create(comm.device(), "compute");
  Reducer reducer(
      comm, CompressionSpec::parse(spec), tensors,
      {.bucket_bytes = 16 << 10, .alignment = alignment, .own_gradients = false, .sharded = sharded});
  for (uint32_t step = 0; step < 3; ++step) {
    TwoWidths gradients(tensors, 10 * step + static_cast<uint32_t>(comm.rank()));
    std::vector<void*> addresses;
    for (size_t t = 0; t < tensors.size(); ++t) addresses.push_back(gradients.address(t, tensors[t].dtype));
    reducer.adopt(addresses);
    for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
    reducer.wait(stream);
    stream.synchronize();
    for (const ElementRange& part : reducer.owned()) {
      for (size_t t = 0; t < tensors.size(); ++t) {
        const int64_t begin = reducer.offset(static_cast<int>(t)), end = begin + tensors[t].count();
        for (int64_t e = std::max(part.begin, begin); e < std::min(part.end, end); ++e)
          results.push_back(gradients.result(t, static_cast<size_t>(e - begin), tensors[t].dtype));
      }
    }
  }
  return results;
}

// Expects the bits of FP32 gradients that are rounded at the end.
TEST(Reducer, Gradients16BitGetTheRoundedMean) {
  std::vector<GradientTensor> wide;
  for (int i = 0; i < 12; ++i) wide.push_back({fmt::format("w{}", i), {33, 2 * i + 31}});
  std::vector<GradientTensor> narrow = wide;
  for (size_t t = 0; t < narrow.size(); ++t) narrow[t].dtype = type_of(t);
  for (const char* spec :
       {"fp32", "bf16", "int8", "powersgd:rank=2", "int4:residual=int8", "randk:ratio=0.1"}) {
    for (bool sharded : {false, true}) {
      for (int64_t alignment : {1, 8}) {
        run_ranks(3, Device::host(), [&](Communicator& comm) {
          const auto got = averages_of(comm, spec, narrow, alignment, sharded),
                     want = averages_of(comm, spec, wide, alignment, sharded);
          EXPECT_GT(got.size(), 0u);
          EXPECT_TRUE(same_bits(got, want)) << spec << ", sharded " << sharded << ", rank " << comm.rank();
        });
      }
    }
  }
}

TEST(Reducer, Gradients16BitNeedMemoryForTwoBucketsOnly) {
  constexpr int64_t kBucket = 4096;
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    auto staging = [&](int buckets, DType dtype) {
      const std::vector<GradientTensor> tensors(buckets, {"w", {kBucket / 4}, dtype});
      Reducer reducer(comm, CompressionSpec::parse("int8"), tensors,
                      {.bucket_bytes = kBucket, .alignment = 1, .own_gradients = false});
      std::vector<float> memory(reducer.elements());
      std::vector<void*> addresses;
      for (int i = 0; i < buckets; ++i) addresses.push_back(memory.data() + reducer.offset(i));
      reducer.adopt(addresses);
      EXPECT_EQ(reducer.gradients().bytes(), 0u);
      EXPECT_EQ(reducer.buckets_in_place(), dtype == DType::f32 ? buckets : 0);
      return reducer.memory().staging;
    };
    for (int buckets : {2, 5, 40}) {
      for (DType half : {DType::bf16, DType::f16}) {
        EXPECT_EQ(staging(buckets, half), staging(buckets, DType::f32) + 2 * kBucket) << buckets;
      }
    }
  });
}

TEST(Reducer, AdoptRejectsUnusableAddresses) {
  run_ranks(2, Device::host(), [](Communicator& comm) {
    Stream stream = Stream::create(comm.device(), "compute");
    Reducer reducer(comm, CompressionSpec::parse("fp32"), {{"a", {4}}, {"b", {2}}}, {.own_gradients = false});
    EXPECT_THROW(reducer.ready(0, stream), Error);  // no gradient is adopted yet
    EXPECT_THROW(Reducer(comm, CompressionSpec::parse("fp32"), {{"numbers", {4}, DType::i32}},
                         {.own_gradients = false}),
                 Error);
    std::vector<float> memory(8);
    std::vector<void*> one{memory.data()}, with_null{memory.data(), nullptr};
    EXPECT_THROW(reducer.adopt(one), BadInput);
    EXPECT_THROW(reducer.adopt(with_null), BadInput);
    std::vector<void*> good{memory.data(), memory.data() + 4};
    reducer.adopt(good);
    // With the default alignment of 4 elements, a gap would follow b. The reducer must not write memory[6]
    // and memory[7].
    EXPECT_EQ(reducer.buckets_in_place(), 0);
    reducer.ready(0, stream);
    EXPECT_THROW(reducer.adopt(good), Error);  // in the middle of a step
    reducer.ready(1, stream);
    reducer.wait(stream);
    stream.synchronize();
  });
}

}  // namespace
}  // namespace gradwire::testing
