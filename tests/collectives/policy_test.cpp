// The policies around a codec: EF21, uncompressed first steps, ramps, momentum correction and clipping.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "collectives/reducer/snapshot.h"
#include "kernels/math/small_float.h"
#include "kernels/passes/passes.h"
#include "tests/collectives/conservation.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/support/schedules.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

class Policies : public ::testing::TestWithParam<Device> {};
GW_INSTANTIATE_ON_DEVICES(Policies);

// Returns a rank's state of one kind, laid out as the flat gradient; other elements are zero.
std::vector<float> state_of(Rank& rank, const std::string& kind) {
  std::vector<float> all(static_cast<size_t>(rank.reducer.elements()));
  for (const TensorState& s : rank.reducer.tensor_state()) {
    if (s.kind != kind) continue;
    const auto part = values_of(rank.stream, s);
    std::copy(part.begin(), part.end(), all.begin() + rank.reducer.offset(s.tensor));
  }
  return all;
}

// Adds up the ranks' values. `of` is indexed by rank.
std::vector<double> sum_of(const std::vector<std::vector<float>>& of) {
  std::vector<double> sum(of[0].size());
  for (const auto& values : of) add_to(sum, values);
  return sum;
}

const std::vector<std::string> kEf21Specs = {"int8:ef=ef21",
                                             "int4:ef=ef21",
                                             "topk:k=41,of=256,ef=ef21",
                                             "powersgd:rank=2,ef=ef21",
                                             "powersgd:rank=2,wire=int8,alternate=on,ef=ef21",
                                             "randk:ratio=0.1,ef=ef21",
                                             "sign:ef=ef21,dense=off"};

// With every schedule the estimate that all ranks apply is the mean of the ranks' own estimates: with the
// rests g - h_i as residuals, nothing is lost.
TEST_P(Policies, Ef21AppliesTheMeanOfTheRanksEstimates) {
  constexpr int kSteps = 8;
  for (const std::string& spec : thinned(kEf21Specs)) {
    for (const std::string& schedule : schedule_names()) {
      for (int world : {2, 4, 5}) {
        SCOPED_TRACE(fmt::format("{},schedule={}, {} ranks", spec, schedule, world));
        std::vector<std::vector<float>> results(world), deviations(world), inputs(world);
        run_ranks(world, GetParam(), [&](Communicator& comm) {
          comm.set_ranks_per_node(ranks_per_node(world));
          Rank rank(comm, spec + ",schedule=" + schedule, model(), 16 << 10);
          const auto me = static_cast<size_t>(comm.rank());
          for (int s = 0; s < kSteps; ++s) {
            const auto gradients =
                gradients_for(rank.tensors, static_cast<uint32_t>(s * world + comm.rank() + 1));
            results[me] = rank.step(gradients);
            inputs[me] = flat(rank, gradients);
          }
          deviations[me] = state_of(rank, "deviation");
          EXPECT_TRUE(same_bits(results[me], state_of(rank, "estimate")));
          EXPECT_EQ(norm(sum_of({rank.residual()})), 0) << "a residual would be sent twice";
        });
        for (const auto& result : results) EXPECT_TRUE(same_bits(result, results[0]));
        double sizes = 0;
        for (const auto& deviation : deviations) sizes += norm(sum_of({deviation}));
        EXPECT_GT(sizes, 0.1 * norm(sum_of(inputs)));
        EXPECT_LE(norm(sum_of(deviations)), 1e-6 * kSteps * sizes);
      }
    }
  }
}

