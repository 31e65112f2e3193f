// Host softmax and softmax_backward.
//
// Attention rows are short (17 or 50 entries in a row of 24 or 56); a loop of unknown length would spend its
// time in head and tail. Rows whose ld is a small multiple of 8 therefore use a path of constant length,
// which processes the whole row, padding included, and masks.
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "kernels/math/gelu.h"
#include "kernels/simd/vector.h"
#include "kernels/vit/softmax.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

template <int kLd, typename S>
GW_INLINE void short_row(const float* x, S* y, int width, float scale) {
  constexpr int kSteps = kLd / 8;
  F32x8 v[kSteps], highest = F32x8{} + kLowest, sum = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSteps; ++j) {
    v[j] = first_lanes<F32x8>(width - 8 * j) ? load<F32x8>(x + 8 * j) * scale : F32x8{} + kLowest;
    highest = larger(v[j], highest);
  }
  const float top = largest_of(highest);
#pragma GCC unroll 16
  for (int j = 0; j < kSteps; ++j) {
    v[j] = first_lanes<F32x8>(width - 8 * j) ? exp_float(v[j] - top) : F32x8{};
    sum += v[j];
  }
  const float inverse = 1.0f / sum_of(sum);
#pragma GCC unroll 16
  for (int j = 0; j < kSteps; ++j)
    store(y + 8 * j, first_lanes<F32x8>(width - 8 * j) ? v[j] * inverse : F32x8{});
}

template <int kLd, typename S>
GW_INLINE void short_row_backward(const S* y, S* dy, int width, float scale) {
  constexpr int kSteps = kLd / 8;
  F32x8 p[kSteps], d[kSteps], products = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSteps; ++j) {
    p[j] = load<F32x8>(y + 8 * j);
    d[j] = load<F32x8>(dy + 8 * j);
    products += first_lanes<F32x8>(width - 8 * j) ? p[j] * d[j] : F32x8{};
  }
  const float dot = sum_of(products);
#pragma GCC unroll 16
  for (int j = 0; j < kSteps; ++j) {
    store(dy + 8 * j, first_lanes<F32x8>(width - 8 * j) ? p[j] * scale * (d[j] - dot) : F32x8{});
  }
}

template <typename S>
GW_INLINE void any_row(float* x, S* y, int64_t width, int64_t ld, float scale) {
  float highest = kLowest;
#pragma omp simd reduction(max : highest)
  for (int64_t c = 0; c < width; ++c) {
    const float scaled = scale * x[c];
    highest = scaled > highest ? scaled : highest;
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < width; ++c) {
    const float e = exp_float(scale * x[c] - highest);
    x[c] = e;
    sum += e;
  }
  const float inverse = 1.0f / sum;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) y[c] = narrow<S>(x[c] * inverse);
  for (int64_t c = width; c < ld; ++c) y[c] = narrow<S>(0.0f);
}

template <typename S>
GW_INLINE void any_row_backward(const S* y, S* dy, int64_t width, int64_t ld, float scale) {
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t c = 0; c < width; ++c) dot += widen(y[c]) * widen(dy[c]);
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) dy[c] = narrow<S>(scale * widen(y[c]) * (widen(dy[c]) - dot));
  for (int64_t c = width; c < ld; ++c) dy[c] = narrow<S>(0.0f);
}

// Calls row(length, r) for rows [begin, end); length is a constant for short rows, else 0.
template <typename Row>
GW_INLINE void for_rows_of_length(int64_t ld, int64_t begin, int64_t end, const Row& row) {
  const auto rows = [&]<int kLd>(std::integral_constant<int, kLd> length) GW_HD_LAMBDA {
    if (kLd != 0 && kLd != ld) return false;
    for (int64_t r = begin; r < end; ++r) row(length, r);
    return true;
  };
  [&]<int... kLengths>(std::integer_sequence<int, kLengths...>) GW_HD_LAMBDA {
    (rows(std::integral_constant<int, kLengths>()) || ...);
  }
  (std::integer_sequence<int, 8, 16, 24, 32, 40, 56, 72, 0>());
}

template <typename S>
GW_SIMD void forward_rows(const Softmax<S>& a, int64_t begin, int64_t end) {
  const int width = static_cast<int>(a.width);
  const float scale = a.scale;
  for_rows_of_length(a.ld, begin, end,
                     [&]<int kLd>(std::integral_constant<int, kLd>, int64_t r) GW_HD_LAMBDA {
                       if constexpr (kLd > 0) {
                         short_row<kLd>(a.x + r * kLd, a.y + r * kLd, width, scale);
                       } else {
                         any_row(a.x + r * a.ld, a.y + r * a.ld, a.width, a.ld, scale);
                       }
                     });
}

template <typename S>
GW_SIMD void backward_rows(const SoftmaxBackward<S>& a, int64_t begin, int64_t end) {
  const int width = static_cast<int>(a.width);
  const float scale = a.scale;
  for_rows_of_length(a.ld, begin, end,
                     [&]<int kLd>(std::integral_constant<int, kLd>, int64_t r) GW_HD_LAMBDA {
                       if constexpr (kLd > 0) {
                         short_row_backward<kLd>(a.y + r * kLd, a.dy + r * kLd, width, scale);
                       } else {
                         any_row_backward(a.y + r * a.ld, a.dy + r * a.ld, a.width, a.ld, scale);
                       }
                     });
}

template <typename S>
GW_SIMD void loss_rows(const CrossEntropy<S>& a, int64_t begin, int64_t end) {
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

}  // namespace

template <typename S>
void softmax(const Softmax<S>& a) {
  for_rows(a.rows, a.ld, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
}

template <typename S>
void softmax_backward(const SoftmaxBackward<S>& a) {
  for_rows(a.rows, a.ld, [&](int64_t begin, int64_t end) { backward_rows(a, begin, end); });
}

GW_INSTANTIATE_OP(softmax, Softmax)
GW_INSTANTIATE_OP(softmax_backward, SoftmaxBackward)

template <typename S>
void cross_entropy(const CrossEntropy<S>& a) {
  for_rows(a.rows, a.classes, [&](int64_t begin, int64_t end) { loss_rows(a, begin, end); });
  if (!a.accumulate) a.totals[0] = a.totals[1] = 0.0;
  for (int64_t r = 0; r < a.rows; ++r) a.totals[0] += a.workspace[r];
  for (int64_t r = 0; r < a.rows; ++r) a.totals[1] += a.workspace[a.rows + r];
}

GW_INSTANTIATE_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::host
