// The operands of a matrix product, for tests of gemm().
#pragma once

#include <fmt/format.h>

#include <string>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {

struct GemmOperands {
  Gemm args;
  std::vector<float> a, b, c;

  // Creates random operands. `pad` widens every row by that many elements. `gap` elements separate the
  // products of a batch.
  GemmOperands(int64_t m, int64_t n, int64_t k, bool ta, bool tb, int64_t batch = 1, int64_t pad = 0,
               int64_t gap = 0) {
    args.transpose_a = ta, args.transpose_b = tb;
    args.m = m, args.n = n, args.k = k, args.batch = batch;
    args.lda = (ta ? m : k) + pad;
    args.ldb = (tb ? k : n) + pad;
    args.ldc = n + pad;
    args.stride_a = (ta ? k : m) * args.lda + gap;
    args.stride_b = (tb ? n : k) * args.ldb + gap;
    args.stride_c = m * args.ldc + gap;
    a = OpTest::normal(batch * args.stride_a, 1);
    b = OpTest::normal(batch * args.stride_b, 2);
    c = OpTest::normal(batch * args.stride_c, 3);
  }
  std::string name() const {
    return fmt::format("{}x{}x{} A{} B{} batch {}", args.m, args.n, args.k, args.transpose_a ? "^T" : "",
                       args.transpose_b ? "^T" : "", args.batch);
  }
  std::vector<float> reference() const {
    auto out = c;
    Gemm g = args;
    g.a = a.data(), g.b = b.data(), g.c = out.data();
    reference::gemm(g);
    return out;
  }
};

}  // namespace gradwire::testing
