// Host column_sum and bias_residual.
#include "kernels/vit/bias.h"

#include "kernels/simd/vector.h"

namespace gradwire::host {

namespace {

template <typename S>
GW_INLINE void add_rows_of(const S* x, int64_t rows, int64_t width, float* partial) {
  for (int64_t r = 0; r < rows; ++r, x += width) {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) partial[c] += widen(x[c]);
  }
}

GW_SIMD void add_rows(const float* x, int64_t rows, int64_t width, float* partial) {
  add_rows_of(x, rows, width, partial);
}
GW_SIMD void add_rows(const Bf16* x, int64_t rows, int64_t width, float* partial) {
  add_rows_of(x, rows, width, partial);
}

}  // namespace

template <typename S>
void column_sum(const ColumnSum<S>& a) {
  for (int64_t i = 0; i < a.batch; ++i) {
    float* const partial_sums = a.workspace + i * column_sum_workspace(a.rows, a.width);
    sum_chunks(a.rows, a.width, partial_sums, [&](int64_t begin, int64_t end, float* partial) {
      add_rows(a.x + i * a.stride + begin * a.width, end - begin, a.width, partial);
    });
  }
  if (!a.partial_only) combine_partial_sums(a.sums());
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

void combine_sums(const CombineSums& a) {
  for (const PartialSums& of : a.of) combine_partial_sums(of);
}

GW_INSTANTIATE_OP(column_sum, ColumnSum)
GW_INSTANTIATE_OP(bias_residual, BiasResidual)

}  // namespace gradwire::host
