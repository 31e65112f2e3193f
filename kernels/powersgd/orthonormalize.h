// Orthonormalizes the columns of many tall thin matrices in one call: CholeskyQR2 with sums in FP64.
//
// Per matrix A (n, r), row-major, n >= r: scale the columns, G = A^T A and its Cholesky factor in FP64, A <-
// A L^-T. These steps repeat until the factor's pivots show that the columns are orthonormal: one pass for
// well-conditioned columns, more after a re-seed. Columns are FP32 in memory. Orthogonality error about 5e-8
// up to a condition number of 1e8 (docs/numerics.md).
//
// A column that is zero, or depends on the previous columns to within FP64 rounding, is replaced by a random
// direction orthogonal to the other columns. The direction is drawn from philox(seed, seed_id, ...) and
// *step, so that all ranks draw the same direction. Zero columns can therefore recover. There are always r
// orthonormal columns.
//
// A matrix that holds a NaN or Inf is flagged: flags[i] = 1 and `out` is unchanged (pass out == in to keep
// the input). Other matrices write flags[i] = 0. With keep_flags, flags are never cleared, and a matrix that
// is already flagged is skipped.
//
// Up to rank kMostSmallRank one task, or one block on CUDA, orthonormalizes a matrix. Above, the arithmetic
// is the limit: tasks share a matrix, by tiles of the Gram matrix and by rows, and its factor is computed by
// tiles in `scratch` (large_orthonormalize.h).
//
// Bytes: 4 * n * r read twice and written once per pass; at PowerSGD's sizes in cache. Deterministic, and
// independent of the number of threads. In place (out == in) is allowed.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire {

enum class Factor : uint8_t { p, q };

struct Orthonormalize {
  // which == p: matrices are (rows, rank) at p_offset; q: (cols, rank) at q_offset.
  const MatrixTable* table = nullptr;
  Factor which = Factor::p;
  const float* in = nullptr;
  float* out = nullptr;
  int32_t* flags = nullptr;  // (table count) out
  bool keep_flags = false;
  uint64_t seed = 0;
  const uint64_t* step = nullptr;  // device memory; null means 0
  double* scratch = nullptr;       // (table->scratch_doubles()); contents are lost
};
GW_OP(orthonormalize, Orthonormalize)

// Orthonormalize the matrices above rank kMostSmallRank; part of orthonormalize().
namespace host {
void orthonormalize_large(const Orthonormalize& args);
}
namespace cuda {
void orthonormalize_large(CudaStream stream, const Orthonormalize& args);
}

// Dion's second factor: the columns of R (cols, rank) divided by their norms, Q = R / (|R| + 1e-8), column by
// column. `q` also receives Q, times sqrt(rows / cols), so that P q^T is the step of a matrix whose spectral
// norm suits its shape (Ahn et al., arXiv 2504.05295). With `orthonormal`, Q is already the columns of R
// orthonormalized (Orth-Dion: Nakamori et al., arXiv 2605.16341), and `q` receives 0 for the columns of R
// that are 0, whose columns of Q are random directions.
//
// Bytes: 12 per element of R, in cache. Norms are in FP64 with sums of a fixed order. Flagged matrices are
// unchanged.

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
