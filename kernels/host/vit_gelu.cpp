// Host bias_gelu and bias_gelu_backward.
#include <algorithm>

#include "kernels/column_chunks.h"
#include "kernels/host/column_sum.h"
#include "kernels/host/rows.h"
#include "kernels/host/simd.h"
#include "kernels/math/gelu.h"
#include "kernels/vit.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

GW_SIMD void forward_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  const float* bias = a.bias;
  for (int64_t r = begin; r < end; ++r) {
    float *x = a.x + r * a.width, *y = a.y + r * a.width;
#pragma omp simd
    for (int64_t c = 0; c < a.width; ++c) {
      float pre = x[c] + bias[c];
      x[c] = pre;
      y[c] = gelu(pre);
    }
  }
}

GW_SIMD void backward_rows(const BiasGeluBackward& a, int64_t begin, int64_t end, float* d_bias) {
  for (int64_t r = begin; r < end; ++r) {
    const float* pre = a.pre + r * a.width;
    float* dy = a.dy + r * a.width;
#pragma omp simd
    for (int64_t c = 0; c < a.width; ++c) {
      float d = dy[c] * gelu_derivative(pre[c]);
      dy[c] = d;
      d_bias[c] += d;
    }
  }
}

}  // namespace

void bias_gelu(const BiasGelu& a) {
  for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
}

void bias_gelu_backward(const BiasGeluBackward& a) {
  auto chunks = column_chunks(a.rows);
  parallel_for(chunks.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* d_bias = a.workspace + i * a.width;
      std::fill_n(d_bias, a.width, 0.0f);
      backward_rows(a, i * chunks.rows, std::min(a.rows, (i + 1) * chunks.rows), d_bias);
    }
  });
  combine_partial_sums(a.workspace, chunks.count, a.width, a.width, a.accumulate, a.d_bias);
}

}  // namespace gradwire::host
