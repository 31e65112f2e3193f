// Error feedback's passes on the host, vectorized, on all cores.
#include <algorithm>

#include "kernels/feedback/feedback.h"
#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;  // elements per task

GW_SIMD void difference_part(const Ef21Difference& a, int64_t begin, int64_t end) {
  float *const grad = a.grad, *const residual = a.residual, *const kept = a.kept;
  const float* const estimate = a.estimate;
  const float unit = a.unit;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = grad[i], d = residual[i];
    const bool finite = is_finite(g);
    const float rest = finite ? g - unit * estimate[i] : d;
    kept[i] = rest;
    grad[i] = finite ? rest - d : g;
    residual[i] = 0.0f;
  }
}

GW_SIMD void update_part(const Ef21Update& a, int64_t begin, int64_t end) {
  float *const grad = a.grad, *const residual = a.residual, *const estimate = a.estimate;
  const float* const kept = a.kept;
  const float unit = a.unit;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float mean = grad[i], old = estimate[i], next = old + mean;
    const float deviation = kept[i] - residual[i] - unit * mean;
    const bool finite = is_finite(next);
    residual[i] = finite && is_finite(deviation) ? deviation : 0.0f;
    estimate[i] = finite ? next : old;
    grad[i] = next;
  }
}

GW_SIMD void add_part(const MomentumAdd& a, int64_t begin, int64_t end) {
  float *const grad = a.grad, *const momentum = a.momentum;
  const float factor = a.factor;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = grad[i], old = momentum[i], next = factor * old + g;
    const bool finite = is_finite(g);
    momentum[i] = !finite ? old : is_finite(next) ? next : 0.0f;
    grad[i] = finite ? next : g;
  }
}

GW_SIMD void mask_part(const MomentumMask& a, int64_t begin, int64_t end) {
  const float* const grad = a.grad;
  float* const momentum = a.momentum;
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) momentum[i] = grad[i] != 0.0f ? 0.0f : momentum[i];
}

}  // namespace

void ef21_difference(const Ef21Difference& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { difference_part(a, begin, end); });
}

void ef21_update(const Ef21Update& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { update_part(a, begin, end); });
}

void momentum_add(const MomentumAdd& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { add_part(a, begin, end); });
}

void momentum_mask(const MomentumMask& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { mask_part(a, begin, end); });
}

// Clipping on the host, vectorized, on all cores.

namespace {

double halve(double (&lanes)[kClipFold]) {
  for (int half = kClipFold / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

GW_SIMD void add_squares(const float* x, int count, double* lanes) {
#pragma omp simd
  for (int j = 0; j < count; ++j) {
    const double value = is_finite(x[j]) ? static_cast<double>(x[j]) : 0.0;
    lanes[j] += value * value;
  }
}

double chunk_squares(const float* x, int64_t count) {
  double lanes[kClipLanes] = {}, folded[kClipFold];
  for (int64_t at = 0; at < count; at += kClipLanes) {
    add_squares(x + at, static_cast<int>(std::min<int64_t>(kClipLanes, count - at)), lanes);
  }
  for (int j = 0; j < kClipFold; ++j) {
    folded[j] = clip_fold(lanes[4 * j], lanes[4 * j + 1], lanes[4 * j + 2], lanes[4 * j + 3]);
  }
  return halve(folded);
}

GW_SIMD void scale_part(float* x, int64_t begin, int64_t end, float factor) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) x[i] = is_finite(x[i]) ? x[i] * factor : x[i];
}

}  // namespace

void clip_norm(const ClipNorm& a) {
  const int64_t chunks = clip_chunks(a.count);
  parallel_for(chunks, kGrain / kClipChunk, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t begin = c * kClipChunk;
      a.chunks[c] = chunk_squares(a.grad + begin, std::min<int64_t>(kClipChunk, a.count - begin));
    }
  });
  double lanes[kClipFold] = {};
  for (int64_t c = 0; c < chunks; ++c) lanes[c % kClipFold] += a.chunks[c];
  const float factor = clip_factor(halve(lanes), a.max_norm);
  if (factor == 1.0f) return;
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { scale_part(a.grad, begin, end, factor); });
}

}  // namespace gradwire::host
