// Passes on the host, vectorized, on all cores; and the scalar reference, one element at a time.
#include "kernels/passes/passes.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;  // elements per task

// Runs a pass in pieces. Rounds a piece's new parameters to BF16 while they are in cache.
template <typename Op>
void in_pieces(Op op, void (*range)(const Op&, int64_t begin, int64_t end)) {
  Bf16* rounded = nullptr;
  if constexpr (requires { op.rounded; }) std::swap(rounded, op.rounded);
  parallel_for(op.count, kGrain, [&](int64_t begin, int64_t end) {
    range(op, begin, end);
    if constexpr (requires { op.rounded; }) {
      if (rounded != nullptr) narrow_all(op.params + begin, nullptr, end - begin, rounded + begin);
    }
  });
}

#define GW_DEFINE(op, Args)                                            \
  GW_SIMD void op##_range(const Args& a, int64_t begin, int64_t end) { \
    a.each(ElementLoop{begin, end});                                   \
  }                                                                    \
  }                                                                    \
  void op(const Args& a) {                                             \
    in_pieces(a, op##_range);                                          \
  }                                                                    \
  namespace {
GW_PASSES(GW_DEFINE, GW_NO_PASS, GW_NO_PASS)
GW_DEFINE(clip_scale, ClipScale)

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

void ef21_difference(const Ef21Difference& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { difference_part(a, begin, end); });
}

void ef21_update(const Ef21Update& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { update_part(a, begin, end); });
}

void momentum_add(const MomentumAdd& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { add_part(a, begin, end); });
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

template <typename Op>
void one_by_one(const Op& op) {
  for (int64_t i = 0; i < op.count; ++i) op.each(host::ElementLoop{i, i + 1});
}

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
  if (factor != 1.0f) one_by_one(ClipScale{a.grad, factor, a.count});
}

void ef21_difference(const Ef21Difference& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (std::isfinite(a.grad[i])) {
      a.kept[i] = a.grad[i] - a.unit * a.estimate[i];
      a.grad[i] = a.kept[i] - a.residual[i];
    } else {
      a.kept[i] = a.residual[i];
    }
    a.residual[i] = 0.0f;
  }
}

void ef21_update(const Ef21Update& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const float next = a.estimate[i] + a.grad[i];
    const float deviation = a.kept[i] - a.residual[i] - a.unit * a.grad[i];
    a.residual[i] = std::isfinite(next) && std::isfinite(deviation) ? deviation : 0.0f;
    if (std::isfinite(next)) a.estimate[i] = next;
    a.grad[i] = next;
  }
}

#define GW_REFERENCE(op, Args) \
  void op(const Args& a) {     \
    one_by_one(a);             \
  }
GW_PASSES(GW_REFERENCE, GW_REFERENCE, GW_REFERENCE)

}  // namespace gradwire::reference

GW_ALLOW_FMA

namespace gradwire::host {
namespace {
GW_PASSES(GW_NO_PASS, GW_DEFINE, GW_NO_PASS)
}  // namespace
}  // namespace gradwire::host
