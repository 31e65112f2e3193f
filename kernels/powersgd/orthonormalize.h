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
// Up to rank kMaxSmallRank one task, or one block on CUDA, orthonormalizes a matrix. Above, the arithmetic
// is the limit: tasks share a matrix, by tiles of the Gram matrix and by rows, and its factor is computed by
// tiles in `scratch`.
//
// Bytes: 4 * n * r read twice and written once per pass; at PowerSGD's sizes in cache. Deterministic, and
// independent of the number of threads. In place (out == in) is allowed.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/math/random.h"
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
  double* scratch = nullptr;       // (table->scratch_doubles()), 16-byte aligned; contents are lost
};
GW_OP(orthonormalize, Orthonormalize)

// Orthonormalize the matrices above rank kMaxSmallRank; part of orthonormalize().
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

// Definitions shared by the host and the CUDA orthonormalization: when a column counts as dependent, when a
// pass is final, and the random values of a re-seeded column.

// All pivots below are of the Gram matrix with columns scaled to norm 1, so they are squared sines.

// At or below this pivot, a column depends on the previous columns: only the rounding of its FP32 entries is
// left.
inline constexpr double kDependentPivot = 1e-14;
// A pass loses about eps64 / pivot of orthogonality. At or above this pivot, the result is final: the loss is
// 1e-10, far below the rounding of the FP32 result. Below this pivot, another pass follows.
inline constexpr double kFinalPivot = 1e-6;
// The same above rank kMaxSmallRank, where weights are rounded to 2^-30 (exact_weight): the loss is below
// 1e-8.
inline constexpr double kFinalPivotOfRoundedWeights = 1e-2;
// Two passes suffice up to a condition number of 1e8, plus one pass per re-seeding. Bad random directions,
// which are rare, need more passes.
inline constexpr int kMaxOrthonormalizePasses = 16;

// Returns row `row` of the random direction that replaces `column`; approximately normal. `attempt` counts
// the column's re-seedings.
GW_HD float reseed_value(uint64_t seed, uint64_t step, int32_t seed_id, int which, int column, int attempt,
                         int32_t row) {
  uint64_t stream = (static_cast<uint64_t>(static_cast<uint32_t>(seed_id)) << 32) |
                    (static_cast<uint64_t>(which & 0xff) << 24) |
                    (static_cast<uint64_t>(attempt & 0xff) << 16) | static_cast<uint64_t>(column & 0xffff);
  return rough_normal(philox(seed, stream, (step << 32) | static_cast<uint32_t>(row)));
}

// Rounds a weight to 29 bits, so that its product with a float is exact in FP64. A sum of products then has
// the same bits with and without fused multiply-adds, and therefore on every host.
GW_HD double exact_weight(double weight) {
  constexpr uint64_t kDropped = (uint64_t{1} << 24) - 1;
#ifdef __CUDA_ARCH__
  const auto bits = static_cast<uint64_t>(__double_as_longlong(weight));
  return __longlong_as_double(static_cast<long long>((bits + kDropped / 2 + 1) & ~kDropped));
#else
  return std::bit_cast<double>((std::bit_cast<uint64_t>(weight) + kDropped / 2 + 1) & ~kDropped);
#endif
}

// Orthonormalization above rank kMaxSmallRank: the scratch memory of a matrix, the same on host and CUDA.
//
// A pass computes the lower triangle of the Gram matrix, tile by tile, into `square`; the factor L overwrites
// the Gram matrix, and the weights L^-T are stored in the upper triangle, with the tiles on the diagonal.
// Rows and columns of `square` are in the order of elimination, padded with the identity to whole tiles.

inline constexpr int kMaxSmallRank = 64;
inline constexpr int kSquareTile = 64;

GW_HD int tiles_of(int rank) {
  return (rank + kSquareTile - 1) / kSquareTile;
}

// Returns the number of tiles on or below the diagonal.
GW_HD int lower_tiles(int tiles) {
  return tiles * (tiles + 1) / 2;
}

// Returns the size of a matrix's scratch memory; 0 for small ranks.
GW_HD int64_t large_scratch_doubles(int rank) {
  const int64_t size = int64_t{tiles_of(rank)} * kSquareTile;
  return rank > kMaxSmallRank ? size * (size + 4) : 0;
}

// What a pass has left to do for a matrix.
enum class LargeState : int32_t { active, last_rows, done };

struct LargeScratch {
  int size;        // the rank, rounded up to whole tiles
  double* square;  // (size, size)
  double* scale;   // (size) 1 / norm of each column, on CUDA its square
  int32_t *orders, *attempts, *dependent;
  LargeState* state;

  GW_HD LargeScratch(double* scratch, int rank)
      : size(tiles_of(rank) * kSquareTile),
        square(scratch),
        scale(square + static_cast<int64_t>(size) * size),
        orders(reinterpret_cast<int32_t*>(scale + size)),
        attempts(orders + 2 * size),
        dependent(attempts + size),
        state(reinterpret_cast<LargeState*>(dependent + size)) {}
  // Returns the elimination order of a pass, (size). The factor of a pass writes the next pass's order while
  // this pass's order is still in use.
  GW_HD int32_t* order(int pass) const { return orders + pass % 2 * size; }
  GW_HD double* tile(int row, int column) const {
    return square + (static_cast<int64_t>(row) * size + column) * kSquareTile;
  }
};

// Splits the index of a tile on or below the diagonal into its row and column.
GW_HD void split_lower(int index, int& row, int& column) {
  row = 0;
  while (lower_tiles(row + 1) <= index) ++row;
  column = index - lower_tiles(row);
}

}  // namespace gradwire
