// Tests requests: collective calls on the host that return before they are done.
#include <barrier>

#include "tests/capi/ranks.h"

namespace {

constexpr int64_t kLong = 60'000;

// Owns the request of one call and destroys it at the end of the scope.
struct Request {
  Request() = default;
  ~Request() { GW_EXPECT_OK(gw_request_destroy(handle)); }
  Request(const Request&) = delete;
  capi::CallOptions option() { return capi::call({.request = &handle}); }
  bool done() const {
    const gw_status status = gw_request_wait(handle, 0);
    EXPECT_TRUE(status == GW_OK || status == GW_NOT_DONE) << gw_last_error();
    return status == GW_OK;
  }
  gw_request handle = nullptr;
};

TEST(CApiRequest, ACallReturnsBeforeItsPeersHaveMadeTheirs) {
  std::barrier started(3);
  capi::run_ranks(3, [&](gw_comm comm, int rank) {
    std::vector<float> values(1000, static_cast<float>(rank)), other(10, 1.0f);
    if (rank == 2) started.arrive_and_wait();
    Request request;
    GW_ASSERT_OK(
        gw_allreduce(comm, values.data(), 1000, GW_FLOAT32, GW_SUM, "fp32", nullptr, request.option()));
    if (rank != 2) {
      EXPECT_FALSE(request.done());
      GW_EXPECT_FAILS(GW_NOT_DONE, "not done after 1 ms; it is still running",
                      gw_request_wait(request.handle, 1));
      started.arrive_and_wait();
    }
    GW_EXPECT_OK(gw_request_wait(request.handle, kLong));
    EXPECT_TRUE(request.done());
    GW_EXPECT_OK(gw_request_wait(request.handle, 0));
    EXPECT_EQ(values, std::vector<float>(1000, 3.0f));
    // The next call has no request and returns when it is done.
    GW_EXPECT_OK(capi::sum(comm, other));
    EXPECT_EQ(other[9], 3.0f);
  });
}

// Makes every kind of call with many requests in flight, mixed with blocking calls. The results have the bits
// of blocking calls.
TEST(CApiRequest, CallsInFlightGiveTheBitsOfBlockingOnes) {
  constexpr int kWorld = 3, kSteps = 3, kCount = 3 * 257;
  const std::vector<int64_t> counts(kWorld, 257);
  std::vector<std::vector<float>> results[2];  // [0]: blocking calls; [1]: calls with requests
  for (bool asynchronous : {false, true}) {
    results[asynchronous].resize(kWorld);
    capi::run_ranks(kWorld, [&](gw_comm comm, int rank) {
      const capi::Model model;
      capi::Reducer reducer(comm, "powersgd:rank=2", model, 4096);
      std::vector<float> flat(model.elements());
      std::vector<std::vector<float>> own(6, std::vector<float>(kCount)),
          residual(2, std::vector<float>(kCount));
      std::vector<float> shard(257), whole(kCount), replica(kCount, 0.5f);
      for (int step = 0; step < kSteps; ++step) {
        std::vector<gw_request> requests;
        requests.reserve(7);  // keeps the addresses of the requests valid
        // Returns the place for a call's request; null for a blocking call.
        auto request = [&] { return asynchronous ? &requests.emplace_back() : nullptr; };
        auto option = [&](float* kept = nullptr) {
          return capi::call({.residual = kept, .request = request()});
        };
        const auto seed = static_cast<uint32_t>(100 * step + 10 * rank);
        for (size_t i = 0; i < own.size(); ++i)
          own[i] = capi::normal(kCount, seed + static_cast<uint32_t>(i));
        flat = capi::normal(static_cast<int64_t>(flat.size()), seed + 9);
        for (int i : {0, 1}) {
          GW_EXPECT_OK(gw_allreduce(comm, own[i].data(), kCount, GW_FLOAT32, GW_AVG, "int4", nullptr,
                                    option(residual[i].data())));
        }
        GW_EXPECT_OK(
            gw_reducer_allreduce(reducer.handle, model.addresses(flat.data()).data(), nullptr, request()));
        GW_EXPECT_OK(gw_allreduce(comm, own[2].data(), kCount, GW_FLOAT32, GW_SUM, "bf16", nullptr, nullptr));
        GW_EXPECT_OK(gw_reduce_scatter(comm, own[3].data(), shard.data(), counts.data(), GW_FLOAT32, GW_SUM,
                                       "int8", nullptr, option()));
        GW_EXPECT_OK(gw_all_gather(comm, shard.data(), whole.data(), counts.data(), GW_FLOAT32, "bf16",
                                   nullptr, option()));
        GW_EXPECT_OK(gw_broadcast(comm, own[4].data(), kCount, GW_FLOAT32, 1, "fp32", nullptr, option()));
        GW_EXPECT_OK(gw_all_gather_update(comm, own[5].data(), replica.data(), counts.data(), GW_FLOAT32,
                                          "int8", nullptr, option()));
        // Requests may be waited for in any order, here in reverse.
        for (auto at = requests.rbegin(); at != requests.rend(); ++at) {
          GW_EXPECT_OK(gw_request_wait(*at, kLong));
          GW_EXPECT_OK(gw_request_destroy(*at));
        }
        auto& all = results[asynchronous][rank];
        for (const auto* part : {&own[0], &own[1], &own[2], &own[4], &flat, &shard, &whole, &replica}) {
          all.insert(all.end(), part->begin(), part->end());
        }
        EXPECT_EQ(capi::stats_of(reducer.handle).steps, step + 1);
      }
    });
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(CApiRequest, AStepOverlapsAndEndsInTheBackground) {
  std::barrier started(2);
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    const capi::Model model;
    std::vector<float> flat(model.elements(), 1.0f + static_cast<float>(rank));
    auto tensors = model.tensors(flat.data());
    gw_reducer made = nullptr;
    GW_ASSERT_OK(capi::create_reducer(comm, "fp32", tensors, nullptr, &made));
    capi::Reducer reducer(made);
    if (rank == 1) started.arrive_and_wait();
    for (int i = static_cast<int>(tensors.size()); i-- > 0;) GW_EXPECT_OK(gw_reducer_ready(made, i, nullptr));
    Request request;
    GW_EXPECT_OK(gw_reducer_wait(made, nullptr, &request.handle));
    if (rank == 0) {
      auto stats = capi::sized<gw_stats>();
      GW_EXPECT_FAILS(GW_DEVICE_FAILED, "in flight", gw_reducer_stats(made, &stats));
      started.arrive_and_wait();
    }
    GW_EXPECT_OK(gw_request_wait(request.handle, kLong));
    EXPECT_EQ(flat, std::vector<float>(flat.size(), 1.5f));
  });
}

TEST(CApiRequest, FailuresReachWhoeverWaits) {
  std::barrier failed(2);
  capi::run_ranks(2, 200, [&](gw_comm comm, int rank) {
    std::vector<float> values(10);
    if (rank == 0) {  // rank 1 never makes the call
      Request request;
      GW_EXPECT_OK(
          gw_allreduce(comm, values.data(), 10, GW_FLOAT32, GW_SUM, "fp32", nullptr, request.option()));
      GW_EXPECT_FAILS(GW_COMM_FAILED, "rank 1", gw_request_wait(request.handle, kLong));
      GW_EXPECT_FAILS(GW_COMM_FAILED, "rank 1", gw_request_wait(request.handle, 0));
    }
    failed.arrive_and_wait();
  });
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    std::vector<float> values(10);
    if (rank == 0) {
      gw_request request = nullptr;
      GW_EXPECT_OK(gw_allreduce(comm, values.data(), 10, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                                capi::call({.request = &request})));
      GW_EXPECT_OK(gw_comm_abort(comm, "enough"));
      GW_EXPECT_OK(gw_request_destroy(request));  // does not wait for rank 1
    }
    failed.arrive_and_wait();
  });
}

