// Scalar reference of the formulas in layer_norm.h, with every sum in double.
#include <cmath>
#include <vector>

#include "kernels/vit/layer_norm.h"
#include "kernels/vit/reference.h"

namespace gradwire::reference {

template <typename S>
void layer_norm(const LayerNorm<S>& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * stride;
    if (a.branch != nullptr) {
      for (int64_t c = 0; c < a.width; ++c) {
        a.sum[r * stride + c] = x[c] + (widen(a.branch[r * stride + c]) + a.branch_bias[c]);
      }
      x = a.sum + r * stride;
    }
    double mean = 0.0, variance = 0.0;
    for (int64_t c = 0; c < a.width; ++c) mean += x[c];
    mean /= static_cast<double>(a.width);
    for (int64_t c = 0; c < a.width; ++c) variance += (x[c] - mean) * (x[c] - mean);
    variance /= static_cast<double>(a.width);
    double rstd = 1.0 / std::sqrt(variance + a.eps);
    for (int64_t c = 0; c < a.width; ++c) {
      a.y[r * a.width + c] = rounded<S>((x[c] - mean) * rstd * a.gamma[c] + a.beta[c]);
    }
    a.mean[r] = static_cast<float>(mean);
    a.rstd[r] = static_cast<float>(rstd);
  }
}

template <typename S>
void layer_norm_backward(const LayerNormBackward<S>& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  std::vector<double> d_gamma(static_cast<size_t>(a.width)), d_beta(static_cast<size_t>(a.width)),
      dx_sum(static_cast<size_t>(a.width));
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * stride;
    const S* dy = a.dy + r * a.width;
    float* dx = a.dx + r * stride;
    double mean = a.mean[r], rstd = a.rstd[r], sum = 0.0, sum_normalized = 0.0;
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(widen(dy[c])) * a.gamma[c];
      sum += g;
      sum_normalized += g * normalized;
      d_gamma[static_cast<size_t>(c)] += widen(dy[c]) * normalized;
      d_beta[static_cast<size_t>(c)] += widen(dy[c]);
    }
    sum /= static_cast<double>(a.width);
    sum_normalized /= static_cast<double>(a.width);
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(widen(dy[c])) * a.gamma[c];
      store_sum(&dx[c], rstd * (g - sum - normalized * sum_normalized), a.accumulate_dx);
      dx_sum[static_cast<size_t>(c)] += dx[c];
      if (a.dx_rounded != nullptr) a.dx_rounded[r * stride + c] = narrow<S>(dx[c]);
    }
  }
  for (int64_t c = 0; c < a.width; ++c) {
    store_sum(&a.d_gamma[c], d_gamma[static_cast<size_t>(c)], a.accumulate);
    store_sum(&a.d_beta[c], d_beta[static_cast<size_t>(c)], a.accumulate);
    if (a.dx_sum != nullptr) store_sum(&a.dx_sum[c], dx_sum[static_cast<size_t>(c)], a.accumulate);
  }
}

GW_INSTANTIATE_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_OP(layer_norm_backward, LayerNormBackward)

}  // namespace gradwire::reference
