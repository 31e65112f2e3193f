// Tests the NCCL interposer on simulated GPUs, with one thread per rank. This program defines the
// interposer's functions, so its calls pass through them to the NCCL of nccl.cpp.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <functional>
#include <thread>
#include <vector>

namespace gradwire {
namespace {

constexpr int64_t kCount = 1 << 18;  // 1 MiB, the smallest size that the interposer compresses by default

// Runs `body` on one thread per rank. Rank r's communicator is on device r, and the other device is current.
void on_two_ranks(const std::function<void(ncclComm_t, int)>& body) {
  ncclComm_t comms[2] = {};
  const int devices[2] = {0, 1};
  ASSERT_EQ(ncclCommInitAll(comms, 2, devices), ncclSuccess);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_EQ(cudaSetDevice(1 - rank), cudaSuccess);
      body(comms[rank], rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

int current_device() {
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  return device;
}

// Device memory and a stream on another device than the current one.
struct Gradients {
  Gradients(int device, float value) {
    const std::vector<float> values(kCount, value);
    const int before = current_device();
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), kCount * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(data, values.data(), kCount * sizeof(float), cudaMemcpyDefault, stream),
              cudaSuccess);
    EXPECT_EQ(cudaSetDevice(before), cudaSuccess);
  }
  ~Gradients() {
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaFree(data), cudaSuccess);
  }
  Gradients(const Gradients&) = delete;
  std::vector<float> read() const {
    std::vector<float> values(kCount);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), data, kCount * sizeof(float), cudaMemcpyDefault, stream),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return values;
  }

  float* data = nullptr;
  cudaStream_t stream = nullptr;
};

TEST(StandinInterposer, LeavesTheCallersDeviceCurrent) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < 2)
    GTEST_SKIP() << "needs GRADWIRE_STANDIN_GPUS of 2 or more";
  on_two_ranks([](ncclComm_t comm, int rank) {
    const Gradients gradients(rank, 1.0f + 0x1p-12f);  // BF16 has 1
    for (int call = 0; call < 2; ++call) {
      ASSERT_EQ(
          ncclAllReduce(gradients.data, gradients.data, kCount, ncclFloat32, ncclSum, comm, gradients.stream),
          ncclSuccess);
      EXPECT_EQ(current_device(), 1 - rank) << "call " << call;
      EXPECT_EQ(gradients.read(), std::vector<float>(kCount, call == 0 ? 2.0f : 4.0f)) << "not sent as BF16";
    }
    EXPECT_EQ(ncclAllReduce(gradients.data, gradients.data, 10, ncclFloat32, ncclSum, comm, gradients.stream),
              ncclSuccess);
    EXPECT_EQ(current_device(), 1 - rank) << "a small call";
    EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(current_device(), 1 - rank) << "ncclCommDestroy";
  });
}

}  // namespace
}  // namespace gradwire