// A constant gradient is sent completely: the estimates converge to the gradients.
TEST_P(Policies, Ef21ConvergesToAConstantGradient) {
  for (const char* spec : thinned<const char*>(
           {"int4:ef=ef21", "topk:k=64,of=256,ef=ef21", "int8:ef=ef21,schedule=two_shot", "fp8:ef=ef21"})) {
    std::vector<std::vector<float>> inputs(3);
    std::vector<float> result;
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 16 << 10);
      const auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(comm.rank() + 1));
      inputs[static_cast<size_t>(comm.rank())] = flat(rank, gradients);
      std::vector<float> last;
      for (int s = 0; s < 60; ++s) last = rank.step(gradients);
      if (comm.rank() == 0) result = last;
    });
    std::vector<double> wanted = sum_of(inputs), difference(wanted);
    for (size_t i = 0; i < wanted.size(); ++i) difference[i] = wanted[i] / 3 - result[i];
    EXPECT_LE(norm(difference), 1e-3 * norm(wanted) / 3) << spec;
  }
}

// A sum needs the same estimates as a mean.
TEST_P(Policies, Ef21OfASumIsTheMeanTimesTheRanks) {
  std::map<bool, std::vector<float>> results;
  for (const bool average : {true, false}) {
    run_ranks(4, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, "int4:ef=ef21", model(), ReducerOptions{.average = average});
      std::vector<float> last;
      for (int s = 0; s < 4; ++s) {
        last = rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(s * 4 + comm.rank() + 1)));
      }
      if (comm.rank() == 0) results[average] = last;
    });
  }
  for (float& x : results[true]) x *= 4;
  EXPECT_TRUE(same_bits(results[true], results[false]));
}

// A non-finite gradient shows in its tensor on every rank, and leaves the estimates finite and consistent.
TEST_P(Policies, Ef21ContainsANan) {
  for (const std::string& spec : thinned(kEf21Specs)) {
    std::vector<std::vector<float>> deviations(3);
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 16 << 10);
      for (int s = 0; s < 4; ++s) {
        auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 3 + comm.rank()));
        if (s == 2 && comm.rank() == 1) gradients[2][7] = std::numeric_limits<float>::quiet_NaN();
        const auto result = rank.step(gradients);
        for (size_t t = 0; t < rank.tensors.size(); ++t) {
          const auto begin = result.begin() + rank.reducer.offset(static_cast<int>(t));
          const bool finite =
              std::all_of(begin, begin + rank.tensors[t].count(), [](float x) { return std::isfinite(x); });
          EXPECT_EQ(finite, !(s == 2 && t == 2)) << spec << " tensor " << t << " step " << s;
        }
      }
      deviations[static_cast<size_t>(comm.rank())] = state_of(rank, "deviation");
    });
    double sizes = 0;
    for (const auto& deviation : deviations) sizes += norm(sum_of({deviation}));
    EXPECT_GT(sizes, 0);
    EXPECT_LE(norm(sum_of(deviations)), 1e-5 * sizes) << spec;
  }
}

// A gradient that is sent uncompressed reaches the estimate, also after many steps of BF16 gradients.
TEST(Ef21, EstimatesOfUncompressedBf16GradientsDoNotDrift) {
  constexpr int kSteps = 100;
  const std::vector<GradientTensor> tensors{{"matrix", {64, 48}, DType::bf16},
                                            {"vector", {300}, DType::bf16}};
  std::vector<std::vector<float>> last(2);
  std::vector<float> estimate;
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    Reducer reducer(comm, CompressionSpec::parse("int4:ef=ef21"), tensors, {.own_gradients = false});
    Stream stream = Stream::create(comm.device(), "compute");
    std::vector<float>& mine = last[static_cast<size_t>(comm.rank())];
    for (int s = 0; s < kSteps; ++s) {
      const auto wide = gradients_for(tensors, static_cast<uint32_t>(2 * s + comm.rank() + 1));
      std::vector<std::vector<uint16_t>> narrow(wide.size());
      for (size_t i = 0; i < wide.size(); ++i) {
        for (const float x : wide[i]) narrow[i].push_back(float_to_bf16_nearest(x));
      }
      mine.clear();
      for (const uint16_t x : narrow[1]) mine.push_back(bf16_to_float(x));
      const std::vector<void*> addresses{narrow[0].data(), narrow[1].data()};
      reducer.adopt(addresses);
      for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
      reducer.wait(stream);
      stream.synchronize();
    }
    if (comm.rank() != 0) return;
    for (const TensorState& state : reducer.tensor_state()) {
      if (state.kind == "estimate" && state.tensor == 1) estimate = values_of(stream, state);
    }
  });
  ASSERT_EQ(estimate.size(), last[0].size());
  for (size_t i = 0; i < estimate.size(); ++i) {
    EXPECT_NEAR(estimate[i], (last[0][i] + last[1][i]) / 2, 1e-4 * (1 + std::abs(estimate[i]))) << i;
  }
}

