// Tests that large results, which the host writes with streaming stores (kernels/simd/vector.h), have the
// same bits.
#include <gtest/gtest.h>

#include "kernels/powersgd/powersgd.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/floats.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

TEST(LargeHostArray, Bf16HasTheReferencesBits) {
  const int64_t count = host::kStreamBytes / 2 + 5;
  const auto grad = OpTest::normal(1021, 1), residual = OpTest::normal(1019, 2, 1e-3f);
  auto repeated = [&](const std::vector<float>& pattern) {
    std::vector<float> all(count);
    for (size_t i = 0; i < all.size(); ++i) all[i] = pattern[i % pattern.size()];
    return all;
  };
  const auto g = repeated(grad);
  Stream stream = Stream::immediate_host();
  for (int64_t misalign : {0, 8, 1}) {  // the wire is aligned to 16 bytes, except at 1
    auto e = repeated(residual), want_e = e;
    Array<uint16_t> wire(stream, count, misalign);
    Array<float> out(stream, count, misalign);
    std::vector<uint16_t> want_wire(g.size());
    std::vector<float> want_out(g.size());
    host::bf16_reduce_encode({.own = g.data(), .residual = e.data(), .wire = wire.data(), .count = count});
    host::bf16_decode({.wire = wire.data(), .out = out.data(), .scale = 0.5f, .count = count});
    reference::bf16_reduce_encode(
        {.own = g.data(), .residual = want_e.data(), .wire = want_wire.data(), .count = count});
    reference::bf16_decode({.wire = want_wire.data(), .out = want_out.data(), .scale = 0.5f, .count = count});
    EXPECT_TRUE(wire.host() == want_wire) << "misaligned by " << misalign;
    EXPECT_TRUE(e == want_e) << "misaligned by " << misalign;
    EXPECT_TRUE(out.host() == want_out) << "misaligned by " << misalign;
    wire.expect_guards_intact("wire");
    out.expect_guards_intact("out");
  }
}

TEST(LargeHostArray, ReconstructionDoesNotDependOnBucketSize) {
  // Two equal matrices together exceed kStreamBytes. A single matrix does not.
  const int32_t rows = 1031, cols = 2053, rank = 3;
  const auto elements = int64_t{rows} * cols;
  ASSERT_LT(elements * 4, host::kStreamBytes);
  ASSERT_GE(2 * elements * 4, host::kStreamBytes);
  Stream stream = Stream::immediate_host();
  const auto p = OpTest::normal(rows * rank, 1), q = OpTest::normal(cols * rank, 2);
  MatrixDescriptor one{.rows = rows, .cols = cols, .rank = rank};
  MatrixDescriptor other = one;
  other.offset = elements;
  MatrixTable small(stream, {one}), large(stream, {one, other});
  std::vector<float> alone(elements), both(2 * alone.size());
  host::powersgd_reconstruct(
      {.table = &small, .p = p.data(), .q = q.data(), .grad = alone.data(), .scale = 0.5f});
  host::powersgd_reconstruct(
      {.table = &large, .p = p.data(), .q = q.data(), .grad = both.data(), .scale = 0.5f});
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), both.begin()));
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), both.begin() + elements));
}

}  // namespace
}  // namespace gradwire::testing
