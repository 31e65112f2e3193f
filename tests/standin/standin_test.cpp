// Tests that the stand-in finds planted defects: missing waits, host accesses to device memory, violated
// capture rules.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/graph.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr int64_t kValues = 1000;
constexpr int kTries = 96;  // each try finds a missing wait with a probability of about 1/3

struct OnStandin : ::testing::Test {
  OnStandin() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // a forked child would not have the stand-in's threads
  }
  void SetUp() override {
    if (cuda_device_count() < 1) GTEST_SKIP() << "GRADWIRE_STANDIN_GPUS=0";
  }
};
using StandinOrder = OnStandin;
using StandinMemory = OnStandin;
using StandinCapture = OnStandin;
using StandinLimits = OnStandin;

// Returns page-locked host memory filled with `value`.
Buffer pinned(float value) {
  Buffer buffer = Buffer::pinned(Device::cuda(0), kValues * sizeof(float));
  std::fill_n(buffer.as<float>(), kValues, value);
  return buffer;
}
bool holds(const Buffer& buffer, float value) {
  return std::all_of(buffer.as<float>(), buffer.as<float>() + kValues, [&](float x) { return x == value; });
}

// Returns the number of tries in which a copy on one stream missed an earlier write on another stream.
int wrong_copies(bool with_wait) {
  const Device device = Device::cuda(0);
  const Stream first = Stream::create(device, "first"), second = Stream::create(device, "second");
  int wrong = 0;
  for (int i = 0; i < kTries; ++i) {
    const Buffer middle(device, kValues * sizeof(float));
    const Buffer from = pinned(7.0f), to = pinned(0.0f);
    copy(first, middle.data(), from.data(), from.bytes());
    if (with_wait) {
      Event written = Event::create(device);
      written.record(first);
      second.wait(written);
    }
    copy(second, to.data(), middle.data(), to.bytes());
    second.synchronize();
    wrong += holds(to, 7.0f) ? 0 : 1;
    first.synchronize();
  }
  return wrong;
}

TEST_F(StandinOrder, FindsAMissingEventWait) {
  EXPECT_GT(wrong_copies(false), 0);
  EXPECT_EQ(wrong_copies(true), 0);
}

// The second stream overwrites memory that the first stream has not read yet.
TEST_F(StandinOrder, FindsAnOverwriteThatDoesNotWaitForTheReader) {
  const Device device = Device::cuda(0);
  const Stream reader = Stream::create(device, "reader"), writer = Stream::create(device, "writer");
  int wrong = 0;
  for (int i = 0; i < kTries; ++i) {
    const Buffer middle(device, kValues * sizeof(float));
    const Buffer from = pinned(7.0f), to = pinned(0.0f);
    copy(reader, middle.data(), from.data(), from.bytes());
    reader.synchronize();
    copy(reader, to.data(), middle.data(), to.bytes());
    fill_zero(writer, middle.data(), middle.bytes());
    reader.synchronize();
    wrong += holds(to, 7.0f) ? 0 : 1;
    writer.synchronize();
  }
  EXPECT_GT(wrong, 0);
}

TEST_F(StandinOrder, FindsAMissingSynchronize) {
  const Stream stream = Stream::create(Device::cuda(0), "test");
  const Buffer device(Device::cuda(0), kValues * sizeof(float));
  const Buffer to = pinned(0.0f);
  fill_zero(stream, device.data(), device.bytes());
  stream.synchronize();
  int wrong = 0;
  for (int i = 0; i < kTries; ++i) {
    std::fill_n(to.as<float>(), kValues, 7.0f);
    copy(stream, to.data(), device.data(), to.bytes());
    wrong += holds(to, 0.0f) ? 0 : 1;
    stream.synchronize();
    EXPECT_TRUE(holds(to, 0.0f));
  }
  EXPECT_GT(wrong, 0);
}

TEST_F(StandinOrder, RunsWorkThatNobodyWaitsFor) {
  const Stream stream = Stream::create(Device::cuda(0), "test");
  const Buffer device(Device::cuda(0), kValues * sizeof(float));
  fill_zero(stream, device.data(), device.bytes());
  Event end = Event::create(Device::cuda(0));
  end.record(stream);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!end.query() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(end.query());
}

TEST_F(StandinMemory, StartsAsNan) {
  const Stream stream = Stream::create(Device::cuda(0), "test");
  const Buffer device(Device::cuda(0), kValues * sizeof(float));
  const Buffer to = pinned(0.0f);
  copy(stream, to.data(), device.data(), to.bytes());
  stream.synchronize();
  for (int64_t i = 0; i < kValues; ++i) ASSERT_TRUE(std::isnan(to.as<float>()[i]));
}

TEST_F(StandinMemory, AbortsWhenTheHostTouchesIt) {
  const Buffer device(Device::cuda(0), kValues * sizeof(float));
  EXPECT_DEATH(*device.as<volatile float>() = 1.0f, "the host touched memory of cuda:0");
}

