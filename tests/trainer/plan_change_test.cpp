// A change of plan during a run with --compression auto: nothing of the residuals is lost, and all ranks
// change at the same step.
#include "trainer/train/plan_change.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <tuple>
#include <utility>

#include "collectives/communicator/communicator.h"
#include "tests/support/expect.h"
#include "tests/trainer/runs.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {
namespace {

using namespace testing;

// A rank of a run without a model: weights, one moment and a reducer.
struct Rank {
  Rank(Communicator& comm, const std::vector<VitParameter>& all, const std::string& text,
       int64_t bucket_bytes)
      : comm(comm),
        stream(Stream::create(comm.device(), "test")),
        spec(CompressionSpec::parse(text)),
        parameters(all),
        reducer(comm, spec, tensors(all), {.bucket_bytes = bucket_bytes}),
        layout(reducer_layout(reducer)),
        weights(make_buffer<float>(comm.device(), layout.elements)),
        moment(make_buffer<float>(comm.device(), layout.elements)) {}

  static std::vector<GradientTensor> tensors(const std::vector<VitParameter>& parameters) {
    std::vector<GradientTensor> out;
    for (const VitParameter& p : parameters) out.push_back({p.name, p.shape});
    return out;
  }
  RankState state() {
    return {.comm = comm,
            .stream = stream,
            .reducer = reducer,
            .parameters = parameters,
            .layout = layout,
            .weights = {weights.as<float>()},
            .moments = {{"m", {moment.as<float>()}}},
            .parts = {{0, layout.elements}}};
  }
  // Visits the elements of all tensors, without the gaps of a layout.
  void each(const std::function<void(size_t number, size_t at)>& visit) const {
    size_t number = 0;
    for (size_t t = 0; t < parameters.size(); ++t) {
      for (int64_t i = 0; i < parameters[t].elements(); ++i)
        visit(number++, static_cast<size_t>(layout.offsets[t] + i));
    }
  }

