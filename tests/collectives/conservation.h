// Checks on all ranks of a group that error feedback conserves gradients.
#pragma once

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "tests/collectives/reducer_rank.h"

namespace gradwire::testing {

// Returns the number of ranks per node for hierarchical schedules: the smallest divisor of the world size
// above one.
inline int ranks_per_node(int world) {
  for (int ranks = 2; ranks < world; ++ranks) {
    if (world % ranks == 0) return ranks;
  }
  return 1;
}

// Returns the tolerance for rounded residuals relative to FP32 residuals. `squares` is the residuals' squared
// norm, summed over ranks and steps. Errors of single encodes are independent with mean 0, so their squares
// add up. Stochastic rounding doubles the square of a format's error. A factor of 2 in the norm allows for
// residuals that are not Gaussian.
inline double kept_rounding(const std::string& spec, double squares) {
  return 2 * std::sqrt(2 * CompressionSpec::parse(spec).residual->gaussian_error * squares);
}

inline double squared_norm(const std::vector<float>& x) {
  double sum = 0;
  for (float v : x) sum += double{v} * v;
  return sum;
}

// Checks conservation: the sum of all inputs, over ranks and steps, equals the sum of the applied results
// plus the residuals. The tolerance is FP32 rounding and, with residual=bf16|int8, the error of stochastic
// rounding in each step. Also checks that all ranks have the same bits after every step, and that residuals
// do not grow in long runs.
inline void expect_conservation(Device device, const std::string& spec, int world, int steps) {
  std::vector<std::vector<double>> input(world), applied(world);
  std::vector<std::vector<float>> last(world), residual(world), first_result(world), first_residual(world);
  // Squared norms of each rank's residual in the first step, and summed over all steps.
  std::vector<double> first_kept(world), kept(world);
  double kept_halfway = 0, kept_last = 0;  // squared norms of rank 0's residual
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
      if (r == 0 && s == steps / 2) kept_halfway = squared_norm(rank.residual());
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
    if (r == 0) kept_last = squared_norm(residual[r]);
  });
  if (steps >= 100) {
    EXPECT_LE(kept_last, 6 * kept_halfway) << "the residual grows";
  }
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
    // The gaps between tensors are zero in the input, so they must be zero in the result.
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

}  // namespace gradwire::testing
