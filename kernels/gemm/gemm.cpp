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
    fail("a size does not fit 32 bits");
  if (g.a.type != g.b.type) fail("a and b are of different types");
  if (g.c.type == Element::bf16 && g.a.type != Element::bf16) fail("c is bf16, but a and b are not");
  if (g.bias.data != nullptr && g.bias.type != g.c.type) fail("the bias is not of c's type");
  if (g.bias.data != nullptr && g.batch != 1) fail("a bias goes with a single product, not with a batch");
  if (g.epilogue != Epilogue::none) {
    const bool keeps_nothing = g.epilogue == Epilogue::gelu_tanh && g.aux.data == nullptr;
    if (!keeps_nothing && g.m > 0 && g.n > 0 && (g.aux.data == nullptr || g.aux.data == g.c.data))
      fail("an epilogue needs aux, and not in c's place");
    if (!keeps_nothing && g.aux.type != g.c.type) fail("aux is not of c's type");
    if (g.batch != 1 || g.beta != 0.0f || g.ldc != g.n)
      fail("an epilogue goes with a single product, beta 0 and dense rows of c");
    if (g.epilogue == Epilogue::d_gelu_tanh && g.bias.data != nullptr)
      fail("a bias does not go with GELU's derivative");
  }
  if (g.precision == Precision::bf16 || (g.precision == Precision::tf32 && g.a.type == Element::bf16))
    fail("the precision of bf16 operands is in their type");
}

}  // namespace detail

}  // namespace gradwire
