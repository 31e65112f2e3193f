// What every compression spec must do: lose nothing over many steps, keep ranks
// bit-identical, and contain hard gradients.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "collectives/codec/examples.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/devices.h"

namespace gradwire {
namespace {

using testing::count_of;
using testing::flat;
using testing::gradients_for;
using testing::model;
using testing::norm;
using testing::Rank;
using testing::run_ranks;
using testing::same_bits;
using testing::values_of;

// Every example spec with every schedule.
std::vector<std::string> every_spec() {
  std::vector<std::string> specs = {"bf16:schedule=hierarchical,intra_node=fp32",
                                    "powersgd:rank=2,wire=bf16,schedule=hierarchical,intra_node=fp32"};
  for (std::string spec : example_specs()) {
    spec += spec.find(':') == std::string::npos ? ":" : ",";
    for (const char* schedule : {"ring", "tree", "two_shot", "hierarchical"}) {
      specs.push_back(spec + "schedule=" + schedule);
    }
  }
  return specs;
}

// Nodes for hierarchical schedules: the fewest ranks above one that divide the world.
int ranks_per_node(int world) {
  for (int ranks = 2; ranks < world; ++ranks) {
    if (world % ranks == 0) return ranks;
  }
  return 1;
}

using SpecCase = std::tuple<Device, std::string>;
std::string case_name(const ::testing::TestParamInfo<SpecCase>& info) {
  auto [device, spec] = info.param;
  std::string text = device.name() + "_" + spec;
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

// How far residuals of this squared norm, over ranks and steps, may be from what they would be in FP32. Errors of
// single encodes are independent with mean 0, so their squares add up. Rounding at random doubles the square of
// a format's error; and a factor of 2 in the norm for residuals that are not Gaussian.
double kept_rounding(const std::string& spec, double squares) {
  return 2 * std::sqrt(2 * CompressionSpec::parse(spec).residual->gaussian_error * squares);
}

class EverySpec : public ::testing::TestWithParam<SpecCase> {};

// Conservation: what went in over all ranks and steps is what was applied plus what the residuals hold, to FP32
// rounding; with residual=bf16|int8, plus what rounding it at random took and gave in each step. Also checks that
// all ranks hold the same bits after every step.
void expect_conservation(Device device, const std::string& spec, int world, int steps) {
  std::vector<std::vector<double>> input(world), applied(world);
  std::vector<std::vector<float>> last(world), residual(world), first_result(world), first_residual(world);
  // Squared norms of the residuals, of the first step and of all.
  std::vector<double> first_kept(world), kept(world);
  const bool rounded = !CompressionSpec::parse(spec).residual->exact;
  run_ranks(world, device, [&](Communicator& comm) {
    int r = comm.rank();
    comm.set_ranks_per_node(ranks_per_node(world));
    Rank rank(comm, spec, model(), 16 << 10);
    EXPECT_GE(rank.reducer.buckets(), world > 1 ? 2 : 0);
    input[r].assign(static_cast<size_t>(rank.reducer.elements()), 0.0);
    applied[r] = input[r];
    for (int s = 0; s < steps; ++s) {
      auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * world + r + 1));
      auto in = flat(rank, gradients);
      last[r] = rank.step(gradients);
      for (size_t i = 0; i < in.size(); ++i) input[r][i] += in[i], applied[r][i] += last[r][i];
      if (s == 0 || rounded) {
        const auto now = rank.residual();
        for (float v : now) kept[r] += double{v} * double{v};
        if (s > 0) continue;
        first_result[r] = last[r];
        first_residual[r] = now;
        first_kept[r] = kept[r];
      }
    }
    residual[r] = rank.residual();
  });
  auto expect_balance = [&](const auto& result, const auto& kept, const std::vector<std::vector<double>>& in,
                            const std::vector<double>& squares, double to_fp32_rounding) {
    std::vector<double> difference(result.size()), size(result.size());
    for (size_t i = 0; i < result.size(); ++i) {
      difference[i] = double{result[i]} * world;
      for (int r = 0; r < world; ++r) {
        difference[i] += kept[r][i] - in[r][i];
        size[i] += std::abs(in[r][i]);
      }
    }
    EXPECT_LE(norm(difference),
              to_fp32_rounding * norm(size) +
                  kept_rounding(spec, std::accumulate(squares.begin(), squares.end(), 0.0)));
  };
  std::vector<std::vector<double>> first_input;
  for (int r = 0; r < world; ++r) {
    // The gaps between tensors are zero in the input, so they must be in the result.
    auto gradients = gradients_for(model(), static_cast<uint32_t>(r + 1));
    std::vector<double> in;
    for (size_t i = 0; i < gradients.size(); ++i) {
      in.insert(in.end(), gradients[i].begin(), gradients[i].end());
      while (in.size() % 4 != 0) in.push_back(0);
    }
    first_input.push_back(in);
    EXPECT_TRUE(same_bits(last[r], last[0])) << "rank " << r << " differs from rank 0";
  }
  expect_balance(first_result[0], first_residual, first_input, first_kept, 1e-6);
  expect_balance(applied[0], residual, input, kept, 1e-5);
}

TEST_P(EverySpec, LosesNothingAndKeepsRanksIdentical) {
  auto [device, spec] = GetParam();
#ifdef GRADWIRE_SANITIZED
  constexpr int kSteps = 3;  // the sanitizers look at memory and order, not at drift
  const std::initializer_list<int> worlds = {1, 2, 3, 5, 8};
#else
  constexpr int kSteps = 100;
  const std::initializer_list<int> worlds = {1, 2, 3, 4, 5, 6, 7, 8, 16};
#endif
  for (int world : worlds) {
    SCOPED_TRACE(fmt::format("world of {}", world));
    // Errors grow with steps and ranks, so the ends of both bound what is between them. Long runs of many ranks
    // take minutes on two cores; only the schedules with the most steps get them.
    const bool branches = spec.find("tree") != spec.npos || spec.find("hierarchical") != spec.npos;
    const bool longest = world <= 3 || (world == 8 && !branches);
    expect_conservation(device, spec, world, longest ? kSteps : std::min(kSteps, 10));
  }
}

INSTANTIATE_TEST_SUITE_P(Over, EverySpec,
                         ::testing::Combine(::testing::ValuesIn(available_devices()),
                                            ::testing::ValuesIn(every_spec())),
                         case_name);

class HardGradients : public ::testing::TestWithParam<Device> {};

// Rank 1 and 2: where torch's hook turns a zero gradient into NaN forever.
TEST_P(HardGradients, AZeroFirstGradientIsNeitherNanNorStuckAtZero) {
  for (const char* spec : {"powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=4",
                           "powersgd:rank=4,wire=bf16", "powersgd:rank=2,residual=int8", "bf16", "fp8"}) {
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      auto zeros = gradients_for(rank.tensors, 1);
      for (auto& g : zeros) std::fill(g.begin(), g.end(), 0.0f);
      for (int s = 0; s < 3; ++s) {
        for (float v : rank.step(zeros)) ASSERT_EQ(v, 0.0f) << spec;
      }
      // Now the same gradient every step: error feedback must eventually apply all of it.
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
      for (int t : {1, 2, 6, 8}) {  // each compressed matrix moved, not just the vectors
        double moved = 0;
        for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i)
          moved += std::abs(applied[rank.reducer.offset(t) + i]);
        EXPECT_GT(moved, 0.0) << spec << " " << rank.tensors[t].name;
      }
    });
  }
}

TEST_P(HardGradients, AFrozenLayerStaysZeroAndLeavesOthersAlone) {
  for (const char* spec : {"powersgd:rank=2", "powersgd:rank=4,wire=bf16", "bf16", "fp8"}) {
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

// A NaN on one rank reaches that tensor's result on every rank and
// nothing else, and is gone in the next step.
TEST_P(HardGradients, ANanIsSeenOnceAndContained) {
  for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const char* spec :
         {"fp32", "bf16", "bf16:schedule=ring", "fp8", "fp8:schedule=ring", "int8:residual=int8",
          "bf16:residual=int8", "int8:dense=auto", "powersgd:rank=4,wire=fp8",
          "powersgd:rank=2,residual=bf16", "powersgd:rank=1", "powersgd:rank=4", "powersgd:rank=4,wire=bf16",
          "powersgd:rank=4,schedule=ring"}) {
      for (int victim : {0, 1, 2, 6}) {
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

TEST_P(HardGradients, HugeGradientsSurviveTheWire) {
  for (const char* spec : {"bf16", "bf16:schedule=ring", "fp8"}) {
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
}  // namespace gradwire
