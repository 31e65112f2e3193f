// Properties of the codecs whose payload is summed directly: randk, and powersgd with alternate=on.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/randk/randk.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"

namespace gradwire::testing {
namespace {

class Summable : public ::testing::TestWithParam<Device> {};

TEST_P(Summable, RandkAppliesTheMeanToItsShareOfEachTensorOnly) {
  constexpr int kWorld = 3;
  run_ranks(kWorld, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "randk:ratio=0.1,ef=off", model(), 16 << 10);
    for (uint32_t s = 0; s < 3; ++s) {
      std::vector<double> mean(rank.reducer.elements());
      for (uint32_t r = 0; r < kWorld; ++r) {
        const auto part = flat(rank, gradients_for(rank.tensors, s * kWorld + r + 1));
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += double{part[i]} / kWorld;
      }
      const auto result =
          rank.step(gradients_for(rank.tensors, s * kWorld + static_cast<uint32_t>(comm.rank()) + 1));
      for (size_t t = 0; t < rank.tensors.size(); ++t) {
        int64_t applied = 0;
        for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i) {
          const auto at = static_cast<size_t>(rank.reducer.offset(static_cast<int>(t)) + i);
          if (result[at] == 0.0f) continue;
          ++applied;
          ASSERT_NEAR(result[at], mean[at], 1e-6) << rank.tensors[t].name << " " << i;
        }
        EXPECT_EQ(applied, randk_count(count_of(rank.tensors[t]), 0.1)) << rank.tensors[t].name;
      }
    }
  });
}

// Checks the squared norm without rescaling: the expected squared error is 1 - k/n, and the result has k/n of
// the squared norm.
TEST_P(Summable, RandkWithoutErrorFeedbackKeepsItsShareOfTheSquaredNorm) {
  run_ranks(2, GetParam(), [&](Communicator& comm) {
    for (double ratio : {0.02, 0.2}) {
      Rank rank(comm, fmt::format("randk:ratio={},ef=off", ratio), {{"weight", {200, 300}}}, 1 << 20);
      const auto gradients = gradients_for(rank.tensors, 3);  // both ranks have the same gradients
      const auto in = flat(rank, gradients);
      const double size = norm(std::vector<double>(in.begin(), in.end())), norm2 = size * size;
      constexpr int kSteps = 40;
      double error2 = 0;
      for (int s = 0; s < kSteps; ++s) {
        const auto result = rank.step(gradients);
        for (size_t i = 0; i < in.size(); ++i) {
          const double e = double{in[i]} - result[i];
          error2 += e * e / norm2 / kSteps;
        }
      }
      EXPECT_NEAR((1 - error2) / ratio, 1.0, 0.02) << ratio;
    }
  });
}

TEST_P(Summable, RandkWithRatioOneIsThePlainMean) {
  run_ranks(3, GetParam(), [&](Communicator& comm) {
    Rank all(comm, "randk:ratio=1,schedule=two_shot", model(), 16 << 10);
    const auto gradients = gradients_for(all.tensors, static_cast<uint32_t>(comm.rank() + 1));
    std::vector<std::vector<float>> results;
    for (int s = 0; s < 2; ++s) results.push_back(all.step(gradients));
    comm.barrier();
    Rank plain(comm, "fp32:schedule=two_shot", model(), 16 << 10);
    const auto want = plain.step(gradients);
    for (const auto& result : results) EXPECT_TRUE(same_bits(result, want));
    for (float e : all.residual()) ASSERT_EQ(e, 0.0f);
  });
}

TEST_P(Summable, RandkSendsItsShareOfTheBytes) {
  const std::vector<GradientTensor> tensors{{"weight", {256, 250}}, {"other", {16000}}};
  run_ranks(4, GetParam(), [&](Communicator& comm) {
    for (auto [spec, bytes] :
         {std::pair{"randk:ratio=0.01", 4u}, std::pair{"randk:ratio=0.01,wire=bf16", 2u}}) {
      Rank rank(comm, spec, tensors, 1 << 20, 0);
      rank.step(gradients_for(tensors, 1));
      const uint64_t values = 640 + 160;
      EXPECT_EQ(rank.reducer.stats(0).wire_bytes, 2u * 3 * values / 4 * bytes) << spec;
      comm.barrier();
    }
  });
}

// Expects two steps to send the factors that powersgd without alternate=on sends in one step.
TEST_P(Summable, AlternatingSendsOneFactorInEachStep) {
  const std::vector<GradientTensor> tensors{{"weight", {256, 128}}};
  run_ranks(4, GetParam(), [&](Communicator& comm) {
    auto sent = [&](const char* spec) {
      Rank rank(comm, spec, tensors, 1 << 20, 0);
      for (uint32_t s = 0; s < 2; ++s) rank.step(gradients_for(tensors, s));
      comm.barrier();
      return std::pair{rank.reducer.stats(0).wire_bytes, rank.reducer.stats(1).wire_bytes};
    };
    const auto both = sent("powersgd:rank=4"), turns = sent("powersgd:rank=4,alternate=on");
    EXPECT_EQ(turns.first, 2u * 3 * (256 * 4) / 4 * 4);
    EXPECT_EQ(turns.second, 2u * 3 * (128 * 4) / 4 * 4);
    EXPECT_EQ(turns.first + turns.second, both.first);
  });
}

