// Row-major matrix products on OpenBLAS (host; batches of small ones by host/small_gemm.cpp) and cuBLAS (CUDA).
//
// C = alpha * op(A) op(B) + beta * C, where op(A) is (m, k), op(B) is (k, n), C is (m, n), for `batch`
// products whose operands lie `stride_*` elements apart. lda/ldb/ldc are the distances between rows as
// stored. FLOPs: 2 m n k per product. On the host the work is cut along rows of C into pieces that do not
// depend on the number of threads, so results do not either; OpenBLAS itself runs single-threaded.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

enum class Precision : uint8_t { fp32, tf32 };

struct Gemm {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t lda = 0, stride_a = 0;
  const float* b = nullptr;
  int64_t ldb = 0, stride_b = 0;
  float* c = nullptr;
  int64_t ldc = 0, stride_c = 0;
  int64_t batch = 1;
  float alpha = 1.0f, beta = 0.0f;
  Precision precision =
      Precision::fp32;  // tf32: CUDA tensor cores on TF32-rounded inputs; the host computes fp32
};
GW_DECLARE_OP(gemm, Gemm)

namespace detail {
// Throws BadInput naming the size or leading dimension that cannot be.
void check(const Gemm& args);
}  // namespace detail

}  // namespace gradwire
