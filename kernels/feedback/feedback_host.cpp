// Error feedback's passes on the host, vectorized, on all cores.
#include "kernels/feedback/feedback.h"
#include "kernels/math/bf16.h"
#include "kernels/simd/simd.h"
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

}  // namespace gradwire::host