TEST_F(StandinMemory, AbortsWhenAKernelUsesMemoryThatWasFreedInStreamOrder) {
  EXPECT_DEATH(
      {
        const Stream stream = Stream::create(Device::cuda(0), "test");
        auto* const counter = Buffer::in_order(stream, sizeof(uint64_t)).as<uint64_t>();
        increment(stream, counter);
        stream.synchronize();
      },
      "while kernel 'increment' ran, .* an address of cuda:0 that is not allocated");
}

TEST_F(StandinMemory, AbortsWithoutPeerAccess) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  EXPECT_DEATH(
      {
        const Buffer other(Device::cuda(1), sizeof(uint64_t));
        const Stream stream = Stream::create(Device::cuda(0), "test");
        increment(stream, other.as<uint64_t>());
        stream.synchronize();
      },
      "while kernel 'increment' ran, .* an address of cuda:1 .* no peer access");
}

TEST_F(StandinMemory, RefusesMoreThanTheDeviceHas) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, size_t{1} << 40), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(StandinMemory, CopiesRefuseRangesThatExceedAnAllocation) {
  const Stream stream = Stream::create(Device::cuda(0), "test");
  const Buffer device(Device::cuda(0), kValues * sizeof(float));
  std::vector<float> host(2 * kValues);
  EXPECT_EQ(
      cudaMemcpyAsync(host.data(), device.data(), 2 * device.bytes(), cudaMemcpyDefault, stream.native()),
      cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

// --- capture ---

struct Raw {
  Raw() {
    cudaSetDevice(0);
    cudaStreamCreateWithPriority(&a, cudaStreamNonBlocking, 0);
    cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, 0);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaMalloc(&data, 64);
  }
  ~Raw() {
    cudaGetLastError();
    cudaFree(data);
    cudaEventDestroy(event);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
  }
  cudaError_t end() {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(a, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    return status;
  }
  cudaStream_t a = nullptr, b = nullptr;
  cudaEvent_t event = nullptr;
  void* data = nullptr;
};

TEST_F(StandinCapture, RefusesToEndBeforeForkedWorkHasJoined) {
  Raw raw;
  ASSERT_EQ(cudaStreamBeginCapture(raw.a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(raw.event, raw.a), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(raw.b, raw.event, 0), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(raw.data, 0, 64, raw.b), cudaSuccess);
  EXPECT_EQ(raw.end(), cudaErrorStreamCaptureUnjoined);
}

TEST_F(StandinCapture, RefusesEventsFromOutside) {
  Raw raw;
  EXPECT_EQ(cudaEventRecord(raw.event, raw.b), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(raw.a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(raw.a, raw.event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(raw.end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(StandinCapture, RefusesToSynchronizeOrAllocate) {
  for (int call = 0; call < 3; ++call) {
    Raw raw;
    ASSERT_EQ(cudaStreamBeginCapture(raw.a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    void* more = nullptr;
    EXPECT_EQ(call == 0   ? cudaStreamSynchronize(raw.a)
              : call == 1 ? cudaMalloc(&more, 64)
                          : cudaFree(raw.data),
              cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaMemsetAsync(raw.data, 0, 64, raw.a), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(raw.end(), cudaErrorStreamCaptureInvalidated);
  }
}

TEST_F(StandinCapture, RefusesQueriesOfCapturedEvents) {
  Raw raw;
  ASSERT_EQ(cudaStreamBeginCapture(raw.a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(raw.event, raw.a), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(raw.event), cudaErrorCapturedEvent);
  EXPECT_EQ(raw.end(), cudaSuccess);
}

TEST_F(StandinCapture, OnlyItsThreadMayEndIt) {
  Raw raw;
  ASSERT_EQ(cudaStreamBeginCapture(raw.a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  cudaError_t there = cudaSuccess;
  std::thread([&] { there = raw.end(); }).join();
  EXPECT_EQ(there, cudaErrorStreamCaptureWrongThread);
  EXPECT_EQ(raw.end(), cudaErrorStreamCaptureInvalidated);
}

TEST_F(StandinCapture, WorkRunsAtLaunchesOnly) {
  const Device device = Device::cuda(0);
  const Stream stream = Stream::create(device, "test");
  const Buffer counter(device, sizeof(uint64_t));
  fill_zero(stream, counter.data(), counter.bytes());
  const Graph graph = Graph::capture(stream, [&] { increment(stream, counter.as<uint64_t>()); });
  for (int i = 0; i < 3; ++i) graph.launch();
  const Buffer to = Buffer::pinned(device, sizeof(uint64_t));
  copy(stream, to.data(), counter.data(), to.bytes());
  stream.synchronize();
  EXPECT_EQ(*to.as<uint64_t>(), 3u);
}

// --- limits ---

TEST_F(StandinLimits, LaunchesNeedTheStreamsDevice) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  Raw raw;
  cudaEvent_t other = nullptr;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&other), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(other, raw.a), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(other), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(cuda_device_count()), cudaErrorInvalidDevice);
}

TEST_F(StandinLimits, HandlesEndWithTheirObjects) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

}  // namespace
}  // namespace gradwire
