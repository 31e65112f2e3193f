// Passes on the host, vectorized, on all cores; and the scalar reference of clipping.
#include "kernels/passes/passes.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 32 * 1024;  // elements per task

template <typename Op>
GW_INLINE Op without_rounded(Op op) {
  if constexpr (requires { op.rounded; }) op.rounded = nullptr;
  return op;
}

// Runs a pass in pieces. Rounds a piece's new parameters to BF16 while they are in cache.
template <typename Op>
void in_pieces(const Op& op, void (*range)(const Op&, int64_t begin, int64_t end)) {
  parallel_for(op.count, kGrain, [&](int64_t begin, int64_t end) {
    range(op, begin, end);
    if constexpr (requires { op.rounded; }) {
      if (op.rounded != nullptr) narrow_all(op.params + begin, nullptr, end - begin, op.rounded + begin);
    }
  });
}

#define GW_DEFINE(op, Args)                                            \
  GW_SIMD void op##_range(const Args& a, int64_t begin, int64_t end) { \
    without_rounded(a).each(ElementLoop{begin, end});                  \
  }                                                                    \
  }                                                                    \
  void op(const Args& a) {                                             \
    in_pieces(a, op##_range);                                          \
  }                                                                    \
  namespace {
GW_PASSES(GW_DEFINE, GW_NO_PASS, GW_NO_PASS)
GW_DEFINE(clip_scale, ClipScale)

GW_SIMD void update_range(const Ef21Update& a, int64_t begin, int64_t end) {
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

GW_SIMD void add_range(const MomentumAdd& a, int64_t begin, int64_t end) {
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

}  // namespace

void ef21_update(const Ef21Update& a) {
  in_pieces(a, update_range);
}

void momentum_add(const MomentumAdd& a) {
  in_pieces(a, add_range);
}

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
  clip_scale({a.grad, factor, a.count});
}

}  // namespace gradwire::host

namespace gradwire::reference {
namespace {

// Adds the upper half of the lanes to the lower one until one is left.
double halve(std::vector<double>& lanes) {
  for (size_t half = lanes.size() / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

double chunk_squares(const float* x, int64_t count) {
  std::vector<double> lanes(kClipLanes), folded(kClipFold);
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(x[i])) lanes[static_cast<size_t>(i) % kClipLanes] += double{x[i]} * x[i];
  }
  for (size_t j = 0; j < folded.size(); ++j) {
    folded[j] = clip_fold(lanes[4 * j], lanes[4 * j + 1], lanes[4 * j + 2], lanes[4 * j + 3]);
  }
  return halve(folded);
}

}  // namespace

void clip_norm(const ClipNorm& a) {
  std::vector<double> lanes(kClipFold);
  for (int64_t c = 0; c < clip_chunks(a.count); ++c) {
    const int64_t begin = c * kClipChunk;
    lanes[static_cast<size_t>(c) % kClipFold] +=
        chunk_squares(a.grad + begin, std::min<int64_t>(kClipChunk, a.count - begin));
  }
  const float factor = clip_factor(halve(lanes), a.max_norm);
  for (int64_t i = 0; factor != 1.0f && i < a.count; ++i) {
    if (std::isfinite(a.grad[i])) a.grad[i] *= factor;
  }
}

}  // namespace gradwire::reference

GW_ALLOW_FMA

namespace gradwire::host {
namespace {
GW_PASSES(GW_NO_PASS, GW_DEFINE, GW_NO_PASS)
}  // namespace
}  // namespace gradwire::host
