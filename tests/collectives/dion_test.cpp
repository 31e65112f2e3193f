// Properties of Dion's codec. tests/oracles/dion_oracle_test.py compares its steps with the paper's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"

namespace gradwire::testing {
namespace {

using Gradients = std::vector<std::vector<float>>;

class DionTest : public ::testing::TestWithParam<Device> {
 protected:
  // Runs `steps` steps of a world on `gradients(step, rank)`. Returns the last step and the sum of the
  // momenta.
  template <typename Of>
  std::pair<std::vector<float>, std::vector<double>> run(int world, const std::string& spec, int steps,
                                                         const Of& gradients) const {
    std::mutex mutex;
    std::vector<std::vector<float>> results;
    std::vector<double> momentum;
    run_ranks(world, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 16 << 10);
      std::vector<float> result;
      for (int s = 0; s < steps; ++s) result = rank.step(gradients(s, comm.rank()));
      const auto residual = rank.residual();
      std::lock_guard lock(mutex);
      results.push_back(result);
      momentum.resize(residual.size());
      for (size_t i = 0; i < residual.size(); ++i) momentum[i] += residual[i];
    });
    for (const auto& other : results) EXPECT_TRUE(same_bits(other, results[0])) << spec << ": ranks differ";
    return {results[0], momentum};
  }

  static Gradients gradients_of(int step, int rank) {
    return gradients_for(model(), static_cast<uint32_t>(100 * step + rank));
  }
};

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - b[i], 2);
    size += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / size);
}

TEST_P(DionTest, RanksAreBitIdenticalInEveryFormat) {
  for (const char* spec : {"dion:rank=4", "dion:rank=3,wire=int8", "dion:rank=2,mu=0.8,wire=int4",
                           "dion:rank=4,wire=bf16,round=stochastic", "dion:rank=4,wire=fp8,residual=bf16",
                           "dion:rank=4,orth=on,wire=int8"}) {
    for (int world : {1, 2, 3}) run(world, spec, 4, gradients_of);
  }
}

// The mean gradient alone determines the steps: one rank with the mean of the others' gradients takes the
// same.
TEST_P(DionTest, WorldsWithTheSameMeanGradientTakeTheSameSteps) {
  const auto mean_of = [](int step, int) {
    Gradients sum = gradients_of(step, 0);
    for (int r = 1; r < 4; ++r) {
      const Gradients other = gradients_of(step, r);
      for (size_t t = 0; t < sum.size(); ++t) {
        for (size_t i = 0; i < sum[t].size(); ++i) sum[t][i] += other[t][i];
      }
    }
    for (auto& tensor : sum) {
      for (float& x : tensor) x /= 4;
    }
    return sum;
  };
  const auto four = run(4, "dion:rank=3", 6, gradients_of), one = run(1, "dion:rank=3", 6, mean_of);
  EXPECT_LT(distance(four.first, one.first), 1e-4);
  for (size_t i = 0; i < one.second.size(); ++i) ASSERT_NEAR(four.second[i], one.second[i], 1e-4) << i;
}

// With mu=1 a step removes nothing from the momentum, whatever the format.
TEST_P(DionTest, MomentumIsTheSumOfTheMeanGradientsWithoutDecay) {
  constexpr int kWorld = 3, kSteps = 3;
  for (const char* spec : {"dion:rank=4,mu=1", "dion:rank=4,mu=1,wire=int8"}) {
    const auto got = run(kWorld, spec, kSteps, gradients_of).second;
    run_ranks(1, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 16 << 10);
      std::vector<double> want(got.size());
      for (int s = 0; s < kSteps; ++s) {
        for (int r = 0; r < kWorld; ++r) {
          const auto part = flat(rank, gradients_of(s, r));
          for (size_t i = 0; i < want.size(); ++i) want[i] += double{part[i]} / kWorld;
        }
      }
      for (size_t t = 0; t < rank.tensors.size(); ++t) {
        if (rank.tensors[t].shape.size() < 2) continue;
        for (int64_t i = 0; i < rank.tensors[t].count(); ++i) {
          const auto at = static_cast<size_t>(rank.reducer.offset(static_cast<int>(t)) + i);
          ASSERT_NEAR(got[at], want[at], 2e-5) << rank.tensors[t].name;
        }
      }
    });
  }
}

