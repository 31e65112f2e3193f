#include "kernels/simd/column_sum.h"

#include "kernels/simd/simd.h"

namespace gradwire::host {

GW_SIMD void combine_partial_sums(const float* partial, int64_t count, int64_t stride, int64_t width,
                                  bool accumulate, float* sum) {
  constexpr int64_t kTile = 256;
  for (int64_t begin = 0; begin < width; begin += kTile) {
    int64_t n = std::min(kTile, width - begin);
    float total[kTile] = {};
    for (int64_t i = 0; i < count; ++i) {
      const float* row = partial + i * stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) total[c] += row[c];
    }
    for (int64_t c = 0; c < n; ++c) sum[begin + c] = accumulate ? sum[begin + c] + total[c] : total[c];
  }
}

void combine_partial_sums(const PartialSums& of) {
  for (size_t i = 0; i < of.sums.size(); ++i) {
    if (of.sums[i] == nullptr) continue;
    combine_partial_sums(of.partial + static_cast<int64_t>(i) * of.width, of.count, of.pitch, of.width,
                         of.accumulate, of.sums[i]);
  }
}

}  // namespace gradwire::host
