// Steps that use some of the tensors only (ReducerOptions::skip_unused).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/collectives/conservation.h"
#include "tests/collectives/example_specs.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"

namespace gradwire::testing {
namespace {

using SpecCase = std::tuple<Device, std::string>;
std::string case_name(const ::testing::TestParamInfo<SpecCase>& info) {
  std::string text = std::get<0>(info.param).name() + "_" + std::get<1>(info.param);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return text;
}

// Returns whether a rank uses a tensor in a step: all ranks, one, or none do. In the first step all do.
bool uses(int rank, int world, int step, size_t tensor) {
  const size_t turn = (static_cast<size_t>(step) + tensor) % 3;
  if (step == 0 || turn == 0) return true;
  return turn == 1 && rank == step % world;
}

bool used_by_any(int world, int step, size_t tensor) {
  for (int rank = 0; rank < world; ++rank) {
    if (uses(rank, world, step, tensor)) return true;
  }
  return false;
}

std::vector<std::vector<float>> states_of(const Rank& rank) {
  std::vector<std::vector<float>> all;
  for (const TensorState& state : rank.reducer.tensor_state()) all.push_back(values_of(rank.stream, state));
  return all;
}

// A tensor that no rank used keeps the bits of its state. With residual=int8, values that share a block with
// another tensor keep them to the block's unit, which is at most 1/127 of its largest value.
void expect_kept(const Rank& rank, int world, const std::string& spec, int step,
                 const std::vector<std::vector<float>>& before) {
  const auto after = states_of(rank);
  ASSERT_EQ(before.size(), after.size());
  float largest = 0;
  for (const auto* states : {&before, &after}) {
    for (const auto& state : *states) {
      for (float value : state) largest = std::max(largest, std::abs(value));
    }
  }
  const float unit = spec.find("residual=int8") == std::string::npos ? 0.0f : largest / 127;
  const std::vector<TensorState> states = rank.reducer.tensor_state();
  for (size_t k = 0; k < after.size(); ++k) {
    if (used_by_any(world, step, static_cast<size_t>(states[k].tensor))) continue;
    float most = 0;
    for (size_t i = 0; i < after[k].size(); ++i) most = std::max(most, std::abs(after[k][i] - before[k][i]));
    EXPECT_LE(most, unit) << "step " << step << ": the " << states[k].kind << " of "
                          << rank.tensors[static_cast<size_t>(states[k].tensor)].name << " has changed";
  }
}

// Runs a rank. In odd steps a tensor that this rank does not use is not marked ready, in even steps its
// gradient is zero.
void run_rank(Communicator& comm, const std::string& spec, int steps, RankRun& run) {
  comm.set_ranks_per_node(ranks_per_node(comm.world()));
  Rank rank(comm, spec, model(), {.bucket_bytes = 16 << 10, .seed = 5, .skip_unused = true});
  Account& sums = run.all_steps;
  sums.input.resize(static_cast<size_t>(rank.reducer.elements()));
  sums.forgotten = sums.applied = sums.input;
  sums.before.resize(sums.input.size());
  for (int s = 0; s < steps; ++s) {
    auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * comm.world() + comm.rank() + 1));
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!uses(comm.rank(), comm.world(), s, i)) std::ranges::fill(gradients[i], 0.0f);
    }
    add_to(sums.input, flat(rank, gradients));
    const auto before = states_of(rank);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const bool given = s % 2 == 0 || uses(comm.rank(), comm.world(), s, i);
      if (!given) std::ranges::fill(gradients[i], 7.0f);  // must not be read
      copy(rank.stream, rank.reducer.gradient(static_cast<int>(i)), gradients[i].data(),
           gradients[i].size() * sizeof(float));
      if (given) rank.reducer.ready(static_cast<int>(i), rank.stream);
    }
    rank.reducer.wait(rank.stream);
    run.last_result =
        to_host(rank.stream, rank.reducer.gradients().as<const float>(), rank.reducer.elements());
    add_to(sums.applied, run.last_result);
    expect_kept(rank, comm.world(), spec, s, before);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto begin = run.last_result.begin() + rank.reducer.offset(static_cast<int>(i));
      const bool zero = std::all_of(begin, begin + rank.tensors[i].count(), [](float v) { return v == 0; });
      EXPECT_TRUE(zero || used_by_any(comm.world(), s, i))
          << "step " << s << ": " << rank.tensors[i].name << " has a gradient";
    }
    sums.squares += squared_norm(rank.residual());
  }
  sums.residual = rank.residual();
}

class UnusedTensors : public ::testing::TestWithParam<SpecCase> {};

TEST_P(UnusedTensors, KeepTheirStateAndNothingIsLost) {
  const auto& [device, spec] = GetParam();
  const CompressionSpec parsed = CompressionSpec::parse(spec);
  const ResidualPolicy& policy = parsed.policy;
  // With other policies the results are not the gradients: momentum, estimates, a residual that is forgotten.
  const bool sums_up = policy.feedback == ResidualPolicy::Feedback::on && policy.decay == 1 &&
                       policy.momentum == 0 && parsed.method != CompressionSpec::Method::dion;
  // Pretended GPUs are slow.
  for (int world : device.is_host() ? std::vector<int>{2, 3, 4} : std::vector<int>{2}) {
    SCOPED_TRACE(fmt::format("world of {}", world));
    std::vector<RankRun> ranks(static_cast<size_t>(world));
    run_ranks(world, device,
              [&](Communicator& comm) { run_rank(comm, spec, 7, ranks[static_cast<size_t>(comm.rank())]); });
    for (const RankRun& rank : ranks) EXPECT_TRUE(same_bits(rank.last_result, ranks[0].last_result));
    if (sums_up) expect_balance(spec, ranks, &RankRun::all_steps, 1e-5);
  }
}

// The host and one GPU.
std::vector<Device> devices() {
  std::vector<Device> all = available_devices();
  all.resize(std::min<size_t>(all.size(), 2), Device::host());
  return all;
}

std::vector<std::string> specs() {
  std::vector<std::string> all = example_specs();
  for (const char* spec : {"int8:ef=ef21", "topk:ef=ef21", "topk:momentum=0.9", "powersgd:rank=2,ef=ef21",
                           "int8:residual=bf16", "dion:rank=4,mu=0.95"}) {
    all.push_back(spec);
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(On, UnusedTensors,
                         ::testing::Combine(::testing::ValuesIn(devices()), ::testing::ValuesIn(specs())),
                         case_name);

}  // namespace
}  // namespace gradwire::testing
