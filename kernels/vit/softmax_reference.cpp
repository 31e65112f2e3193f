// Scalar reference of the formulas in softmax.h, with every sum in double.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/vit/reference.h"
#include "kernels/vit/softmax.h"

namespace gradwire::reference {

template <typename S>
void softmax(const Softmax<S>& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * a.ld;
    S* y = a.y + r * a.ld;
    const double scale = a.scale;
    double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int64_t c = 0; c < a.width; ++c) highest = std::max(highest, scale * x[c]);
    for (int64_t c = 0; c < a.width; ++c) sum += std::exp(scale * x[c] - highest);
    for (int64_t c = 0; c < a.width; ++c) y[c] = rounded<S>(std::exp(scale * x[c] - highest) / sum);
    for (int64_t c = a.width; c < a.ld; ++c) y[c] = narrow<S>(0.0f);
  }
}

template <typename S>
void softmax_backward(const SoftmaxBackward<S>& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const S* y = a.y + r * a.ld;
    S* dy = a.dy + r * a.ld;
    double dot = 0.0;
    for (int64_t c = 0; c < a.width; ++c) dot += static_cast<double>(widen(y[c])) * widen(dy[c]);
    for (int64_t c = 0; c < a.width; ++c) dy[c] = rounded<S>(a.scale * widen(y[c]) * (widen(dy[c]) - dot));
    for (int64_t c = a.width; c < a.ld; ++c) dy[c] = narrow<S>(0.0f);
  }
}

GW_INSTANTIATE_OP(softmax, Softmax)
GW_INSTANTIATE_OP(softmax_backward, SoftmaxBackward)

// Scalar reference of the formulas in softmax.h, with every sum in double.

template <typename S>
void cross_entropy(const CrossEntropy<S>& a) {
  if (!a.accumulate) a.totals[0] = a.totals[1] = 0.0;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.logits + r * a.classes;
    const int64_t label = a.labels[r];
    if (label < 0 || label >= a.classes) {
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      a.totals[0] += kNan;
      if (a.d_logits != nullptr) std::fill_n(a.d_logits + r * a.classes, a.classes, narrow<S>(kNan));
      continue;
    }
    double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int64_t c = 0; c < a.classes; ++c) highest = std::max<double>(highest, x[c]);
    for (int64_t c = 0; c < a.classes; ++c) sum += std::exp(x[c] - highest);
    bool right = !std::isnan(sum);
    for (int64_t c = 0; c < a.classes; ++c) {
      if (c != label && (c < label ? x[c] >= x[label] : x[c] > x[label])) right = false;
    }
    a.totals[0] += std::log(sum) + highest - x[label];
    a.totals[1] += right ? 1.0 : 0.0;
    if (a.d_logits == nullptr) continue;
    for (int64_t c = 0; c < a.classes; ++c) {
      double p = std::exp(x[c] - highest) / sum;
      a.d_logits[r * a.classes + c] = rounded<S>(a.grad_scale * (p - (c == label ? 1.0 : 0.0)));
    }
  }
}

GW_INSTANTIATE_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::reference
