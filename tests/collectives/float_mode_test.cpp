// Ranks have the same bits even if one rank flushes subnormal numbers to zero.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/threads/thread_pool.h"
#include "tests/collectives/example_specs.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

#ifdef __x86_64__
#include <xmmintrin.h>

namespace gradwire::testing {
namespace {

constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero

TEST(FloatMode, RanksThatFlushSubnormalNumbersHaveTheSameBits) {
  for (const std::string& spec : thinned(example_specs(), 12)) {
    std::vector<std::vector<float>> result(4), residual(4);
    for (const bool flush : {false, true}) {
      run_ranks(2, Device::host(), [&](Communicator& comm) {
        const auto r = static_cast<size_t>(comm.rank());
        const std::vector<GradientTensor> tensors = {{"a", {37, 31}}, {"b", {50}}, {"c", {24, 24}}};
        std::vector<std::vector<std::vector<float>>> steps;
        for (int s = 0; s < 3; ++s) {
          steps.push_back(gradients_for(tensors, static_cast<uint32_t>(2 * s + comm.rank() + 1)));
          for (auto& gradient : steps.back()) {
            for (float& v : gradient) v = std::ldexp(v, -127 - s);
          }
        }
        const unsigned before = _mm_getcsr();
        if (flush && r == 1) _mm_setcsr(before | kFlush);
        Rank rank(comm, spec, tensors, 1 << 20);
        for (const auto& gradients : steps) result[r + (flush ? 2 : 0)] = rank.step(gradients);
        residual[r + (flush ? 2 : 0)] = rank.residual();
        if (flush && r == 1) {
          EXPECT_EQ(_mm_getcsr() & kFlush, kFlush) << "the caller's mode is not restored";
        }
        _mm_setcsr(before);
      });
    }
    for (size_t r = 1; r < 4; ++r) EXPECT_TRUE(same_bits(result[r], result[0])) << spec << ": result " << r;
    for (size_t r = 0; r < 2; ++r)
      EXPECT_TRUE(same_bits(residual[r + 2], residual[r])) << spec << ": residual " << r;
  }
}

// Tests all threads of parallel_for(), including the calling thread.
TEST(FloatMode, ParallelForComputesWithSubnormalNumbers) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlush);
  std::vector<float> x(1 << 16);
  const volatile float tiny = 1e-38f;
  parallel_for(static_cast<int64_t>(x.size()), 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = tiny * 0.25f;
  });
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after & kFlush, kFlush);
  for (float v : x) ASSERT_NE(v, 0.0f);
}

}  // namespace
}  // namespace gradwire::testing
#endif