// A snapshot of another group keeps the estimates, and resets the deviations, whose sum would not be zero.
TEST(Ef21, ContinuesFromTheEstimateInAnotherGroup) {
  std::vector<float> estimate;
  ReducerSnapshot kept;
  run_ranks(3, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "int4:ef=ef21", model(), 16 << 10);
    for (uint32_t s = 0; s < 3; ++s) {
      rank.step(gradients_for(rank.tensors, 3 * s + static_cast<uint32_t>(comm.rank())));
    }
    if (comm.rank() != 1) return;
    estimate = state_of(rank, "estimate");
    kept.take(rank.stream, rank.reducer, 3);
    rank.stream.synchronize();
  });
  for (const auto& [world, passed] : std::vector<std::pair<int, int>>{{2, 2}, {3, 0}, {3, 3}}) {
    std::vector<std::vector<float>> deviations(static_cast<size_t>(world));
    run_ranks(world, Device::host(), [&](Communicator& comm) {
      Rank rank(comm, "int4:ef=ef21", model(), 16 << 10);
      kept.restore(rank.stream, rank.reducer, passed);
      EXPECT_TRUE(same_bits(state_of(rank, "estimate"), estimate));
      EXPECT_EQ(norm(sum_of({state_of(rank, "deviation")})) > 0, passed == 3);
      rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(comm.rank())));
      deviations[static_cast<size_t>(comm.rank())] = state_of(rank, "deviation");
    });
    if (passed == 3) continue;  // every rank has loaded the deviation of one rank
    EXPECT_LE(norm(sum_of(deviations)), 1e-6 * norm(sum_of({deviations[0]})));
  }
}

// Returns the results and bytes of each step on rank 0 of two ranks.
struct StepResults {
  std::vector<std::vector<float>> results, residuals;
  std::vector<uint64_t> bytes;
};
StepResults steps_of(Device device, const std::string& spec, int steps) {
  StepResults all;
  run_ranks(2, device, [&](Communicator& comm) {
    Rank rank(comm, spec, model(), 1 << 20, 0);
    for (int s = 0; s < steps; ++s) {
      const auto result =
          rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(s * 2 + comm.rank() + 1)));
      const auto residual = rank.residual();
      if (comm.rank() != 0) continue;
      all.results.push_back(result);
      all.residuals.push_back(residual);
      all.bytes.push_back(rank.reducer.stats(s).wire_bytes);
    }
  });
  return all;
}

TEST_P(Policies, FirstStepsAreUncompressed) {
  const StepResults plain = steps_of(GetParam(), "fp32", 5);
  for (const char* spec : thinned<const char*>(
           {"int8", "sign", "topk", "randk:ratio=0.1", "powersgd:rank=2", "int8:residual=bf16"})) {
    const std::string text = spec + std::string(std::string(spec).find(':') < 99 ? "," : ":");
    const StepResults late = steps_of(GetParam(), text + "start=3", 5);
    for (size_t s = 0; s < 5; ++s) {
      EXPECT_EQ(same_bits(late.results[s], plain.results[s]), s < 3) << spec << " step " << s;
      EXPECT_EQ(norm(sum_of({late.residuals[s]})) == 0, s < 3) << spec << " step " << s;
    }
  }
}

