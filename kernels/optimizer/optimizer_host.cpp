// Host optimizer steps: one pass over the parameters.
#include <cmath>

#include "kernels/optimizer/optimizer.h"
#include "kernels/simd/vector.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

GW_SIMD void sgd_range(const SgdStep& a, int64_t begin, int64_t end) {
  float *w = a.params, *v = a.velocity;
  const float* g = a.grads;
  const float lr = a.scalars->lr, momentum = a.momentum, decay = a.weight_decay;
  if (v == nullptr) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) w[i] -= lr * (g[i] + decay * w[i]);
  } else {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      float velocity = momentum * v[i] + (g[i] + decay * w[i]);
      v[i] = velocity;
      w[i] -= lr * velocity;
    }
  }
}

GW_SIMD void adamw_range(const AdamWStep& a, int64_t begin, int64_t end) {
  float *w = a.params, *m = a.m, *v = a.v;
  const float* g = a.grads;
  const float b1 = a.beta1, b2 = a.beta2, eps = a.eps, c1 = 1.0f - b1, c2 = 1.0f - b2;
  const OptimizerScalars s = *a.scalars;
  const float keep = 1.0f - s.lr * a.weight_decay, step = s.lr / s.correction1;
  const float root_correction = 1.0f / std::sqrt(s.correction2);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    float first = b1 * m[i] + c1 * g[i], second = b2 * v[i] + c2 * g[i] * g[i];
    m[i] = first;
    v[i] = second;
    w[i] = keep * w[i] - step * first / (std::sqrt(second) * root_correction + eps);
  }
}

GW_SIMD void round_range(const float* params, Bf16* rounded, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) rounded[i] = narrow<Bf16>(params[i]);
}

constexpr int64_t kGrain = 32768;

// Rounds a piece's new parameters to BF16 while they are in cache.
template <typename Args>
void step(const Args& a, void (*range)(const Args&, int64_t begin, int64_t end)) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    range(a, begin, end);
    if (a.rounded != nullptr) round_range(a.params, a.rounded, begin, end);
  });
}

}  // namespace

void sgd_step(const SgdStep& a) {
  step(a, sgd_range);
}

void adamw_step(const AdamWStep& a) {
  step(a, adamw_range);
}

}  // namespace gradwire::host
