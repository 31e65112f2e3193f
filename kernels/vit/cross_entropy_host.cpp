// Host cross_entropy.
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/math/gelu.h"
#include "kernels/simd/vector.h"
#include "kernels/vit/cross_entropy.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

template <typename S>
GW_INLINE void loss_rows_of(const CrossEntropy<S>& a, int64_t begin, int64_t end) {
  const int64_t classes = a.classes;
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.logits + r * classes;
    S* d = a.d_logits != nullptr ? a.d_logits + r * classes : nullptr;
    const int64_t label = a.labels[r];
    if (label < 0 || label >= classes) {
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      a.workspace[r] = kNan;
      a.workspace[a.rows + r] = 0.0f;
      for (int64_t c = 0; d != nullptr && c < classes; ++c) d[c] = narrow<S>(kNan);
      continue;
    }
    float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
    for (int64_t c = 0; c < classes; ++c) highest = x[c] > highest ? x[c] : highest;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < classes; ++c) sum += exp_float(x[c] - highest);
    const float at_label = x[label];
    // The prediction is correct if all logits before the label are smaller and no logit after the label is
    // larger; a NaN is never correct.
    int wrong = 0;
#pragma omp simd reduction(+ : wrong)
    for (int64_t c = 0; c < label; ++c) wrong += x[c] < at_label ? 0 : 1;
#pragma omp simd reduction(+ : wrong)
    for (int64_t c = label; c < classes; ++c) wrong += x[c] <= at_label ? 0 : 1;
    a.workspace[r] = static_cast<float>(std::log(static_cast<double>(sum))) + (highest - at_label);
    a.workspace[a.rows + r] = wrong == 0 ? 1.0f : 0.0f;
    if (d == nullptr) continue;
    const float scale = a.grad_scale / sum;
#pragma omp simd
    for (int64_t c = 0; c < classes; ++c) d[c] = narrow<S>(scale * exp_float(x[c] - highest));
    if constexpr (std::is_same_v<S, float>) {
      d[label] -= a.grad_scale;
    } else {  // rounded once
      d[label] = narrow<S>(scale * exp_float(at_label - highest) - a.grad_scale);
    }
  }
}

GW_SIMD void loss_rows(const CrossEntropy<float>& a, int64_t begin, int64_t end) {
  loss_rows_of(a, begin, end);
}
GW_SIMD void loss_rows(const CrossEntropy<Bf16>& a, int64_t begin, int64_t end) {
  loss_rows_of(a, begin, end);
}

}  // namespace

template <typename S>
void cross_entropy(const CrossEntropy<S>& a) {
  for_rows(a.rows, a.classes, [&](int64_t begin, int64_t end) { loss_rows(a, begin, end); });
  if (!a.accumulate) a.totals[0] = a.totals[1] = 0.0;
  for (int64_t r = 0; r < a.rows; ++r) a.totals[0] += a.workspace[r];
  for (int64_t r = 0; r < a.rows; ++r) a.totals[1] += a.workspace[a.rows + r];
}

GW_INSTANTIATE_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::host
