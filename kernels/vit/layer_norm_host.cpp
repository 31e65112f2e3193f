// Host layer_norm and layer_norm_backward: a row stays in cache, so the second pass over it is free.
#include <cmath>

#include "kernels/simd/vector.h"
#include "kernels/vit/layer_norm.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

template <typename S>
GW_SIMD void forward_rows(const LayerNorm<S>& a, int64_t begin, int64_t end) {
  const int64_t width = a.width, stride = a.x_stride != 0 ? a.x_stride : width;
  const float *gamma = a.gamma, *beta = a.beta;
  const float inverse_width = 1.0f / static_cast<float>(width);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.x + r * stride;
    S* y = a.y + r * width;
    if (a.branch != nullptr) {
      const S* branch = a.branch + r * stride;
      const float* bias = a.branch_bias;
      float* joined = a.sum + r * stride;
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) joined[c] = x[c] + (widen(branch[c]) + bias[c]);
      x = joined;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) sum += x[c];
    const float mean = sum * inverse_width;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t c = 0; c < width; ++c) squares += (x[c] - mean) * (x[c] - mean);
    const float rstd = 1.0f / std::sqrt(squares * inverse_width + a.eps);
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) y[c] = narrow<S>((x[c] - mean) * rstd * gamma[c] + beta[c]);
    a.mean[r] = mean;
    a.rstd[r] = rstd;
  }
}

// Adds the rows' contributions to this chunk's d_gamma and d_beta.
template <typename S>
GW_SIMD void backward_rows(const LayerNormBackward<S>& a, int64_t begin, int64_t end, float* sums) {
  float *const d_gamma = sums, *const d_beta = sums + a.width, *const dx_sum = sums + 2 * a.width;
  const int64_t width = a.width, stride = a.x_stride != 0 ? a.x_stride : width;
  const float* gamma = a.gamma;
  const float inverse_width = 1.0f / static_cast<float>(width);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.x + r * stride;
    const S* dy = a.dy + r * width;
    float* dx = a.dx + r * stride;
    const float mean = a.mean[r], rstd = a.rstd[r];
    float sum = 0.0f, sum_normalized = 0.0f;
#pragma omp simd reduction(+ : sum, sum_normalized)
    for (int64_t c = 0; c < width; ++c) {
      float normalized = (x[c] - mean) * rstd, g = widen(dy[c]) * gamma[c];
      sum += g;
      sum_normalized += g * normalized;
      d_gamma[c] += widen(dy[c]) * normalized;
      d_beta[c] += widen(dy[c]);
    }
    sum *= inverse_width;
    sum_normalized *= inverse_width;
    if (a.accumulate_dx) {
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        dx[c] += rstd * (widen(dy[c]) * gamma[c] - sum - (x[c] - mean) * rstd * sum_normalized);
      }
    } else {
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        dx[c] = rstd * (widen(dy[c]) * gamma[c] - sum - (x[c] - mean) * rstd * sum_normalized);
      }
    }
    if (a.dx_sum != nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) dx_sum[c] += dx[c];
    }
    if (a.dx_rounded == nullptr) continue;
    S* rounded = a.dx_rounded + r * stride;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) rounded[c] = narrow<S>(dx[c]);
  }
}

}  // namespace

template <typename S>
void layer_norm(const LayerNorm<S>& a) {
  for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
}

template <typename S>
void layer_norm_backward(const LayerNormBackward<S>& a) {
  sum_chunks(a.rows, 3 * a.width, a.workspace,
             [&](int64_t begin, int64_t end, float* sums) { backward_rows(a, begin, end, sums); });
  if (!a.partial_only) combine_partial_sums(a.sums());
}

GW_INSTANTIATE_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_OP(layer_norm_backward, LayerNormBackward)

}  // namespace gradwire::host
