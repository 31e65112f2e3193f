// Properties of every compression spec: no gradient is lost over many steps, ranks stay bit-identical, and
// non-finite or extreme gradients are contained.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/collectives/conservation.h"
#include "tests/collectives/example_specs.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

using SpecCase = std::tuple<Device, std::string>;
std::string case_name(const ::testing::TestParamInfo<SpecCase>& info) {
  auto [device, spec] = info.param;
  std::string text = device.name() + "_" + spec;
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

class EverySpec : public ::testing::TestWithParam<SpecCase> {};

// Returns worlds and their numbers of steps. The bound is relative to the sum of all inputs, so any number of
// steps reveals a loss in each step. Long runs find accumulating errors, which do not depend on the number of
// ranks. Twelve steps suffice for codecs that start late (start=5) or alternate. The cost of a ring's step is
// quadratic in the number of ranks. Each spec with a schedule gets every third world, in rotation: so each
// pair of a spec and a world, and of a schedule and a world, is tested. GRADWIRE_FULL_SWEEPS=1 tests all.
std::vector<std::pair<int, int>> worlds_and_steps(Device device, const std::string& spec) {
  std::vector<std::pair<int, int>> all = {{1, 12}, {2, 100}, {3, 12}, {4, 12}, {5, 4},
                                          {6, 4},  {7, 4},   {8, 4},  {16, 2}};
  if (full_sweeps()) {
    for (auto& [world, steps] : all) steps = world <= 3 ? 100 : world <= 8 ? 10 : 4;
    return all;
  }
  // The host shows the drift of long runs; GPUs add kernels, streams and copies, and simulated GPUs are slow.
  // Sanitizers check memory and ordering, not drift.
  if (device.is_cuda()) all = {{1, 4}, {2, 12}, {3, 6}, {4, 6}, {8, 2}};
  if (short_sweeps()) all = {{1, 3}, {2, 3}, {3, 3}, {5, 3}, {8, 3}};
  const auto specs = example_specs_with_schedules();
  const auto turn = static_cast<size_t>(std::ranges::find(specs, spec) - specs.begin());
  std::vector<std::pair<int, int>> some;
  for (size_t i = turn % 3; i < all.size(); i += 3) some.push_back(all[i]);
  return some;
}

TEST_P(EverySpec, LosesNothingAndKeepsRanksIdentical) {
  auto [device, spec] = GetParam();
  for (auto [world, steps] : worlds_and_steps(device, spec)) {
    SCOPED_TRACE(fmt::format("world of {}", world));
    expect_conservation(device, spec, world, steps);
  }
}

// Runs 100 steps of a spec and expects the residual to be bounded.
void expect_bounded_residual(int world, const std::string& spec) {
  double halfway = 0, last = 0;
  run_ranks(world, Device::host(), [&](Communicator& comm) {
    comm.set_ranks_per_node(ranks_per_node(world));
    Rank rank(comm, spec, {{"a", {128, 31}}, {"b", {64, 64}}}, 1 << 20);
    const bool observed = comm.rank() == world - 1;
    for (int s = 0; s < 100; ++s) {
      rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(s * world + comm.rank() + 1)));
      if (observed && s == 50) halfway = squared_norm(rank.residual());
    }
    if (observed) last = squared_norm(rank.residual());
  });
  EXPECT_GT(halfway, 0) << spec;
  EXPECT_LE(last, 4 * halfway) << spec;
}

// Returns every format that rounds, with each of its roundings, without error feedback.
std::vector<std::string> format_specs_without_error_feedback() {
  std::vector<std::string> all;
  for (Wire wire : example_wire_formats()) {
    if (wire->exact) continue;
    const std::string spec = wire->spec() + (*wire->options != 0 ? "," : ":") + "dense=off,ef=off";
    if (!wire->stochastic) all.push_back(spec);
    for (const char* rounding : {"nearest", "stochastic"}) {
      if (wire->stochastic) all.push_back(spec + ",round=" + rounding);
    }
  }
  return all;
}

