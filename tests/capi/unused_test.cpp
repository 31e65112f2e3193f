// Reducers with gw_reducer_options::skip_unused, whose steps need not use every tensor.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/capi/ranks.h"
#include "tests/capi/states.h"
#include "tests/support/expect.h"

namespace {

using capi::Model;
using capi::StepRecord;

// Step 0 uses all tensors, and step 1 none but the first two: one by rank 0, one by both ranks.
bool uses(int step, int rank, size_t tensor) {
  return step != 1 || tensor == 1 || (tensor == 0 && rank == 0);
}

TEST(CApi, TensorsThatAreNeverMarkedReadyKeepTheirResiduals) {
  constexpr int kWorld = 2;
  for (const char* spec : {"int4:dense=off", "powersgd:rank=1,dense=off", "topk:k=2,of=64,dense=off"}) {
    SCOPED_TRACE(spec);
    std::vector<StepRecord> records[3];
    for (auto& step : records) step.resize(kWorld);
    capi::run_ranks(kWorld, [&](gw_comm comm, int rank) {
      const Model model;
      std::vector<float> flat(model.elements());
      auto how = capi::options(16 << 10);
      how.skip_unused = 1;
      capi::Reducer reducer(nullptr);
      GW_ASSERT_OK(capi::create_reducer(comm, spec, model.tensors(flat.data()), &how, &reducer.handle));
      for (int s = 0; s < 3; ++s) {
        StepRecord& record = records[s][static_cast<size_t>(rank)];
        record.before = capi::residuals_of(reducer.save(), model);
        std::ranges::copy(capi::gradients_of(model, rank, s), flat.begin());
        record.gradient = flat;
        for (size_t i = 0, at = 0; i < model.names.size(); at += model.count(i++)) {
          if (uses(s, rank, i)) {
            GW_ASSERT_OK(gw_reducer_ready(reducer.handle, static_cast<int32_t>(i), nullptr));
          } else {
            std::fill_n(record.gradient.begin() + static_cast<long>(at), model.count(i), 0.0f);
          }
        }
        GW_ASSERT_OK(gw_reducer_wait(reducer.handle, nullptr, nullptr));
        record.mean = flat;
        record.after = capi::residuals_of(reducer.save(), model);
      }
    });
    const Model model;
    for (const auto& step : records) EXPECT_LE(capi::conservation_error(step), 1e-5);
    const size_t used = model.count(0) + model.count(1);
    for (const StepRecord& rank : records[1]) {
      for (size_t i = used; i < rank.mean.size(); ++i) {
        ASSERT_EQ(rank.mean[i], 0.0f);
        ASSERT_EQ(rank.before[i], rank.after[i]);
      }
      EXPECT_NE(rank.before, rank.after);
    }
  }
}

TEST(CApi, AStepWithoutGradientsIsRefused) {
  capi::run_ranks(2, [&](gw_comm comm, int) {
    auto how = capi::options();
    how.skip_unused = 1;
    capi::Reducer reducer(nullptr);
    GW_ASSERT_OK(capi::create_reducer(comm, "int8", Model().tensors(), &how, &reducer.handle));
    GW_EXPECT_BAD("set gw_tensor.grad", gw_reducer_wait(reducer.handle, nullptr, nullptr));
  });
}

TEST(CApi, RanksMustAgreeToSkipUnusedTensors) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    auto how = capi::options();
    how.skip_unused = rank;
    gw_reducer reducer = nullptr;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "skip_unused",
                    capi::create_reducer(comm, "int8", Model().tensors(), &how, &reducer));
  });
}

}  // namespace