TEST(CApiRequest, RefusedCallsMakeNoRequest) {
  capi::run_ranks(2, [&](gw_comm comm, int) {
    std::vector<float> value(1, 1.0f);
    gw_request request = nullptr;
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "request handle is null", gw_request_wait(nullptr, 1));
    GW_EXPECT_FAILS(
        GW_BAD_ARGUMENT, "dtype",
        gw_allreduce(comm, value.data(), 1, 9, GW_SUM, "fp32", nullptr, capi::call({.request = &request})));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "communicator handle is null",
                    gw_allreduce(nullptr, value.data(), 1, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                                 capi::call({.request = &request})));
    EXPECT_EQ(request, nullptr) << "outputs are written on success only";
    // A blocking call.
    GW_EXPECT_OK(capi::sum(comm, value));
    EXPECT_EQ(value[0], 2.0f);
    GW_EXPECT_OK(gw_allreduce(comm, value.data(), 1, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                              capi::call({.request = &request})));
    GW_EXPECT_BAD("timeout_ms is -1", gw_request_wait(request, -1));
    GW_EXPECT_OK(gw_request_wait(request, kLong));
    EXPECT_EQ(value[0], 4.0f);
    GW_EXPECT_OK(gw_request_destroy(request));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "was destroyed", gw_request_wait(request, 1));
    GW_EXPECT_OK(gw_request_destroy(nullptr));
    // Destroying a request waits for its call.
    GW_EXPECT_OK(gw_allreduce(comm, value.data(), 1, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                              capi::call({.request = &request})));
    GW_EXPECT_OK(gw_request_destroy(request));
    EXPECT_EQ(value[0], 8.0f);
  });
  capi::run_ranks(1, [&](gw_comm comm, int) {
    std::vector<float> value(1, 3.0f);
    Request request;
    GW_EXPECT_OK(gw_allreduce(comm, value.data(), 1, GW_FLOAT32, GW_AVG, "int8", nullptr, request.option()));
    GW_EXPECT_OK(gw_request_wait(request.handle, kLong));
    EXPECT_EQ(value[0], 3.0f);
  });
}

}  // namespace
