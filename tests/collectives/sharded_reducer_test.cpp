// A sharded reducer: each rank gets the mean of its shard, gradients are conserved, and half the bytes are
// sent.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/collectives/conservation.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

class ShardedReducer : public ::testing::TestWithParam<Device> {
 protected:
  struct Result {
    // The mean, assembled from all ranks' shards. `kept` and `in` are the sums of residuals and inputs over
    // the ranks.
    std::vector<float> mean;
    std::vector<double> kept, in, size;
    std::vector<int> owners;  // number of ranks that own each element
    uint64_t wire_bytes = 0;
  };
  Result run(const std::string& spec, int world, int steps, bool sharded) const {
    Result all;
    std::mutex mutex;
    run_ranks(world, GetParam(), [&](Communicator& comm) {
      comm.set_ranks_per_node(ranks_per_node(world));
      const Stream stream = Stream::create(comm.device(), "compute");
      Reducer reducer(comm, CompressionSpec::parse(spec), model(),
                      {.bucket_bytes = 16 << 10, .seed = 5, .slice_bytes = 0, .sharded = sharded});
      const auto elements = static_cast<size_t>(reducer.elements());
      std::vector<double> applied(elements), in(elements);
      std::vector<float> mean;
      for (int s = 0; s < steps; ++s) {
        const auto gradients = gradients_for(model(), static_cast<uint32_t>(s * world + comm.rank() + 1));
        for (int i = 0; i < reducer.tensors(); ++i) {
          const auto& gradient = gradients[i];
          copy(stream, reducer.gradient(i), gradient.data(), gradient.size() * sizeof(float));
          for (size_t e = 0; e < gradient.size(); ++e)
            in[static_cast<size_t>(reducer.offset(i)) + e] += gradient[e];
          reducer.ready(i, stream);
        }
        reducer.wait(stream);
        mean = to_host(stream, reducer.gradients().as<const float>(), reducer.elements());
        for (size_t e = 0; e < elements; ++e) applied[e] += mean[e];
        // The gaps between the tensors must be zero in the next step.
        if (sharded) fill_zero(stream, reducer.gradients().data(), reducer.gradients().bytes());
        stream.synchronize();
      }
      std::vector<double> kept(elements);
      for (const TensorState& state : reducer.tensor_state()) {
        if (state.kind != kResidualKind) continue;
        const auto part = values_of(stream, state);
        std::copy(part.begin(), part.end(), kept.begin() + reducer.offset(state.tensor));
      }
      std::lock_guard lock(mutex);
      all.mean.resize(elements), all.owners.resize(elements);
      all.kept.resize(elements), all.in.resize(elements), all.size.resize(elements);
      for (size_t e = 0; e < elements; ++e) {
        all.in[e] += in[e], all.size[e] += std::abs(in[e]), all.kept[e] += kept[e];
      }
      for (const ElementRange& range : reducer.owned()) {
        for (auto e = static_cast<size_t>(range.begin); e < static_cast<size_t>(range.end); ++e) {
          all.mean[e] = mean[e], ++all.owners[e];
          all.kept[e] += applied[e] * world / (sharded ? 1 : world);
        }
      }
      all.wire_bytes = std::max(all.wire_bytes, reducer.stats(steps - 1).wire_bytes);
    });
    return all;
  }
};
GW_INSTANTIATE_ON_DEVICES(ShardedReducer);

TEST_P(ShardedReducer, OwnersMatchAllreduceBitForBit) {
  for (const char* spec :
       thinned({"fp32:schedule=two_shot", "fp32:schedule=ring", "fp32", "powersgd:rank=2", "randk:ratio=0.1"},
               4)) {
    for (int world : thinned({2, 3, 4, 8}, 2)) {
      const Result whole = run(spec, world, 2, false), sharded = run(spec, world, 2, true);
      EXPECT_EQ(sharded.owners, std::vector<int>(sharded.owners.size(), 1)) << spec << ", " << world;
      EXPECT_TRUE(same_bits(whole.mean, sharded.mean)) << spec << ", " << world;
    }
  }
}

// Allows for rounding, because the reduce-scatter adds nodes in a different order than the allreduce.
TEST_P(ShardedReducer, HierarchicalDiffersFromAllreduceOnlyByRounding) {
  const Result whole = run("fp32:schedule=hierarchical", 8, 2, false),
               sharded = run("fp32:schedule=hierarchical", 8, 2, true);
  const std::vector<double> mean(whole.mean.begin(), whole.mean.end());
  std::vector<double> difference(mean.size());
  for (size_t e = 0; e < mean.size(); ++e) difference[e] = mean[e] - sharded.mean[e];
  EXPECT_LE(norm(difference), 1e-6 * norm(mean));
}

TEST_P(ShardedReducer, ConservesGradients) {
  for (const char* spec :
       thinned({"bf16", "fp8", "int8:schedule=ring", "int4:schedule=hierarchical", "int4:dense=off", "topk",
                "sign", "bf16:round=stochastic,schedule=two_shot"},
               4)) {
    for (int world : thinned({2, 4, 8}, 2)) {
      const Result r = run(spec, world, short_sweeps() ? 3 : 10, true);
      std::vector<double> difference(r.in.size());
      for (size_t e = 0; e < r.in.size(); ++e) difference[e] = r.kept[e] - r.in[e];
      EXPECT_LE(norm(difference), 1e-6 * norm(r.size)) << spec << ", " << world;
    }
  }
}

TEST_P(ShardedReducer, AWireFormatSendsHalfTheBytesOfAnAllreduce) {
  for (const char* spec : {"fp32:schedule=two_shot", "int8:dense=off,schedule=two_shot"}) {
    const Result whole = run(spec, 4, 1, false), sharded = run(spec, 4, 1, true);
    EXPECT_NEAR(static_cast<double>(sharded.wire_bytes) / static_cast<double>(whole.wire_bytes), 0.5, 0.02)
        << spec;
  }
}

}  // namespace
}  // namespace gradwire::testing
