// Tests kernels that tests/kernels cannot test in this executable, because the kernels are called through a
// Stream.
#include <gtest/gtest.h>

#include <vector>

#include "runtime/device/device.h"

namespace gradwire::cuda {

void store(CudaStream stream, void* dst, const void* value, size_t bytes);
void increment(CudaStream stream, uint64_t* counter);

namespace {

TEST(SimtStore, StoresExactlyTheGivenBytes) {
  unsigned char value[64];
  for (size_t i = 0; i < sizeof value; ++i) value[i] = static_cast<unsigned char>(i + 1);
  for (size_t bytes : {size_t{1}, size_t{7}, size_t{8}, size_t{63}, size_t{64}}) {
    // The array has exactly this size, so that AddressSanitizer detects an excess byte.
    std::vector<unsigned char> stored(bytes);
    store(nullptr, stored.data(), value, bytes);
    EXPECT_EQ(stored, std::vector<unsigned char>(value, value + bytes));
  }
}

TEST(SimtStore, IncrementCountsBeyond32Bits) {
  uint64_t counter = 0xffffffffu;
  increment(nullptr, &counter);
  EXPECT_EQ(counter, uint64_t{1} << 32);
}

}  // namespace
}  // namespace gradwire::cuda
