// FP16 to FP32 and back on the host: plain loops that the compiler vectorizes, on all cores.
#include "kernels/wire/fp16.h"

#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;

GW_SIMD void widen_piece(const uint16_t* halves, float* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = fp16_to_float(halves[i]);
}

GW_SIMD void narrow_piece(const float* values, uint16_t* out, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = float_to_fp16(values[i]);
}

}  // namespace

void fp16_widen(const Fp16Widen& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    widen_piece(a.halves + begin, a.out + begin, end - begin);
  });
}

void fp16_narrow(const Fp16Narrow& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    narrow_piece(a.values + begin, a.out + begin, end - begin);
  });
}

}  // namespace gradwire::host
