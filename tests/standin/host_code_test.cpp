// Tests properties of the CUDA host code that only a simulated machine shows: errors that leave no trace, and
// memory of streams that are gone.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "kernels/gemm/gemm.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"

namespace gradwire {
namespace {

struct StandinHostCode : ::testing::Test {
  void SetUp() override {
    if (cuda_device_count() < 1) GTEST_SKIP() << "GRADWIRE_STANDIN_GPUS=0";
  }
  const Device device_ = Device::cuda(0);
};

// The runtime keeps the error of a failed call for cudaGetLastError(). The check after the next launch, in
// Gradwire or in PyTorch, would report it.
TEST_F(StandinHostCode, RefusedMemoryLeavesNoLastError) {
  EXPECT_THROW(Buffer(device_, device_memory(device_).total + 1), OutOfResources);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const Stream stream = Stream::create(device_, "test");
  const Buffer counter(device_, sizeof(uint64_t));
  fill_zero(stream, counter.data(), counter.bytes());
  EXPECT_NO_THROW(increment(stream, counter.as<uint64_t>()));
  stream.synchronize();
}

// Each stream's products have a workspace. Frameworks create and destroy streams.
TEST_F(StandinHostCode, ProductsKeepTheWorkspacesOfFewStreams) {
  constexpr int kStreams = 24;
  constexpr size_t kWorkspace = size_t{5} << 20;  // 4 MiB, rounded up
  const Buffer a(device_, 1024), b(device_, 1024), c(device_, 1024);
  std::vector<Stream> streams;
  for (int i = 0; i < kStreams; ++i) streams.push_back(Stream::create(device_, "test"));
  const size_t before = device_memory(device_).free;
  for (const Stream& stream : streams) {
    fill_zero(stream, a.data(), a.bytes());
    fill_zero(stream, b.data(), b.bytes());
    Gemm product{.m = 8, .n = 8, .k = 8};
    product.a = a.as<const float>(), product.b = b.as<const float>(), product.c = c.as<float>();
    product.lda = product.ldb = product.ldc = 8;
    gemm(stream, product);
    stream.synchronize();
  }
  EXPECT_LT(before, device_memory(device_).free + 8 * kWorkspace);
}

}  // namespace
}  // namespace gradwire
