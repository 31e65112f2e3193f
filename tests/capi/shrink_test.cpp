// Tests gw_comm_shrink() with ranks as threads that leave: the surviving ranks of a failed communicator
// continue. tests/processes/shrink_test.cpp kills and stops processes.
#include <algorithm>
#include <barrier>
#include <memory>

#include "tests/capi/states.h"
#include "tests/support/temporary_folder.h"

namespace {

gw_comm joined(const std::string& name, int rank, int world, bool shrinkable) {
  gw_comm comm = nullptr;
  auto options = capi::comm_options(name.c_str(), rank, world);
  options.shrinkable = shrinkable ? 1 : 0;
  GW_EXPECT_OK(gw_comm_create(&options, &comm));
  return comm;
}

void run(int world, const std::function<void(const std::string& name, int rank)>& body) {
  const gradwire::testing::TemporaryFolder folder;
  capi::in_threads(world, [&](int rank) { body("file://" + folder.path("meet"), rank); });
}

TEST(CApiShrink, SurvivorsContinueAndLearnTheirOldRanks) {
  std::barrier<> finished(4);
  run(4, [&](const std::string& name, int rank) {
    gw_comm comm = joined(name, rank, 4, true);
    EXPECT_EQ(capi::sum_of(comm, static_cast<float>(rank)), 6.0f);
    std::vector<float> data(1000);
    std::vector<int> members = {0, 1, 2, 3};
    for (const int leaves : {0, 2}) {  // rank 0, which serves the store, leaves first
      // The departure would also fail a sum in progress, so all ranks finish the sum first.
      finished.arrive_and_wait();
      if (rank == leaves) {
        finished.arrive_and_drop();
        GW_EXPECT_OK(gw_comm_destroy(comm));
        return;
      }
      EXPECT_EQ(capi::sum(comm, data), GW_COMM_FAILED);
      gw_comm rest = nullptr;
      int32_t ranks[4] = {-1, -1, -1, -1};
      GW_ASSERT_OK(gw_comm_shrink(comm, 20'000, nullptr, &rest, ranks, 4));
      GW_EXPECT_BAD("formed a new one already", gw_comm_shrink(comm, 20'000, nullptr, &rest, nullptr, 0));
      GW_EXPECT_OK(gw_comm_destroy(comm));
      comm = rest;
      const size_t left = members.size() - 1;
      std::vector<int> now;
      for (size_t i = 0; i < left; ++i) now.push_back(members[ranks[i]]);
      EXPECT_EQ(ranks[left], -1) << "no more than those";
      members.erase(std::find(members.begin(), members.end(), leaves));
      EXPECT_EQ(now, members);
      float sum = 0;
      for (const int r : members) sum += static_cast<float>(r);
      EXPECT_EQ(capi::sum_of(comm, static_cast<float>(rank)), sum);
      const capi::Model model;
      const capi::Reducer reducer(comm, "powersgd,rank=2", model);
      std::vector<float> gradients(model.elements(), static_cast<float>(rank));
      GW_EXPECT_OK(reducer.step(gradients));
    }
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

TEST(CApiShrink, FirstCallsMeasureLinksOncePerRunAndOnlyForAChoice) {
  std::barrier<> finished(4);
  run(4, [&](const std::string& name, int rank) {
    gw_comm comm = joined(name, rank, 4, true), rest = nullptr;
    std::vector<float> data(1000);
    const auto bytes_of = [&](const char* spec) {
      const uint64_t before = capi::query(comm).bytes_sent;
      GW_EXPECT_OK(capi::sum(comm, data, spec));
      return capi::query(comm).bytes_sent - before;
    };
    const uint64_t first = bytes_of("int8:schedule=ring");
    EXPECT_EQ(bytes_of("int8:schedule=ring"), first);
    EXPECT_GT(bytes_of("int8"), 100 * first);
    finished.arrive_and_wait();
    if (rank != 3) {
      EXPECT_EQ(capi::sum(comm, data), GW_COMM_FAILED);
      GW_ASSERT_OK(gw_comm_shrink(comm, 20'000, nullptr, &rest, nullptr, 0));
    }
    GW_EXPECT_OK(gw_comm_destroy(comm));
    if (rank == 3) return;
    comm = rest;
    EXPECT_LT(bytes_of("int8"), 2 * first);
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

// Follows the example of docs/extending.md down to one rank. Each failed step is repeated with the residuals
// of the survivors.
TEST(CApiShrink, SurvivorsLoadTheirStatesAndConserveResiduals) {
  for (const std::string spec : {"int4:dense=off", "powersgd:rank=2,wire=int8"}) {
    std::barrier<> finished(3);
    std::vector<std::vector<capi::StepRecord>> records(4, std::vector<capi::StepRecord>(4));  // [world][rank]
    run(3, [&](const std::string& name, int rank) {
      const capi::Model model;
      gw_comm comm = joined(name, rank, 3, true);
      auto reducer = std::make_unique<capi::Reducer>(comm, spec, model);
      int now = rank;
      for (const int leaves : {0, 1}) {
        for (int step = 0; step < 3; ++step) {
          auto gradient = capi::gradients_of(model, rank, step);
          GW_EXPECT_OK(reducer->step(gradient));
        }
        finished.arrive_and_wait();
        if (rank == leaves) {
          finished.arrive_and_drop();
          break;
        }
        const std::vector<char> state = reducer->save();
        auto gradient = capi::gradients_of(model, rank, 9);
        const auto copy = gradient;
        EXPECT_EQ(reducer->step(gradient), GW_COMM_FAILED);
        gw_comm rest = nullptr;
        int32_t ranks[3] = {-1, -1, -1};
        GW_ASSERT_OK(gw_comm_shrink(comm, 20'000, nullptr, &rest, ranks, 3));
        reducer = nullptr;
        GW_EXPECT_OK(gw_comm_destroy(comm));
        comm = rest;
        const auto* place = std::find(ranks, ranks + 3, now);
        ASSERT_NE(place, ranks + 3);
        now = static_cast<int>(place - ranks);
        reducer = std::make_unique<capi::Reducer>(comm, spec, model);
        GW_EXPECT_OK(reducer->load(state));
        EXPECT_GT(capi::norm_of(capi::residuals_of(state, model)), 0);
        EXPECT_EQ(capi::residuals_of(reducer->save(), model), capi::residuals_of(state, model));
        records[2 - leaves][now] = capi::recorded_step(*reducer, model, copy);
      }
      reducer = nullptr;
      GW_EXPECT_OK(gw_comm_destroy(comm));
    });
    for (size_t world : {1u, 2u}) {
      records[world].resize(world);
      ASSERT_FALSE(records[world].back().mean.empty());
      EXPECT_LT(capi::conservation_error(records[world]), 1e-6) << spec << ", " << world << " ranks";
    }
  }
}

TEST(CApiShrink, RestoresAnAbortedGroupWithoutLosses) {
  run(3, [](const std::string& name, int rank) {
    gw_comm comm = joined(name, rank, 3, true), rest = nullptr;
    if (rank == 1) {
      GW_EXPECT_OK(gw_comm_abort(comm, "a watchdog"));
    }
    // Rank 2 calls gw_comm_shrink() without having noticed the failure.
    std::vector<float> data(10, 1.0f);
    if (rank == 0) capi::sum(comm, data);
    int32_t ranks[3];
    GW_ASSERT_OK(gw_comm_shrink(comm, 20'000, nullptr, &rest, ranks, 3));
    EXPECT_EQ(ranks[0], 0);
    EXPECT_EQ(ranks[2], 2);
    EXPECT_EQ(capi::sum_of(rest, 1), 3.0f);
    GW_EXPECT_OK(gw_comm_destroy(comm));
    GW_EXPECT_OK(gw_comm_destroy(rest));
  });
}

TEST(CApiShrink, RejectsUnsupportedUsesAndInvalidArguments) {
  run(2, [](const std::string& name, int rank) {
    gw_comm comm = joined(name, rank, 2, false), rest = nullptr;
    int32_t ranks[1];
    GW_EXPECT_BAD("gw_comm_options.shrinkable", gw_comm_shrink(comm, 1000, nullptr, &rest, nullptr, 0));
    GW_EXPECT_BAD("rest is null", gw_comm_shrink(comm, 1000, nullptr, nullptr, nullptr, 0));
    GW_EXPECT_BAD("capacity is 1", gw_comm_shrink(comm, 1000, nullptr, &rest, ranks, 1));
    GW_EXPECT_BAD("timeout_ms is 0", gw_comm_shrink(comm, 0, nullptr, &rest, nullptr, 0));
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  gw_comm comm = nullptr;
  const std::string threads = capi::fresh_name();
  auto local = capi::comm_options(threads.c_str(), 0, 2);
  local.shrinkable = 1;
  GW_EXPECT_FAILS(GW_UNSUPPORTED, "shrinkable", gw_comm_create(&local, &comm));
  // Ranks whose values of `shrinkable` differ get the error while they join.
  run(2, [](const std::string& name, int rank) {
    gw_comm one = nullptr;
    auto options = capi::comm_options(name.c_str(), rank, 2, GW_HOST, 20'000);
    options.shrinkable = rank;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "gw_comm_options.shrinkable", gw_comm_create(&options, &one));
  });
}

}  // namespace