  Communicator& comm;
  Stream stream;
  CompressionSpec spec;
  const std::vector<VitParameter>& parameters;
  Reducer reducer;
  ParameterLayout layout;
  Buffer weights, moment;
};

// Sums over the ranks, by element: inputs, and what arrived, which is the results and the last residuals.
struct Account {
  std::vector<double> input, arrived;
};

// Does steps with pseudo-random gradients, which are added to what is in the gradient buffer if `carried`.
void add_steps(Rank& rank, int first, int last, bool carried, Account& sums) {
  float* const gradients = rank.reducer.gradients().as<float>();
  for (int step = first; step < last; ++step) {
    rank.each([&](size_t number, size_t at) {
      const double wave = std::sin(1.7 * static_cast<double>(number) + 0.9 * step + 2.3 * rank.comm.rank());
      const auto value = static_cast<float>(1e-3 * wave * (1 + static_cast<double>(number % 7)));
      sums.input[number] += value;
      gradients[at] = value + (carried ? gradients[at] : 0);
    });
    carried = false;
    for (int i = 0; i < rank.reducer.tensors(); ++i) rank.reducer.ready(i, rank.stream);
    rank.reducer.wait(rank.stream);
    rank.stream.synchronize();
    rank.each([&](size_t number, size_t at) { sums.arrived[number] += gradients[at]; });
  }
}

void add_residuals(Rank& rank, Account& sums) {
  std::vector<float> all(static_cast<size_t>(rank.layout.elements));
  for (const TensorState& state : rank.reducer.tensor_state()) {
    if (state.kind != kResidualKind) continue;
    const std::span<float> at(all.data() + rank.layout.offsets[static_cast<size_t>(state.tensor)],
                              static_cast<size_t>(state.count()));
    state.read(rank.stream, 0, std::as_writable_bytes(at));
    rank.stream.synchronize();
  }
  rank.each([&](size_t number, size_t at) { sums.arrived[number] += all[at]; });
}

using Change = std::tuple<int, const char*, const char*>;  // world, and two specs
class EveryChange : public ::testing::TestWithParam<Change> {};

TEST_P(EveryChange, LosesNothingOfTheResiduals) {
  const auto& [world, before, after] = GetParam();
  const std::vector<VitParameter> parameters = vit_parameters(small_model());
  const auto elements = static_cast<size_t>(count_elements(parameters));
  const auto group = Communicator::create_local(
      std::vector<Device>(static_cast<size_t>(world), Device::host()), std::chrono::seconds(60));
  std::vector<Account> accounts(static_cast<size_t>(world));
  run_local_ranks(group, [&, before = before, after = after](Communicator& comm) {
    Account& sums = accounts[static_cast<size_t>(comm.rank())];
    sums.input.resize(elements), sums.arrived.resize(elements);
    PlanChange plan_change;
    {
      Rank rank(comm, parameters, before, 4 << 10);
      rank.each([&](size_t number, size_t at) {
        rank.weights.as<float>()[at] = static_cast<float>(number);
        rank.moment.as<float>()[at] = -static_cast<float>(number);
      });
      add_steps(rank, 0, 3, false, sums);
      plan_change.position.step = 3;
      plan_change.spec = CompressionSpec::parse(before).to_string();
      plan_change.take(rank.state());
    }
    Rank rank(comm, parameters, after, 64 << 10);
    const bool carried = plan_change.restore(rank.state(), rank.spec);
    EXPECT_EQ(rank.reducer.steps(), 3);
    plan_change.free();
    EXPECT_EQ(plan_change.weights.capacity() + plan_change.moments.capacity(), 0u);
    EXPECT_EQ(plan_change.codecs.bytes(), 0);
    rank.each([&](size_t number, size_t at) {
      ASSERT_EQ(rank.weights.as<float>()[at], static_cast<float>(number));
      ASSERT_EQ(rank.moment.as<float>()[at], -static_cast<float>(number));
    });
    add_steps(rank, 3, 6, carried, sums);
    add_residuals(rank, sums);
  });
  double lost = 0, size = 0;
  for (size_t i = 0; i < elements; ++i) {
    double input = 0, arrived = 0;
    for (const Account& sums : accounts) input += sums.input[i], arrived += sums.arrived[i];
    lost += (arrived - input) * (arrived - input), size += input * input;
  }
  EXPECT_LT(std::sqrt(lost / size), 1e-6) << before << " to " << after << " with " << world << " ranks";
}

INSTANTIATE_TEST_SUITE_P(
    Over, EveryChange,
    ::testing::Combine(::testing::Values(2, 3, 4),
                       ::testing::Values("fp32", "int8", "int4:schedule=ring", "powersgd:rank=2",
                                         "topk:k=5,of=256", "bf16:schedule=tree"),
                       ::testing::Values("fp32:schedule=ring", "int8:schedule=two_shot", "int4",
                                         "powersgd:rank=2", "powersgd:rank=4,wire=int8", "fp8")));

// Records the changes of plan.
struct Plans : Recorder {
  void on_replan(const ReplanRecord& r) override { replans.push_back(r); }
  std::vector<ReplanRecord> replans;
};

// The error of the run's format exceeds the budget, which two measurements of the error show.
TEST(Replan, RanksLeaveAFormatThatExceedsTheError) {
  using Run = std::pair<int, const char*>;
  for (const auto& [ranks, spec] : {Run{2, "int8"}, Run{3, "int8"}, Run{4, "int8:schedule=hierarchical"}}) {
    TrainConfig config = run_config(small_model(), ranks, Device::host(), spec);
    if (ranks == 4) config.ranks_per_node = 2;
    config.batch_size = 4;
    config.steps = 460;
    config.eval_every = 0;
    const DataSplits data = make_synthetic(config.model, 64, 8, 1);
    const AutoCompression request = AutoCompression::parse("auto:error=0,allow=int8");
    const AutoPlan plan{.request = request, .choices = request.choices({25})};
    Plans seen;
    run_training(config, data, {{&seen}}, nullptr, &plan);
    ASSERT_GE(seen.replans.size(), 1u);
    const ReplanRecord& last = seen.replans.back();
    EXPECT_EQ(last.after, "--compression fp32 --bucket-mb 25");
    EXPECT_GT(last.predicted.parts.step_ms, 0);
    expect_has(last.choice, {R"("type":"choice")", R"("why":)"});
    EXPECT_EQ(static_cast<int64_t>(seen.steps.size()), config.steps);
    for (size_t i = 0; i < seen.steps.size(); ++i) ASSERT_EQ(seen.steps[i].step, static_cast<int64_t>(i));
    EXPECT_GT(seen.steps.back().wire_bytes, 2 * seen.steps.front().wire_bytes);
    EXPECT_EQ(seen.runs, 1);
    EXPECT_EQ(seen.ends, 1);
  }
}

}  // namespace
}  // namespace gradwire
