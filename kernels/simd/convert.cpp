#include "kernels/simd/convert.h"

#include "kernels/simd/simd.h"

namespace gradwire::host {

GW_SIMD void widen_all(const Bf16* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}

GW_SIMD void narrow_all(const float* from, const Bf16* bias, int64_t count, Bf16* to) {
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<Bf16>(from[i] + widen(bias[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = narrow<Bf16>(from[i]);
  }
}

GW_SIMD void add_all(const float* x, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += x[i];
}

}  // namespace gradwire::host
