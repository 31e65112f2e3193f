// Tests gw_reducer_state_load() and _load_ranks() into groups of other sizes, with ranks as threads.
// shrink_test.cpp and grow_test.cpp test them after gw_comm_shrink() and gw_comm_grow().
#include "tests/capi/states.h"

namespace {

using capi::Model;
using capi::run_ranks;
using capi::StepRecord;
using State = std::vector<char>;

constexpr const char* kSpecs[] = {"fp32",
                                  "bf16",
                                  "int8:dense=off",
                                  "int4:dense=off,schedule=ring",
                                  "int4:dense=off,schedule=two_shot",
                                  "fp8:dense=off",
                                  "topk:dense=off",
                                  "eden:dense=off",
                                  "powersgd:rank=2",
                                  "powersgd:rank=2,wire=int8",
                                  "powersgd:rank=2,alternate=on",
                                  "randk:ratio=0.1"};

std::vector<State> trained(const std::string& spec, int world) {
  std::vector<State> states(world);
  run_ranks(world, [&](gw_comm comm, int rank) {
    const Model model;
    const capi::Reducer reducer(comm, spec, model);
    for (int step = 0; step < 3; ++step) {
      auto gradient = capi::gradients_of(model, rank, step);
      GW_EXPECT_OK(reducer.step(gradient));
    }
    states[rank] = reducer.save();
  });
  return states;
}

void load(const capi::Reducer& reducer, const State& state) {
  GW_EXPECT_OK(reducer.load(state));
}
void load_as_new_rank(const capi::Reducer& reducer, const State& state) {
  const void* const states[] = {state.data()};
  const size_t sizes[] = {state.size()};
  GW_EXPECT_OK(gw_reducer_state_load_ranks(reducer.handle, states, sizes, 1));
}

TEST(CApiMovedState, SurvivorsAndNewRanksConserveResidualsForAnyNumbersOfRanks) {
  const Model model;
  int cases = 0;
  for (const std::string spec : kSpecs) {
    for (int before = 1; before <= 4; ++before) {
      const std::vector<State> states = trained(spec, before);
      for (int now = 1; now <= 4; ++now) {
        if (now == before) continue;
        ++cases;
        std::vector<StepRecord> records(now);
        run_ranks(now, [&](gw_comm comm, int rank) {
          const capi::Reducer reducer(comm, spec, model);
          // In a smaller group the last ranks survive, and each survivor's rank changes.
          const int mine = rank + std::max(0, before - now);
          if (mine < before) {
            const State& state = states[mine];
            load(reducer, state);
            EXPECT_EQ(capi::residuals_of(reducer.save(), model), capi::residuals_of(state, model));
          } else {
            load_as_new_rank(reducer, states[0]);
            EXPECT_EQ(capi::norm_of(capi::residuals_of(reducer.save(), model)), 0);
          }
          EXPECT_EQ(capi::stats_of(reducer.handle).steps, 3);
          records[rank] = capi::recorded_step(reducer, model, capi::gradients_of(model, rank, 3));
        });
        EXPECT_LT(capi::conservation_error(records), 1e-6) << spec << ": " << before << " ranks, now " << now;
        if (now == 1) {
          EXPECT_EQ(capi::norm_of(records[0].after), 0) << "added to the gradients";
        }
      }
    }
  }
  RecordProperty("cases", cases);
}

// Loads a state into a world of 1 and saves the state again before any step.
TEST(CApiMovedState, ARankAloneKeepsItsResidualUntilAStepSendsIt) {
  const Model model;
  const std::vector<State> states = trained("int8:dense=off", 3);
  const std::vector<double> residual = capi::residuals_of(states[2], model);
  State alone;
  run_ranks(1, [&](gw_comm comm, int) {
    const capi::Reducer first(comm, "int8:dense=off", model), second(comm, "int8:dense=off", model);
    load(first, states[2]);
    alone = first.save();
    load(second, alone);
    EXPECT_EQ(second.save(), alone);
    auto gradient = capi::gradients_of(model, 0, 3);
    const auto given = gradient, zeros = std::vector<float>(gradient.size());
    // Overlaps: marks each tensor as ready separately.
    auto all = model.tensors(gradient.data());
    auto how = capi::options();
    gw_reducer made = nullptr;
    GW_EXPECT_OK(capi::create_reducer(comm, "int8:dense=off", all, &how, &made));
    const capi::Reducer overlapped(made);
    load(overlapped, alone);
    for (int i = 0; i < static_cast<int>(all.size()); ++i) GW_EXPECT_OK(gw_reducer_ready(made, i, nullptr));
    GW_EXPECT_OK(gw_reducer_wait(made, nullptr, nullptr));
    for (size_t e = 0; e < gradient.size(); ++e) {
      EXPECT_EQ(gradient[e], given[e] + static_cast<float>(residual[e]));
    }
    gradient = given;
    GW_EXPECT_OK(gw_reducer_allreduce(made, nullptr, nullptr, nullptr));
    EXPECT_EQ(gradient, given) << "only once";
  });
  std::vector<StepRecord> records(2);
  run_ranks(2, [&](gw_comm comm, int rank) {
    const capi::Reducer reducer(comm, "int8:dense=off", model);
    rank == 0 ? load(reducer, alone) : load_as_new_rank(reducer, alone);
    records[rank] = capi::recorded_step(reducer, model, capi::gradients_of(model, rank, 3));
  });
  EXPECT_EQ(records[0].before, residual);
  EXPECT_LT(capi::conservation_error(records), 1e-6);
}

// Checks 16-bit gradients in a world of 1: the residual is added in FP32, and the sum is rounded.
TEST(CApiMovedState, ARankAloneAddsItsResidualToGradientsOf16Bits) {
  Model model;
  model.dtype = GW_BFLOAT16;
  std::vector<State> states(2);
  run_ranks(2, [&](gw_comm comm, int rank) {
    const capi::Reducer reducer(comm, "int4:dense=off", model);
    std::vector<uint16_t> ones(model.elements(), 0x3f80);
    ones[5] = 0x4049;  // 3.14; 1 is not a multiple of the block's step
    std::vector<void*> addresses;
    for (size_t i = 0, at = 0; i < model.names.size(); at += model.count(i++)) addresses.push_back(&ones[at]);
    GW_EXPECT_OK(gw_reducer_allreduce(reducer.handle, addresses.data(), nullptr, nullptr));
    states[rank] = reducer.save();
  });
  const std::vector<double> residual = capi::residuals_of(states[1], model);
  EXPECT_GT(capi::norm_of(residual), 0);
  run_ranks(1, [&](gw_comm comm, int) {
    const capi::Reducer reducer(comm, "int4:dense=off", model);
    load(reducer, states[1]);
    std::vector<uint16_t> values(model.elements(), 0);
    std::vector<void*> addresses;
    for (size_t i = 0, at = 0; i < model.names.size(); at += model.count(i++))
      addresses.push_back(&values[at]);
    GW_EXPECT_OK(gw_reducer_allreduce(reducer.handle, addresses.data(), nullptr, nullptr));
    for (size_t e = 0; e < values.size(); ++e) {
      const uint32_t bits = static_cast<uint32_t>(values[e]) << 16;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      EXPECT_NEAR(value, residual[e], std::abs(residual[e]) / 256);
    }
  });
}

TEST(CApiMovedState, RefusesAResidualThatTwoRanksHaveLoaded) {
  const Model model;
  const std::vector<State> states = trained("int8:dense=off", 3);
  run_ranks(2, [&](gw_comm comm, int) {
    const capi::Reducer reducer(comm, "int8:dense=off", model);
    load(reducer, states[2]);
    std::vector<float> gradient(model.elements(), 1.0f);
    GW_EXPECT_FAILS(GW_COMM_FAILED, "ranks 0 and 1 have both loaded the residual that rank 2 of 3 saved",
                    reducer.step(gradient));
  });
  // The load also fails if a rank has loaded the residual as part of a sum of residuals.
  run_ranks(2, [&](gw_comm comm, int rank) {
    const capi::Reducer reducer(comm, "int8:dense=off", model);
    if (rank == 0) {
      const void* all[] = {states[0].data(), states[1].data(), states[2].data()};
      const size_t sizes[] = {states[0].size(), states[1].size(), states[2].size()};
      GW_EXPECT_OK(gw_reducer_state_load_ranks(reducer.handle, all, sizes, 3));
    } else {
      load(reducer, states[2]);
    }
    std::vector<float> gradient(model.elements(), 1.0f);
    GW_EXPECT_FAILS(GW_COMM_FAILED, "rank 2 of 3", reducer.step(gradient));
  });
}

}  // namespace
