#include "kernels/simd/column_sum.h"

#include "kernels/simd/simd.h"

namespace gradwire::host {

namespace {

template <typename T>
GW_INLINE void combine_rows_of(const T* partial, int64_t count, int64_t stride, int64_t width,
                               bool accumulate, float* sum) {
  constexpr int64_t kTile = 256;
  for (int64_t begin = 0; begin < width; begin += kTile) {
    int64_t n = std::min(kTile, width - begin);
    float total[kTile] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T* row = partial + i * stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < n; ++c) total[c] += widen(row[c]);
    }
    for (int64_t c = 0; c < n; ++c) sum[begin + c] = accumulate ? sum[begin + c] + total[c] : total[c];
  }
}

GW_SIMD void combine_rows(const Bf16* partial, int64_t count, int64_t stride, int64_t width, bool accumulate,
                          float* sum) {
  combine_rows_of(partial, count, stride, width, accumulate, sum);
}

}  // namespace

GW_SIMD void combine_partial_sums(const float* partial, int64_t count, int64_t stride, int64_t width,
                                  bool accumulate, float* sum) {
  combine_rows_of(partial, count, stride, width, accumulate, sum);
}

void combine_partial_sums(const PartialSums& of) {
  for (size_t i = 0; i < of.sums.size(); ++i) {
    if (of.sums[i] == nullptr) continue;
    const int64_t first = static_cast<int64_t>(i) * of.width;
    if (of.partial_bf16 != nullptr)
      combine_rows(of.partial_bf16 + first, of.count, of.pitch, of.width, of.accumulate, of.sums[i]);
    else
      combine_partial_sums(of.partial + first, of.count, of.pitch, of.width, of.accumulate, of.sums[i]);
  }
}

}  // namespace gradwire::host
