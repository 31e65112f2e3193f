// Clipping on the host, vectorized, on all cores.
#include <algorithm>

#include "kernels/feedback/clip.h"
#include "kernels/math/bf16.h"
#include "kernels/simd/simd.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;  // elements per task

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