TEST_P(Policies, ARampSendsFewerBytesInEachStageAndEndsInTheSpecsFormat) {
  struct Case {
    std::string spec;
    size_t stages;
  };
  for (const Case& c :
       {Case{"topk:k=4,of=256", 3}, Case{"sign:dense=off", 4}, Case{"fp8", 2}, Case{"randk:ratio=0.02", 3}}) {
    const CompressionSpec spec = CompressionSpec::parse(c.spec + ",ramp=6");
    SCOPED_TRACE(spec.to_string());
    EXPECT_EQ(std::max(spec.ramp_formats().size(), spec.ramp_ratios().size()), c.stages);
    const StepResults ramp = steps_of(GetParam(), spec.to_string(), 8),
                      plain = steps_of(GetParam(), c.spec, 1);
    EXPECT_TRUE(std::is_sorted(ramp.bytes.rbegin(), ramp.bytes.rend()));
    std::vector<uint64_t> stages = ramp.bytes;
    stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
    EXPECT_EQ(stages.size(), c.stages);
    EXPECT_EQ(ramp.bytes[6], plain.bytes[0]);
    EXPECT_GT(ramp.bytes[5], plain.bytes[0]);
  }
}

// Momentum correction as Deep Gradient Compression defines it, computed independently: u = M u + g is added
// to the residual, and u and the residual become 0 where the mean was sent. randk sends the same coordinates
// on all ranks, so the result shows which.
TEST_P(Policies, MomentumIsCorrectedAndMaskedWhereValuesAreSent) {
  constexpr int kWorld = 3, kSteps = 6;
  std::vector<std::vector<std::vector<float>>> inputs(kSteps, std::vector<std::vector<float>>(kWorld));
  std::vector<std::vector<float>> results(kSteps);
  std::vector<std::vector<float>> velocities(kWorld);
  run_ranks(kWorld, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "randk:ratio=0.3,momentum=0.9", model(), 16 << 10);
    for (int s = 0; s < kSteps; ++s) {
      const auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * kWorld + comm.rank() + 1));
      inputs[s][comm.rank()] = flat(rank, gradients);
      const auto result = rank.step(gradients);
      if (comm.rank() == 0) results[s] = result;
    }
    velocities[comm.rank()] = state_of(rank, "velocity");
  });
  const size_t count = results[0].size();
  std::vector<std::vector<double>> u(kWorld, std::vector<double>(count)), v(u);
  double sent = 0;
  for (int s = 0; s < kSteps; ++s) {
    for (size_t i = 0; i < count; ++i) {
      double mean = 0;
      for (int r = 0; r < kWorld; ++r) {
        u[r][i] = 0.9 * u[r][i] + inputs[s][r][i];
        v[r][i] += u[r][i];
        mean += v[r][i] / kWorld;
      }
      if (results[s][i] == 0) continue;
      ++sent;
      ASSERT_NEAR(results[s][i], mean, 1e-5) << "step " << s << " element " << i;
      for (int r = 0; r < kWorld; ++r) u[r][i] = v[r][i] = 0;
    }
  }
  EXPECT_NEAR(sent / kSteps / static_cast<double>(count), 0.3, 0.02);
  for (int r = 0; r < kWorld; ++r) {
    for (size_t i = 0; i < count; ++i) ASSERT_NEAR(velocities[r][i], u[r][i], 1e-5) << i;
  }
}

// Dense tensors, and steps before compression, have the momentum of SGD.
TEST_P(Policies, UncompressedGradientsKeepTheirMomentum) {
  const StepResults plain = steps_of(GetParam(), "fp32", 5);
  const StepResults late = steps_of(GetParam(), "topk:k=5,of=256,momentum=0.5,start=4", 5);
  const StepResults dense = steps_of(GetParam(), "topk:k=5,of=256,momentum=0.5,dense=bias", 5);
  std::vector<double> u(plain.results[0].size());
  for (size_t s = 0; s < 5; ++s) {
    for (size_t i = 0; i < u.size(); ++i) {
      u[i] = 0.5 * u[i] + plain.results[s][i];
      if (s < 4) {
        ASSERT_NEAR(late.results[s][i], u[i], 1e-5) << s << " " << i;
      }
      if (i < 37) {  // the tensor `bias`
        ASSERT_NEAR(dense.results[s][i], u[i], 1e-5) << s << " " << i;
      }
    }
  }
}

