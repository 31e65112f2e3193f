// Host softmax and softmax_backward.
#include <limits>

#include "kernels/host/rows.h"
#include "kernels/host/simd.h"
#include "kernels/math/exp.h"
#include "kernels/vit.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

GW_SIMD void forward_rows(const Softmax& a, int64_t begin, int64_t end) {
  const int64_t width = a.width;
  const float scale = a.scale;
  for (int64_t r = begin; r < end; ++r) {
    float* x = a.x + r * a.ld;
    float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
    for (int64_t c = 0; c < width; ++c) {
      float scaled = scale * x[c];
      highest = scaled > highest ? scaled : highest;
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) {
      float e = exp_float(scale * x[c] - highest);
      x[c] = e;
      sum += e;
    }
    const float inverse = 1.0f / sum;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) x[c] *= inverse;
    for (int64_t c = width; c < a.ld; ++c) x[c] = 0.0f;
  }
}

GW_SIMD void backward_rows(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  const int64_t width = a.width;
  const float scale = a.scale;
  for (int64_t r = begin; r < end; ++r) {
    const float* y = a.y + r * a.ld;
    float* dy = a.dy + r * a.ld;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t c = 0; c < width; ++c) dot += y[c] * dy[c];
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) dy[c] = scale * y[c] * (dy[c] - dot);
    for (int64_t c = width; c < a.ld; ++c) dy[c] = 0.0f;
  }
}

}  // namespace

void softmax(const Softmax& a) {
  for_rows(a.rows, a.ld, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
}

void softmax_backward(const SoftmaxBackward& a) {
  for_rows(a.rows, a.ld, [&](int64_t begin, int64_t end) { backward_rows(a, begin, end); });
}

}  // namespace gradwire::host
