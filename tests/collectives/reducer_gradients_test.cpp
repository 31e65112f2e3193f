// Gradients in the caller's memory, and 16-bit gradients.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "kernels/math/fp16.h"
#include "runtime/util/error.h"
#include "tests/collectives/reducer_rank.h"

namespace gradwire {
namespace {

using testing::count_of;
using testing::gradients_for;
using testing::model;
using testing::run_ranks;
using testing::same_bits;

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

// Expects the bits of FP32 gradients that are rounded at the end.
TEST(Reducer, Gradients16BitGetTheRoundedMean) {
  // One bucket contains gradients of all three types.
  auto type_of = [](size_t i) { return i == 5 ? DType::f32 : i % 3 == 2 ? DType::f16 : DType::bf16; };
  auto round = [](DType dtype, float x) {
    return dtype == DType::f16 ? float_to_fp16(x) : float_to_bf16_nearest(x);
  };
  auto value = [](DType dtype, uint16_t bits) {
    return dtype == DType::f16 ? fp16_to_float(bits) : bf16_to_float(bits);
  };
  std::vector<GradientTensor> tensors;
  for (int i = 0; i < 12; ++i) tensors.push_back({fmt::format("w{}", i), {33, 2 * i + 31}});
  auto run = [&](const char* spec, int64_t alignment, bool sharded, bool narrow) {
    std::vector<GradientTensor> given = tensors;
    for (size_t i = 0; i < given.size(); ++i) {
      if (narrow) given[i].dtype = type_of(i);
    }
    std::vector<std::vector<float>> results(3);
    run_ranks(3, Device::host(), [&](Communicator& comm) {
      Stream stream = Stream::create(comm.device(), "compute");
      Reducer reducer(
          comm, CompressionSpec::parse(spec), given,
          {.bucket_bytes = 16 << 10, .alignment = alignment, .own_gradients = false, .sharded = sharded});
      for (uint32_t step = 0; step < 3; ++step) {
        auto values = gradients_for(given, 10 * step + static_cast<uint32_t>(comm.rank()));
        std::vector<std::vector<uint16_t>> half(given.size());
        std::vector<void*> addresses;
        for (size_t i = 0; i < given.size(); ++i) {
          for (float& x : values[i]) {
            const uint16_t bits = round(type_of(i), x);
            x = value(type_of(i), bits);
            half[i].push_back(bits);
          }
          const bool is_half = given[i].dtype != DType::f32;
          addresses.push_back(is_half ? static_cast<void*>(half[i].data()) : values[i].data());
        }
        reducer.adopt(addresses);
        for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
        reducer.wait(stream);
        stream.synchronize();
        for (const ElementRange& part : reducer.owned()) {
          for (size_t i = 0; i < given.size(); ++i) {
            const int64_t offset = reducer.offset(static_cast<int>(i));
            for (int64_t e = std::max(part.begin, offset); e < std::min(part.end, offset + given[i].count());
                 ++e) {
              const auto at = static_cast<size_t>(e - offset);
              const bool is_half = given[i].dtype != DType::f32;
              float result = is_half ? value(type_of(i), half[i][at]) : values[i][at];
              if (!narrow && i != 5) result = value(type_of(i), round(type_of(i), result));
              results[comm.rank()].push_back(result);
            }
          }
        }
      }
    });
    return results;
  };
  for (const char* spec :
       {"fp32", "bf16", "int8", "powersgd:rank=2", "int4:residual=int8", "randk:ratio=0.1"}) {
    for (bool sharded : {false, true}) {
      for (int64_t alignment : {1, 8}) {
        const auto narrow = run(spec, alignment, sharded, true), wide = run(spec, alignment, sharded, false);
        for (size_t r = 0; r < narrow.size(); ++r) {
          ASSERT_GT(narrow[r].size(), 0u);
          EXPECT_TRUE(same_bits(narrow[r], wide[r])) << spec << ", sharded " << sharded << ", rank " << r;
        }
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
}  // namespace gradwire
