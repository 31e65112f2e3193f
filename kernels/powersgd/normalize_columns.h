// Dion's second factor: the columns of R (cols, rank) divided by their norms, Q = R / (|R| + 1e-8), column by
// column. `q` also receives Q, times sqrt(rows / cols), so that P q^T is the step of a matrix whose spectral
// norm suits its shape (Ahn et al., arXiv 2504.05295). With `orthonormal`, Q is already the columns of R
// orthonormalized (Orth-Dion: Nakamori et al., arXiv 2605.16341), and `q` receives 0 for the columns of R
// that are 0, whose columns of Q are random directions.
//
// Bytes: 12 per element of R, in cache. Norms are in FP64 with sums of a fixed order. Flagged matrices are
// unchanged.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire {

struct NormalizeColumns {
  const MatrixTable* table = nullptr;
  float* q = nullptr;              // in: R; out: sqrt(rows / cols) Q
  float* basis = nullptr;          // out: Q; with `orthonormal`, in
  const int32_t* flags = nullptr;  // (table count)
  bool orthonormal = false;
};
GW_OP(normalize_columns, NormalizeColumns)

// Returns the factor for a column whose squares sum up to `squares`.
GW_HD float column_scale(double squares) {
  return static_cast<float>(1.0 / (sqrt(squares) + 1e-8));
}
GW_HD float shape_scale(int32_t rows, int32_t cols) {
  return static_cast<float>(sqrt(static_cast<double>(rows) / cols));
}

}  // namespace gradwire
