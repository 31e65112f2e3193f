#include "kernels/gemm/gemm.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <string>

#include "runtime/util/error.h"

namespace gradwire {

namespace detail {

void check(const Gemm& g) {
  auto fail = [](const std::string& what) { throw BadInput("gemm: " + what); };
  if (g.m < 0 || g.n < 0 || g.k < 0 || g.batch < 0) fail("m, n, k and batch must not be negative");
  auto operand = [&](const char* name, int64_t ld, int64_t row_length) {
    if (ld < row_length) {
      fail(fmt::format("{} is {}, less than its rows' {} elements", name, ld, row_length));
    }
    if (ld > std::numeric_limits<int32_t>::max()) fail(fmt::format("{} does not fit 32 bits", name));
  };
  operand("lda", g.lda, g.transpose_a ? g.m : g.k);
  operand("ldb", g.ldb, g.transpose_b ? g.k : g.n);
  operand("ldc", g.ldc, g.n);
  if (std::max({g.m, g.n, g.k, g.batch}) > std::numeric_limits<int32_t>::max())
    fail("m, n, k and batch must be below 2^31");
  if (g.a.type != g.b.type) fail("a and b must have the same type");
  if (g.c.type == Element::bf16 && g.a.type != Element::bf16) fail("c can be bf16 only if a and b are");
  if (g.bias.data != nullptr && g.bias.type != g.c.type) fail("the bias must have c's type");
  if (g.bias.data != nullptr && g.batch != 1) fail("a bias needs batch = 1");
  if (g.epilogue != Epilogue::none) {
    const bool stores_no_aux = g.epilogue == Epilogue::gelu_tanh && g.aux.data == nullptr;
    if (!stores_no_aux && g.m > 0 && g.n > 0 && (g.aux.data == nullptr || g.aux.data == g.c.data))
      fail("an epilogue needs aux, distinct from c");
    if (!stores_no_aux && g.aux.type != g.c.type) fail("aux must have c's type");
    if (g.batch != 1 || g.beta != 0.0f || g.ldc != g.n)
      fail("an epilogue needs batch = 1, beta = 0 and ldc = n");
    if (g.epilogue == Epilogue::d_gelu_tanh && g.bias.data != nullptr)
      fail("the epilogue d_gelu_tanh takes no bias; set bias to null");
  }
  if (g.precision == Precision::bf16 || (g.precision == Precision::tf32 && g.a.type == Element::bf16))
    fail("precision must be fp32 or, for FP32 operands, tf32");
}

}  // namespace detail

}  // namespace gradwire
