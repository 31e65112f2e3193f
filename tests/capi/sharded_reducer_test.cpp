// Tests gw_reducer_options.shard: each rank gets the mean of that rank's part of every bucket.
#include <cmath>
#include <mutex>

#include "tests/capi/ranks.h"

namespace {

using Floats = std::vector<float>;

gw_reducer_options sharded_options() {
  gw_reducer_options options = capi::options(16 << 10);
  options.shard = 1;
  return options;
}

std::vector<gw_range> shards_of(gw_reducer reducer) {
  int32_t count = -1;
  GW_EXPECT_OK(gw_reducer_shards(reducer, nullptr, 0, &count));
  std::vector<gw_range> ranges(count);
  GW_EXPECT_OK(gw_reducer_shards(reducer, ranges.data(), count, &count));
  return ranges;
}

// The gradients of one rank, and the offset of each tensor.
struct Gradients {
  explicit Gradients(uint32_t seed) : flat(capi::normal(static_cast<int64_t>(model.elements()), seed)) {
    for (size_t i = 0; i < model.names.size(); ++i) {
      begin.push_back(begin.empty() ? 0 : begin.back() + model.count(i - 1));
    }
  }
  std::vector<gw_tensor> tensors() { return model.tensors(flat.data()); }

  capi::Model model;
  Floats flat;
  std::vector<size_t> begin;
};

gw_reducer make(gw_comm comm, const char* spec, Gradients& gradients, const gw_reducer_options* options) {
  auto tensors = gradients.tensors();
  gw_reducer reducer = nullptr;
  GW_EXPECT_OK(capi::create_reducer(comm, spec, tensors, options, &reducer));
  return reducer;
}

void step(gw_reducer reducer, const Gradients& gradients) {
  for (size_t i = 0; i < gradients.begin.size(); ++i) {
    GW_EXPECT_OK(gw_reducer_ready(reducer, static_cast<int32_t>(i), nullptr));
  }
  GW_EXPECT_OK(gw_reducer_wait(reducer, nullptr, nullptr));
}

TEST(CApiShardedReducer, OwnersMatchAllreduceBitForBit) {
  for (int world : {1, 2, 3, 8}) {
    std::mutex mutex;
    std::vector<int> owners(capi::Model().elements());
    capi::run_ranks(world, [&](gw_comm comm, int rank) {
      const gw_reducer_options options = sharded_options();
      Gradients whole(static_cast<uint32_t>(rank) + 1), part(static_cast<uint32_t>(rank) + 1);
      gw_reducer_options unsharded = options;
      unsharded.shard = 0;
      const capi::Reducer all(make(comm, "fp32:schedule=two_shot", whole, &unsharded));
      step(all.handle, whole);
      const capi::Reducer sharded(make(comm, "fp32:schedule=two_shot", part, &options));
      step(sharded.handle, part);
      std::lock_guard lock(mutex);
      for (const gw_range& range : shards_of(sharded.handle)) {
        const size_t tensor = part.begin[range.tensor];
        EXPECT_LT(range.begin, range.end);
        EXPECT_LE(static_cast<size_t>(range.end), part.model.count(static_cast<size_t>(range.tensor)));
        for (auto e = tensor + static_cast<size_t>(range.begin); e < tensor + static_cast<size_t>(range.end);
             ++e) {
          ++owners[e];
          EXPECT_EQ(part.flat[e], whole.flat[e]) << world << " ranks, element " << e;
        }
      }
    });
    EXPECT_EQ(owners, std::vector<int>(owners.size(), 1)) << world << " ranks";
  }
}

TEST(CApiShardedReducer, RejectsRanksThatDifferInShard) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    gw_reducer_options options = sharded_options();
    options.shard = rank;
    Gradients gradients(1);
    auto tensors = gradients.tensors();
    gw_reducer reducer = nullptr;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "not sharded",
                    capi::create_reducer(comm, "int8", tensors, &options, &reducer));
  });
}

// Checks that sums are computed in FP32 and that the owner rounds its part to nearest.
TEST(CApiShardedReducer, Bf16GradientsGetTheRoundedMeanInPlace) {
  auto upper_half = [](float x) {  // returns the BF16 bits of a value that BF16 can represent
    uint32_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
  };
  for (int world : {1, 2, 3}) {
    capi::run_ranks(world, [&](gw_comm comm, int rank) {
      const gw_reducer_options options = sharded_options();
      // BF16 represents the integers up to 256 exactly, so the mean of equal integers is exact.
      Gradients wide(1);
      wide.model.dtype = GW_BFLOAT16;
      std::vector<uint16_t> half;
      for (size_t e = 0; e < wide.flat.size(); ++e) {
        half.push_back(upper_half(static_cast<float>(static_cast<int>(e % 81) + 3 * rank)));
      }
      auto tensors = wide.model.tensors();
      for (size_t i = 0; i < tensors.size(); ++i) tensors[i].grad = half.data() + wide.begin[i];
      gw_reducer handle = nullptr;
      GW_EXPECT_OK(gw_reducer_create(comm, "int8:dense=off,schedule=two_shot", tensors.data(),
                                     static_cast<int32_t>(tensors.size()), &options, &handle));
      const capi::Reducer reducer(handle);
      step(reducer.handle, wide);
      size_t owned = 0;
      for (const gw_range& range : shards_of(reducer.handle)) {
        const size_t begin = wide.begin[range.tensor];
        for (auto e = begin + static_cast<size_t>(range.begin); e < begin + static_cast<size_t>(range.end);
             ++e, ++owned) {
          const float mean =
              static_cast<float>(static_cast<int>(e % 81)) + 1.5f * static_cast<float>(world - 1);
          float got = 0;
          const uint32_t bits = static_cast<uint32_t>(half[e]) << 16;
          std::memcpy(&got, &bits, sizeof got);
          EXPECT_NEAR(got, mean, 0.6) << world << " ranks, element " << e;
        }
      }
      EXPECT_GT(owned, 0u);
    });
  }
}

// Passes the shorter structure of the first header, which lacks the field `shard`.
TEST(CApiShardedReducer, OptionsOfTheFirstHeaderDoNotShard) {
  capi::run_ranks(2, [&](gw_comm comm, int) {
    gw_reducer_options options = sharded_options();
    options.size = offsetof(gw_reducer_options, shard);
    Gradients gradients(1);
    const capi::Reducer reducer(make(comm, "fp32", gradients, &options));
    step(reducer.handle, gradients);
    int64_t owned = 0;
    for (const gw_range& range : shards_of(reducer.handle)) owned += range.end - range.begin;
    EXPECT_EQ(owned, static_cast<int64_t>(gradients.flat.size()));
  });
}

}  // namespace