// Returns gradients whose tensors are clipped to `limit` by the reference.
std::vector<std::vector<float>> clipped(std::vector<std::vector<float>> gradients, float limit) {
  for (auto& g : gradients) {
    reference::clip_norm({.grad = g.data(), .max_norm = limit, .count = static_cast<int64_t>(g.size())});
  }
  return gradients;
}

// max_norm gives the bits of gradients that were clipped before they were reduced, so what it forgets is what
// clipping takes away, and everything else is conserved as without it.
TEST_P(Policies, MaxNormClipsEachTensorBeforeAllElse) {
  constexpr int kSteps = 3;
  constexpr double kMaxNorm = 20;
  const std::vector<std::string> specs{"topk:k=41,of=256",
                                       "topk:k=5,of=256,momentum=0.9,start=1",
                                       "int8:ef=ef21",
                                       "sign:ef_decay=0.9,dense=off",
                                       "powersgd:rank=2,start=1",
                                       "randk:ratio=0.1,ef=off"};
  for (const std::string& spec : thinned(specs)) {
    for (const std::string& schedule : schedule_names()) {
      for (int world : {2, 4, 5}) {
        SCOPED_TRACE(fmt::format("{},schedule={}, {} ranks", spec, schedule, world));
        const auto limit = static_cast<float>(kMaxNorm / std::sqrt(world));
        run_ranks(world, GetParam(), [&](Communicator& comm) {
          comm.set_ranks_per_node(ranks_per_node(world));
          const std::string all = spec + ",schedule=" + schedule;
          Rank plain(comm, all, model(), 16 << 10);
          Rank clips(comm, all + fmt::format(",max_norm={}", kMaxNorm), model(), 16 << 10);
          int changed = 0, tensors = 0;
          for (int s = 0; s < kSteps; ++s) {
            const auto gradients =
                gradients_for(plain.tensors, static_cast<uint32_t>(s * world + comm.rank() + 1));
            const auto less = clipped(gradients, limit);
            for (size_t t = 0; t < less.size(); ++t) changed += less[t] != gradients[t], ++tensors;
            EXPECT_TRUE(same_bits(clips.step(gradients), plain.step(less))) << "step " << s;
          }
          EXPECT_GT(changed, 0);
          EXPECT_LT(changed, tensors) << "tensors below the norm must stay";
          EXPECT_TRUE(same_bits(clips.residual(), plain.residual()));
        });
      }
    }
  }
}

TEST(Policy, ShardedReducersRefuseWhatNeedsTheWholeMean) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    for (const char* spec : {"int8:ef=ef21", "topk:momentum=0.9"}) {
      expect_error<BadInput>([&] { Rank rank(comm, spec, model(), ReducerOptions{.sharded = true}); },
                             {spec, "needs the whole mean"});
    }
    constexpr const char* kSpec = "int8:start=1,ef_decay=0.9";
    Rank rank(comm, kSpec, model(), ReducerOptions{.sharded = true});
    Rank clips(comm, kSpec + std::string(",max_norm=5"), model(), ReducerOptions{.sharded = true});
    for (const uint32_t seed : {1, 2}) {
      const auto gradients = gradients_for(rank.tensors, seed);
      EXPECT_TRUE(same_bits(clips.step(gradients), rank.step(clipped(gradients, 5 / std::sqrt(2.0f)))));
    }
  });
}

}  // namespace
}  // namespace gradwire::testing