TEST(ErrorFeedback, KeepsABoundedResidualForEveryAcceptedFormatInEverySchedule) {
  int refused = 0;
  for (const std::string& spec : thinned(format_specs_without_error_feedback(), 6)) {
    if (!CompressionSpec::parse(spec).divergence().empty()) {
      ++refused;
      continue;
    }
    for (const char* schedule : {"ring", "tree", "two_shot", "hierarchical"}) {
      std::string kept = spec + ",schedule=" + schedule;
      kept.replace(kept.find("ef=off"), 6, "ef=on");
      expect_bounded_residual(4, kept);
    }
  }
  if (!short_sweeps()) {
    EXPECT_EQ(refused, 2) << "terngrad at random with clip=2.5 and clip=off";
  }
}

// Tests formats with large encode errors, in the schedule and world that encode partial sums most often.
TEST(ErrorFeedback, KeepsABoundedResidualInARingOfEight) {
  for (const char* spec :
       thinned<const char*>({"terngrad:dense=off", "qsgd:bits=4,block=128", "sign:dense=off",
                             "int2:dense=off", "int4:block=512,scale=pow2,round=stochastic"})) {
    expect_bounded_residual(8, std::string(spec) + ",schedule=ring");
  }
}

INSTANTIATE_TEST_SUITE_P(Over, EverySpec,
                         ::testing::Combine(::testing::ValuesIn(available_devices()),
                                            ::testing::ValuesIn(example_specs_with_schedules())),
                         case_name);

class HardGradients : public ::testing::TestWithParam<Device> {};

// Tests PowerSGD's ranks 1 and 2 in particular, at which PyTorch's hook permanently turns a zero gradient
// into NaN.
TEST_P(HardGradients, ZeroFirstGradientsGiveNoNanAndRecover) {
  for (const char* spec :
       thinned({"powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=4", "powersgd:rank=4,wire=bf16",
                "powersgd:rank=2,residual=int8", "powersgd:rank=2,alternate=on",
                "powersgd:rank=4,wire=bf16,alternate=on", "randk:ratio=0.1", "bf16", "fp8"})) {
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      auto zeros = gradients_for(rank.tensors, 1);
      for (auto& g : zeros) std::fill(g.begin(), g.end(), 0.0f);
      for (int s = 0; s < 3; ++s) {
        for (float v : rank.step(zeros)) ASSERT_EQ(v, 0.0f) << spec;
      }
      // Repeats the same gradient. Error feedback must eventually apply the whole gradient.
      auto gradients = gradients_for(rank.tensors, 7);  // the same on every rank
      auto wanted = flat(rank, gradients);
      std::vector<double> applied(wanted.size(), 0.0), difference(wanted.size());
      constexpr int kSteps = 60;
      for (int s = 0; s < kSteps; ++s) {
        auto result = rank.step(gradients);
        for (size_t i = 0; i < result.size(); ++i) {
          ASSERT_TRUE(std::isfinite(result[i])) << spec;
          applied[i] += result[i];
        }
      }
      double size = norm(std::vector<double>(wanted.begin(), wanted.end()));
      for (size_t i = 0; i < wanted.size(); ++i) difference[i] = applied[i] / kSteps - wanted[i];
      EXPECT_LT(norm(difference) / size, 0.6) << spec;
      for (int t : {1, 2, 6, 8}) {  // every compressed matrix changed, not only the vectors
        double moved = 0;
        for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i)
          moved += std::abs(applied[rank.reducer.offset(t) + i]);
        EXPECT_GT(moved, 0.0) << spec << " " << rank.tensors[t].name;
      }
    });
  }
}

TEST_P(HardGradients, FrozenLayersStayZeroAndDoNotAffectOthers) {
  for (const char* spec : {"powersgd:rank=2", "powersgd:rank=4,wire=bf16", "powersgd:rank=2,alternate=on",
                           "randk:ratio=0.1", "bf16", "fp8"}) {
    run_ranks(2, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      for (int s = 0; s < 10; ++s) {
        auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 2 + comm.rank()));
        std::fill(gradients[2].begin(), gradients[2].end(), 0.0f);
        auto result = rank.step(gradients);
        for (float v : result) ASSERT_TRUE(std::isfinite(v));
        for (int64_t i = 0; i < count_of(rank.tensors[2]); ++i)
          ASSERT_EQ(result[rank.reducer.offset(2) + i], 0.0f);
      }
    });
  }
}

