// Host column_sum and bias_residual.
#include "kernels/simd/column_sum.h"

#include <algorithm>

#include "kernels/math/column_chunks.h"
#include "kernels/simd/rows.h"
#include "kernels/simd/simd.h"
#include "kernels/vit/bias.h"

namespace gradwire::host {

namespace {

template <typename S>
GW_INLINE void add_rows_of(const S* x, int64_t rows, int64_t width, float* partial) {
  for (int64_t r = 0; r < rows; ++r, x += width) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) partial[c] += widen(x[c]);
  }
}

}  // namespace

GW_SIMD void add_rows(const float* x, int64_t rows, int64_t width, float* partial) {
  add_rows_of(x, rows, width, partial);
}
GW_SIMD void add_rows(const Bf16* x, int64_t rows, int64_t width, float* partial) {
  add_rows_of(x, rows, width, partial);
}

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

template <typename S>
void column_sum(const ColumnSum<S>& a) {
  auto chunks = column_chunks(a.rows);
  parallel_for(chunks.count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* partial = a.workspace + i * a.width;
      std::fill_n(partial, a.width, 0.0f);
      add_rows(a.x + i * chunks.rows * a.width, std::min(chunks.rows, a.rows - i * chunks.rows), a.width,
               partial);
    }
  });
  combine_partial_sums(a.workspace, chunks.count, a.width, a.width, a.accumulate, a.sum);
}

namespace {

template <typename S>
GW_INLINE void bias_residual_rows_of(const BiasResidual<S>& a, int64_t begin, int64_t end) {
  const float* bias = a.bias;
  for (int64_t r = begin; r < end; ++r) {
    const S* y = a.y + r * a.width;
    float* x = a.x + r * a.width;
    if (a.residual == nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < a.width; ++c) x[c] = widen(y[c]) + bias[c];
    } else {
      const float* residual = a.residual + r * a.width;
#pragma omp simd
      for (int64_t c = 0; c < a.width; ++c) x[c] = residual[c] + (widen(y[c]) + bias[c]);
    }
  }
}

GW_SIMD void bias_residual_rows(const BiasResidual<float>& a, int64_t begin, int64_t end) {
  bias_residual_rows_of(a, begin, end);
}
GW_SIMD void bias_residual_rows(const BiasResidual<Bf16>& a, int64_t begin, int64_t end) {
  bias_residual_rows_of(a, begin, end);
}

}  // namespace

template <typename S>
void bias_residual(const BiasResidual<S>& a) {
  for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) { bias_residual_rows(a, begin, end); });
}

GW_INSTANTIATE_OP(column_sum, ColumnSum)
GW_INSTANTIATE_OP(bias_residual, BiasResidual)

}  // namespace gradwire::host
