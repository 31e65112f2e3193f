// Tests the C ABI on pretended GPUs with one thread per rank, like a program that uses several GPUs.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gradwire/gradwire.h>
#include "runtime/device/device.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

#define CHECK_GW(call) ASSERT_EQ(call, GW_OK) << gw_last_error()
#define CHECK_CUDA(call) ASSERT_EQ(call, cudaSuccess)

// Runs `body` on one thread per rank, with rank r's communicator on device r, or all on the host.
void on_ranks(int world, const std::function<void(gw_comm, int)>& body, bool on_host = false) {
  static std::atomic<int> number{0};
  const std::string meeting = fmt::format("local://standin {}", ++number);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      gw_comm comm = {};
      gw_comm_options options = {};
      options.size = sizeof options;
      options.rendezvous = meeting.c_str();
      options.rank = rank;
      options.device = on_host ? GW_HOST : rank;
      options.world = world;
      options.timeout_ms = 20'000;
      CHECK_GW(gw_comm_create(&options, &comm));
      body(comm, rank);
      CHECK_GW(gw_comm_destroy(comm));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

struct StandinCApi : ::testing::Test {
  void SetUp() override {
    if (cuda_device_count() < 2) GTEST_SKIP() << "needs GRADWIRE_STANDIN_GPUS of 2 or more";
  }
};

void copy_now(void* to, const void* from, int64_t count) {
  EXPECT_EQ(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float), cudaMemcpyDefault, nullptr),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
}
// Allocates device memory for `count` floats, all equal to `value`.
float* filled(int64_t count, float value) {
  void* data = nullptr;
  const std::vector<float> values(count, value);
  EXPECT_EQ(cudaMalloc(&data, values.size() * sizeof(float)), cudaSuccess);
  copy_now(data, values.data(), count);
  return static_cast<float*>(data);
}
std::vector<float> read(const float* data, int64_t count) {
  std::vector<float> values(count);
  copy_now(values.data(), data, count);
  return values;
}

TEST_F(StandinCApi, ACallLeavesTheCallersDeviceCurrent) {
  CHECK_CUDA(cudaSetDevice(0));
  on_ranks(2, [](gw_comm comm, int rank) {
    CHECK_CUDA(cudaSetDevice(rank));
    float* const data = filled(1000, 1.0f);
    cudaStream_t stream = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaSetDevice(1 - rank));
    const auto expect_unchanged = [&](const char* call) {
      int now = -1;
      CHECK_CUDA(cudaGetDevice(&now));
      EXPECT_EQ(now, 1 - rank) << call;
    };
    CHECK_GW(gw_allreduce(comm, data, 1000, GW_FLOAT32, GW_SUM, "int8", stream, nullptr));
    expect_unchanged("gw_allreduce");
    EXPECT_NE(gw_allreduce(comm, data, -1, GW_FLOAT32, GW_SUM, "int8", stream, nullptr), GW_OK);
    expect_unchanged("a call that is refused");
    CHECK_GW(gw_comm_check(comm));
    expect_unchanged("gw_comm_check");
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK_CUDA(cudaFree(data));
  });
  int now = -1;
  CHECK_CUDA(cudaGetDevice(&now));
  EXPECT_EQ(now, 0);
}

// Pairs inputs with different outputs in each step. FSDP2's allocator also changes buffer addresses.
TEST_F(StandinCApi, ReduceScatterAndAllGatherFollowTheirAddresses) {
  on_ranks(2, [](gw_comm comm, int rank) {
    CHECK_CUDA(cudaSetDevice(rank));
    cudaStream_t stream = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const std::vector<int64_t> counts{500, 500};
    std::vector<float*> ins, outs;
    for (int i = 0; i < 3; ++i) {
      ins.push_back(filled(1000, static_cast<float>(i + rank)));
      outs.push_back(filled(500, 0.0f));
    }
    for (int step = 0; step < 2; ++step) {
      for (size_t i = 0; i < ins.size(); ++i) {
        CHECK_GW(gw_reduce_scatter(comm, ins[i], outs[(i + static_cast<size_t>(step)) % 3], counts.data(),
                                   GW_FLOAT32, GW_SUM, "fp32", stream, nullptr));
      }
    }
    CHECK_CUDA(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < ins.size(); ++i) {
      // In step 1, output i was written last by the reduce-scatter of the input before input i.
      const auto of = static_cast<float>(2 * ((i + 2) % 3) + 1);
      EXPECT_EQ(read(outs[i], 500), std::vector<float>(500, of)) << i;
    }
    for (float* data : ins) CHECK_CUDA(cudaFree(data));
    for (float* data : outs) CHECK_CUDA(cudaFree(data));
    CHECK_CUDA(cudaStreamDestroy(stream));
  });
}