// Expects a NaN on one rank to reach only that tensor's result, on every rank, and to be gone in the next
// step.
TEST_P(HardGradients, ContainsANanForOneStep) {
  for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const char* spec : thinned<const char*>(
             {"fp32", "bf16", "bf16:schedule=ring", "fp8", "fp8:schedule=ring", "int8:residual=int8",
              "bf16:residual=int8", "int8:dense=auto", "powersgd:rank=4,wire=fp8",
              "powersgd:rank=2,residual=bf16", "powersgd:rank=1", "powersgd:rank=4",
              "powersgd:rank=4,wire=bf16", "powersgd:rank=4,schedule=ring", "powersgd:rank=4,alternate=on",
              "powersgd:rank=2,alternate=on,start=1", "powersgd:rank=4,alternate=on,wire=fp8",
              "randk:ratio=0.01", "randk:ratio=0.3,wire=fp8"})) {
      for (int victim : thinned({0, 1, 2, 6})) {
        run_ranks(3, GetParam(), [&](Communicator& comm) {
          Rank rank(comm, spec, model(), 1 << 20);
          for (int s = 0; s < 4; ++s) {
            auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 3 + comm.rank()));
            if (s == 1 && comm.rank() == 1) gradients[victim][5] = poison;
            auto result = rank.step(gradients);
            for (size_t t = 0; t < rank.tensors.size(); ++t) {
              bool finite = true;
              for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i) {
                finite &= std::isfinite(result[rank.reducer.offset(static_cast<int>(t)) + i]);
              }
              EXPECT_EQ(finite, !(s == 1 && static_cast<int>(t) == victim))
                  << spec << " tensor " << rank.tensors[t].name << " step " << s;
            }
            for (const TensorState& state : rank.reducer.tensor_state()) {
              for (float v : values_of(rank.stream, state)) {
                ASSERT_TRUE(std::isfinite(v)) << spec << " " << state.kind << " step " << s;
              }
            }
          }
        });
      }
    }
  }
}

// Tests zeros, denormals, values whose sum almost overflows, NaN and Inf, in tensors of one element and of
// odd sizes. Every spec continues with the same bits on all ranks, and its next result is finite.
TEST_P(HardGradients, EverySpecContinuesAfterHardGradients) {
  for (const std::string& spec : thinned(example_specs(), 16)) {
    SCOPED_TRACE(spec);
    std::vector<std::vector<float>> last(2);
    // PowerSGD's products with stored factors would overflow again in the next step.
    const float huge = spec.starts_with("powersgd") ? 1e36f : 1e38f;
    run_ranks(2, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      const std::vector<float> hard = {0.0f,
                                       1e-45f,
                                       huge,
                                       std::numeric_limits<float>::quiet_NaN(),
                                       -huge,
                                       1e-30f,
                                       -std::numeric_limits<float>::infinity()};
      for (size_t s = 0; s <= hard.size(); ++s) {
        auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 2) + comm.rank());
        for (size_t t = 0; t < gradients.size() && s < hard.size(); ++t) {
          if (s % 2 == 1 && t % 3 != 0) continue;
          std::fill(gradients[t].begin(), gradients[t].end(), hard[(s + t) % hard.size()]);
        }
        last[comm.rank()] = rank.step(gradients);
        for (const TensorState& state : rank.reducer.tensor_state()) {
          for (float v : values_of(rank.stream, state)) {
            ASSERT_TRUE(std::isfinite(v)) << state.kind << " after step " << s;
          }
        }
      }
    });
    EXPECT_TRUE(same_bits(last[1], last[0]));
    for (float v : last[0]) ASSERT_TRUE(std::isfinite(v));
  }
}

TEST_P(HardGradients, HugeGradientsStayFiniteOnTheWire) {
  for (const char* spec :
       {"bf16", "bf16:schedule=ring", "fp8", "randk:ratio=0.3", "randk:ratio=0.3,wire=bf16"}) {
    run_ranks(2, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, {{"huge", {100}}}, 1 << 20);
      std::vector<std::vector<float>> gradients{std::vector<float>(100, 3.4e38f)};
      if (comm.rank() == 1) gradients[0].assign(100, -1.7e38f);
      for (float v : rank.step(gradients)) ASSERT_TRUE(std::isfinite(v)) << spec;
    });
  }
}

GW_INSTANTIATE_ON_DEVICES(HardGradients);

}  // namespace
}  // namespace gradwire::testing
