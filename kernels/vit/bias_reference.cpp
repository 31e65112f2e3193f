// Scalar reference of the formulas in bias.h, with every sum in double.
#include "kernels/vit/bias.h"
#include "kernels/vit/reference.h"

namespace gradwire::reference {

template <typename S>
void bias_residual(const BiasResidual<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    double old = a.residual != nullptr ? a.residual[i] : 0.0;
    a.x[i] = static_cast<float>(old + widen(a.y[i]) + a.bias[i % a.width]);
  }
}

template <typename S>
void column_sum(const ColumnSum<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) sum += widen(a.x[r * a.width + c]);
    store_sum(&a.sum[c], sum, a.accumulate);
  }
}

GW_INSTANTIATE_OP(bias_residual, BiasResidual)
void combine_sums(const CombineSums& a) {
  for (const PartialSums& of : a.of) {
    for (size_t i = 0; i < of.sums.size(); ++i) {
      if (of.sums[i] == nullptr) continue;
      for (int64_t c = 0; c < of.width; ++c) {
        double sum = 0.0;
        for (int64_t row = 0; row < of.count; ++row) {
          const int64_t at = row * of.pitch + static_cast<int64_t>(i) * of.width + c;
          sum += of.partial_bf16 != nullptr ? widen(of.partial_bf16[at]) : of.partial[at];
        }
        store_sum(of.sums[i] + c, sum, of.accumulate);
      }
    }
  }
}

GW_INSTANTIATE_OP(column_sum, ColumnSum)

}  // namespace gradwire::reference