TEST_F(StandinCApi, RequestsAreRefused) {
  on_ranks(2, [](gw_comm comm, int rank) {
    CHECK_CUDA(cudaSetDevice(rank));
    float* const data = filled(1000, 1.0f);
    gw_request request = nullptr;
    gw_call_options options = {};
    options.size = sizeof options;
    options.request = &request;
    EXPECT_EQ(gw_allreduce(comm, data, 1000, GW_FLOAT32, GW_SUM, "fp32", nullptr, &options), GW_UNSUPPORTED);
    EXPECT_EQ(request, nullptr);
    CHECK_GW(gw_allreduce(comm, data, 1000, GW_FLOAT32, GW_SUM, "fp32", nullptr, nullptr));
    EXPECT_EQ(read(data, 1000), std::vector<float>(1000, 2.0f));
    CHECK_CUDA(cudaFree(data));
  });
}

TEST_F(StandinCApi, ChoosingOnGpusMeasuresTheHostsErrors) {
  constexpr const char* kSpecs[] = {"fp32", "bf16", "int8", "int4", "powersgd:rank=2", "topk:k=41"};
  constexpr int64_t kRows = 64, kCols = 96;
  const auto trials_of = [&](bool on_host) {
    std::vector<gw_trial> trials(std::size(kSpecs));
    on_ranks(
        2,
        [&](gw_comm comm, int rank) {
          std::vector<float> gradient(kRows * kCols);
          for (size_t i = 0; i < gradient.size(); ++i) {
            gradient[i] = std::sin(static_cast<float>(i * i % 10'007 + static_cast<size_t>(rank)));
          }
          float* data = gradient.data();
          cudaStream_t stream = nullptr;
          if (!on_host) {
            CHECK_CUDA(cudaSetDevice(rank));
            CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            data = filled(kRows * kCols, 0);
            copy_now(data, gradient.data(), kRows * kCols);
          }
          gw_tensor tensor = {};
          tensor.size = sizeof tensor;
          tensor.rows = kRows;
          tensor.cols = kCols;
          tensor.grad = data;
          gw_choose_options options = {};
          options.size = sizeof options;
          options.specs = kSpecs;
          options.n_specs = std::size(kSpecs);
          std::vector<gw_trial> mine(std::size(kSpecs));
          int32_t chosen = -1;
          CHECK_GW(gw_choose(comm, &tensor, 1, &options, stream, mine.data(), &chosen));
          EXPECT_GE(chosen, 0);
          if (rank == 0) trials = mine;
          if (on_host) return;
          EXPECT_EQ(read(data, kRows * kCols), gradient) << "the gradient changed";
          CHECK_CUDA(cudaFree(data));
          CHECK_CUDA(cudaStreamDestroy(stream));
        },
        on_host);
    return trials;
  };
  const std::vector<gw_trial> host = trials_of(true), gpu = trials_of(false);
  for (size_t i = 0; i < host.size(); ++i) {
    EXPECT_NEAR(gpu[i].error, host[i].error, 1e-5 * host[i].error) << kSpecs[i];
    EXPECT_GT(gpu[i].communicate_ms, 0) << kSpecs[i];
  }
}

// The caller may free memory, such as a framework's cache, and call again.
TEST_F(StandinCApi, RefusedGpuMemoryIsReportedAsNoMemory) {
  on_ranks(2, [](gw_comm comm, int rank) {
    gw_tensor tensor = {};
    tensor.size = sizeof tensor;
    tensor.rows = int64_t{3} << 30;  // 12 GiB; a simulated GPU has 8
    tensor.cols = 1;
    tensor.dtype = GW_FLOAT32;
    gw_reducer reducer = nullptr;
    EXPECT_EQ(gw_reducer_create(comm, "int8", &tensor, 1, nullptr, &reducer), GW_NO_MEMORY);
    testing::expect_has(gw_last_error(), {fmt::format(" bytes on cuda:{} (", rank)});
    tensor.rows = 1000;
    CHECK_GW(gw_reducer_create(comm, "int8", &tensor, 1, nullptr, &reducer));
    CHECK_GW(gw_reducer_destroy(reducer));
  });
}

TEST_F(StandinCApi, ACallInTheCallersCaptureIsRefusedAndTheCaptureGoesOn) {
  on_ranks(2, [](gw_comm comm, int rank) {
    CHECK_CUDA(cudaSetDevice(rank));
    float* const data = filled(1000, 1.0f);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(gw_allreduce(comm, data, 1000, GW_FLOAT32, GW_SUM, "fp32", stream, nullptr), GW_UNSUPPORTED);
    testing::expect_has(gw_last_error(), {"captured in a CUDA graph"});
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphDestroy(graph));
    CHECK_GW(gw_allreduce(comm, data, 1000, GW_FLOAT32, GW_SUM, "fp32", stream, nullptr));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    EXPECT_EQ(read(data, 1000), std::vector<float>(1000, 2.0f));
    CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK_CUDA(cudaFree(data));
  });
}

}  // namespace
}  // namespace gradwire