// With mu=0 a step removes all of the momentum in P's span, so that full rank leaves nothing, and the columns
// of the step have the norm that the shape gives them.
TEST_P(DionTest, FullRankWithoutMomentumLeavesNothing) {
  run_ranks(2, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "dion:rank=16,mu=0", {{"weight", {16, 40}}}, 1 << 20);
    const auto step = rank.step({gradients_for(rank.tensors, static_cast<uint32_t>(comm.rank()))[0]});
    double squares = 0;
    for (float x : step) squares += double{x} * x;
    EXPECT_NEAR(squares, 16 * 16.0 / 40,
                1e-4);  // 16 orthonormal columns times 16 unit columns, sqrt(16 / 40)
  });
}

// At full rank, as Muon's step. The columns of P and Q point alike: the step descends.
TEST_P(DionTest, OrthonormalFactorsGiveEqualSingularValues) {
  constexpr int kRows = 16, kCols = 40;
  run_ranks(2, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "dion:rank=16,mu=0,orth=on", {{"weight", {kRows, kCols}}}, 1 << 20);
    const auto gradient = gradients_for(rank.tensors, 1)[0];
    const auto step = rank.step({gradient});
    double along = 0;
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kRows; ++j) {
        double product = 0;
        for (int k = 0; k < kCols; ++k) product += double{step[i * kCols + k]} * step[j * kCols + k];
        EXPECT_NEAR(product, i == j ? 16.0 / 40 : 0, 1e-5);
      }
      for (int k = 0; k < kCols; ++k) along += double{step[i * kCols + k]} * gradient[i * kCols + k];
    }
    EXPECT_GT(along, 0);
  });
}

TEST_P(DionTest, NonFiniteGradientsReachTheStepButNotTheMomentum) {
  run_ranks(2, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "dion:rank=2", {{"a", {20, 30}}, {"b", {30, 20}}}, 1 << 20);
    auto gradients = gradients_for(rank.tensors, 1);
    rank.step(gradients);
    const auto before = rank.residual();
    if (comm.rank() == 1) gradients[0][7] = NAN;
    const auto step = rank.step(gradients);
    const auto after = rank.residual();
    EXPECT_TRUE(std::all_of(step.begin(), step.begin() + 600, [](float x) { return std::isnan(x); }));
    EXPECT_TRUE(std::all_of(step.begin() + 600, step.end(), [](float x) { return std::isfinite(x); }));
    for (size_t i = 0; i < 600; ++i) ASSERT_NEAR(after[i], before[i], 1e-6);
    EXPECT_FALSE(same_bits(after, before));
  });
}

TEST_P(DionTest, ZeroGradientsTakeNoStep) {
  const auto zero = [](int, int) {
    Gradients all = gradients_of(0, 0);
    for (auto& tensor : all) std::fill(tensor.begin(), tensor.end(), 0.0f);
    return all;
  };
  for (const char* spec : {"dion:rank=3", "dion:rank=3,orth=on"}) {
    for (float x : run(2, spec, 2, zero).first) ASSERT_EQ(x, 0.0f) << spec;
  }
}

// The sum of the momenta survives a change of the world, and so do the next steps.
TEST_P(DionTest, MomentumContinuesInAnotherWorld) {
  struct Saved {
    std::map<std::pair<int, std::string>, std::vector<float>> values;
  };
  const std::string spec = "dion:rank=3";
  const auto same = [](int step, int) { return gradients_of(step, 0); };  // on every rank
  std::vector<Saved> saved(4);
  run_ranks(4, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, spec, model(), 16 << 10);
    for (int s = 0; s < 3; ++s) rank.step(same(s, 0));
    for (const TensorState& state : rank.reducer.tensor_state()) {
      saved[static_cast<size_t>(comm.rank())].values[{state.tensor, state.kind}] =
          values_of(rank.stream, state);
    }
  });
  const auto want = run(4, spec, 5, same).first;
  for (int world : {1, 2}) {
    run_ranks(world, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 16 << 10);
      for (const TensorState& state : rank.reducer.tensor_state()) {
        std::vector<float> sum = saved[0].values[{state.tensor, state.kind}];
        if (state.kind == kResidualKind) {
          sum.clear();
          for (int from : merged_ranks(comm.rank(), world, 4)) {
            const auto& theirs = saved[static_cast<size_t>(from)].values[{state.tensor, state.kind}];
            add_residual(sum, theirs.data(), std::ssize(theirs));
          }
        }
        state.write(rank.stream, 0, std::as_bytes(std::span<const float>(sum)));
        rank.stream.synchronize();
      }
      rank.step(same(3, 0));
      EXPECT_LT(distance(rank.step(same(4, 0)), want), 1e-4) << world;
    });
  }
}

GW_INSTANTIATE_ON_DEVICES(DionTest);

}  // namespace
}  // namespace gradwire::testing