TEST_P(Summable, AlternatingAppliesALowRankGradientInFullAfterTwoSteps) {
  run_ranks(2, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "powersgd:rank=3,alternate=on", {{"weight", {60, 40}}}, 1 << 20);
    const auto a = normal(60 * 2, 1), b = normal(40 * 2, 2);
    std::vector<std::vector<float>> gradient(1);  // a matrix of rank 2, the same on both ranks
    for (int i = 0; i < 60; ++i) {
      for (int j = 0; j < 40; ++j) gradient[0].push_back(a[2 * i] * b[2 * j] + a[2 * i + 1] * b[2 * j + 1]);
    }
    std::vector<double> applied(gradient[0].size()), difference(gradient[0].size());
    for (int s = 0; s < 2; ++s) {
      const auto result = rank.step(gradient);
      for (size_t i = 0; i < applied.size(); ++i) applied[i] += result[i];
    }
    for (size_t i = 0; i < applied.size(); ++i) difference[i] = applied[i] - 2.0 * gradient[0][i];
    const std::vector<double> in(gradient[0].begin(), gradient[0].end());
    EXPECT_LT(norm(difference) / norm(in), 1e-5);
  });
}

// Computes the paper's algorithm in double precision: orthogonalizes the last summed factor, projects with
// this factor, and stores the error of this rank's factor.
struct Paper {
  using Matrix = std::vector<std::vector<double>>;  // [column][row]
  int rows, cols, rank;
  Matrix basis;                            // basis of Q before even steps, basis of P before odd steps
  std::vector<std::vector<double>> error;  // [rank], row-major

  static void orthonormalize(Matrix& columns) {
    for (size_t k = 0; k < columns.size(); ++k) {
      for (size_t l = 0; l < k; ++l) {
        double along = 0;
        for (size_t i = 0; i < columns[k].size(); ++i) along += columns[k][i] * columns[l][i];
        for (size_t i = 0; i < columns[k].size(); ++i) columns[k][i] -= along * columns[l][i];
      }
      const double size = norm(columns[k]);
      for (double& x : columns[k]) x /= size;
    }
  }

  std::vector<double> step(int s, const std::vector<std::vector<float>>& gradients) {
    const bool p = s % 2 == 0;
    const int lines = p ? rows : cols, other = p ? cols : rows;
    auto at = [&](int line, int o) { return static_cast<size_t>(p ? line * cols + o : o * cols + line); };
    auto outer = [&](const Matrix& factor, int line, int o) {
      double sum = 0;
      for (int k = 0; k < rank; ++k) sum += factor[k][line] * basis[k][o];
      return sum;
    };
    Matrix mean(rank, std::vector<double>(lines));
    for (size_t r = 0; r < gradients.size(); ++r) {
      Matrix own(rank, std::vector<double>(lines));
      for (size_t i = 0; i < error[r].size(); ++i) error[r][i] += gradients[r][i];
      for (int line = 0; line < lines; ++line) {
        for (int k = 0; k < rank; ++k) {
          for (int o = 0; o < other; ++o) own[k][line] += error[r][at(line, o)] * basis[k][o];
          mean[k][line] += own[k][line] / static_cast<double>(gradients.size());
        }
      }
      for (int line = 0; line < lines; ++line) {
        for (int o = 0; o < other; ++o) error[r][at(line, o)] -= outer(own, line, o);
      }
    }
    std::vector<double> applied(static_cast<size_t>(rows) * static_cast<size_t>(cols));
    for (int line = 0; line < lines; ++line) {
      for (int o = 0; o < other; ++o) applied[at(line, o)] = outer(mean, line, o);
    }
    basis = mean;
    orthonormalize(basis);
    return applied;
  }
};

TEST_P(Summable, AlternatingMatchesThePapersAlgorithm) {
  constexpr int kWorld = 3, kRows = 24, kCols = 17, kRank = 3, kSteps = 7;
  std::vector<std::vector<float>> results(kSteps);
  Paper paper{kRows, kCols, kRank, {}, std::vector<std::vector<double>>(kWorld)};
  for (auto& e : paper.error) e.assign(kRows * kCols, 0.0);
  const std::vector<GradientTensor> tensors{{"weight", {kRows, kCols}}};
  auto gradient = [&](int step, int rank) {
    return gradients_for(tensors, static_cast<uint32_t>(step * kWorld + rank + 1));
  };
  run_ranks(kWorld, GetParam(), [&](Communicator& comm) {
    Rank rank(comm, "powersgd:rank=3,min_ratio=0.1,alternate=on", tensors, 1 << 20);
    if (comm.rank() == 0) {
      for (const TensorState& state : rank.reducer.tensor_state()) {
        if (state.kind != "factor") continue;
        const auto q = to_host(rank.stream, static_cast<const float*>(state.data), state.count());
        paper.basis.assign(kRank, std::vector<double>(kCols));
        for (int j = 0; j < kCols; ++j) {
          for (int k = 0; k < kRank; ++k) paper.basis[k][j] = q[j * kRank + k];
        }
      }
    }
    for (int s = 0; s < kSteps; ++s) {
      auto result = rank.step(gradient(s, comm.rank()));
      result.resize(kRows * kCols);
      if (comm.rank() == 0) results[s] = result;
    }
  });
  ASSERT_EQ(paper.basis.size(), size_t{kRank});
  for (int s = 0; s < kSteps; ++s) {
    std::vector<std::vector<float>> gradients;
    for (int r = 0; r < kWorld; ++r) gradients.push_back(gradient(s, r)[0]);
    const std::vector<double> want = paper.step(s, gradients);
    std::vector<double> difference(want.size());
    for (size_t i = 0; i < want.size(); ++i) difference[i] = results[s][i] - want[i];
    EXPECT_LT(norm(difference) / norm(want), 2e-5) << "step " << s;
  }
}

GW_INSTANTIATE_ON_DEVICES(Summable);

}  // namespace
}  // namespace gradwire::testing
