// Checks on all ranks of a group that error feedback conserves gradients.
#pragma once

#include <cmath>
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

// One rank's inputs and results, and what ef_decay forgot, summed over steps; its residual before and after
// these steps.
struct Account {
  std::vector<double> input, applied, forgotten;
  std::vector<float> before, residual;
  double squares = 0;  // the residuals' squared norms, summed over the steps that rounded a residual
};

struct RankRun {
  Account first_step, last_step, all_steps;
  std::vector<float> last_result;
  double squares_halfway = 0;  // the residual's squared norm halfway
};

// Returns what a compressed step forgets of a residual.
inline std::vector<double> forgotten_of(const std::vector<float>& residual, const ResidualPolicy& policy) {
  const double share = 1 - double{static_cast<float>(policy.decay)};
  std::vector<double> forgotten(residual.begin(), residual.end());
  for (double& x : forgotten) x *= share;
  return forgotten;
}

inline void add_to(std::vector<double>& sum, const auto& values) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
}

inline RankRun run_rank(Communicator& comm, const std::string& spec, int steps) {
  const CompressionSpec parsed = CompressionSpec::parse(spec);
  const bool rounded = !parsed.residual->exact;
  comm.set_ranks_per_node(ranks_per_node(comm.world()));
  Rank rank(comm, spec, model(), 16 << 10);
  EXPECT_GE(rank.reducer.buckets(), comm.world() > 1 ? 2 : 0);
  RankRun run;
  Account& sums = run.all_steps;
  sums.input.resize(static_cast<size_t>(rank.reducer.elements()));
  sums.forgotten = sums.applied = sums.input;
  sums.before.resize(sums.input.size());
  for (int s = 0; s < steps; ++s) {
    const auto gradients =
        gradients_for(rank.tensors, static_cast<uint32_t>(s * comm.world() + comm.rank() + 1));
    const auto in = flat(rank, gradients);
    const bool counts = parsed.policy.decay != 1 || s == steps - 1;
    const std::vector<float> before = counts ? rank.residual() : sums.before;
    const std::vector<double> forgotten =
        forgotten_of(s < parsed.policy.start ? sums.before : before, parsed.policy);
    run.last_result = rank.step(gradients);
    add_to(sums.input, in);
    add_to(sums.applied, run.last_result);
    add_to(sums.forgotten, forgotten);
    if (s == steps / 2) run.squares_halfway = squared_norm(rank.residual());
    if (s == 0 || rounded) sums.squares += squared_norm(rank.residual());
    if (s == 0) {
      run.first_step = sums;
      run.first_step.residual = rank.residual();
    }
    if (s < steps - 1) continue;
    sums.residual = rank.residual();
    run.last_step = {.input = {in.begin(), in.end()},
                     .applied = {run.last_result.begin(), run.last_result.end()},
                     .forgotten = forgotten,
                     .before = before,
                     .residual = sums.residual,
                     .squares = squared_norm(sums.residual)};
  }
  return run;
}

// Expects that the applied results, times the number of ranks, plus the new residuals and what was forgotten
// equal all inputs plus the old residuals.
inline void expect_balance(const std::string& spec, const std::vector<RankRun>& ranks,
                           Account RankRun::*steps, double to_fp32_rounding) {
  std::vector<double> difference((ranks[0].*steps).applied), size(difference.size());
  for (double& d : difference) d *= static_cast<double>(ranks.size());
  double squares = 0;
  for (const RankRun& rank : ranks) {
    const Account& account = rank.*steps;
    squares += account.squares;
    for (size_t i = 0; i < size.size(); ++i) {
      const double in = account.input[i] + account.before[i];
      difference[i] += account.residual[i] + account.forgotten[i] - in;
      size[i] += std::abs(account.input[i]) + std::abs(account.before[i]);
    }
  }
  EXPECT_LE(norm(difference), to_fp32_rounding * norm(size) + kept_rounding(spec, squares));
}

// Checks conservation: the sum of all inputs, over ranks and steps, equals the sum of the applied results
// plus the residuals and what ef_decay forgot. The tolerance is FP32 rounding and, with residual=bf16|int8,
// the error of stochastic rounding in each step. Also checks that all ranks have the same bits after every
// step, and that residuals do not grow in long runs.
inline void expect_conservation(Device device, const std::string& spec, int world, int steps) {
  std::vector<RankRun> ranks(world);
  run_ranks(world, device, [&](Communicator& comm) { ranks[comm.rank()] = run_rank(comm, spec, steps); });
  for (int r = 0; r < world; ++r) {
    EXPECT_TRUE(same_bits(ranks[r].last_result, ranks[0].last_result))
        << "rank " << r << " differs from rank 0";
  }
  if (steps >= 100) {
    EXPECT_LE(squared_norm(ranks[0].all_steps.residual), 6 * ranks[0].squares_halfway)
        << "the residual grows";
  }
  expect_balance(spec, ranks, &RankRun::first_step, 1e-6);
  expect_balance(spec, ranks, &RankRun::last_step, 1e-6);
  expect_balance(spec, ranks, &RankRun::all_steps, 1e-5);
}

}  // namespace gradwire::testing
