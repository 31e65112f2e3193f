// Orthonormalization on the host above rank kMaxSmallRank. A thread takes a matrix through all passes, so
// that the matrix stays in its cache. If there are too few matrices, they take each pass together; a task is
// a block of a Gram matrix, a factor, or some rows.
#include "kernels/powersgd/large_orthonormalize_simd.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/powersgd_simd.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

// A thread takes whole matrices if there are at least so many per thread: the last matrices leave threads
// idle.
constexpr int kMatricesPerThread = 8;
constexpr int kTasksPerThread = 4;
constexpr int kMaxBlockTiles = 4, kMaxRows = 1024, kFewestRows = 32;

using Tile = double[kSquareTile * kSquareTile];

struct LargeMatrix {
  int index;
  const MatrixDescriptor* d;
  LargeScratch scratch;
  const float* in;
  float* out;
  int32_t n;
};

void gram_part(const LargeMatrix& m, int pass, int tiles, int part) {
  static PerThread<AlignedMemory<double>> memory;
  int row = 0, column = 0;
  split_lower(part, row, column);
  const int32_t* const order = m.scratch.order(pass);
  const int size = tiles * kSquareTile;
  const auto count = [&](int block) { return std::min(size, m.d->rank - block * size); };
  gram_block({.a = m.in,
              .n = m.n,
              .rank = m.d->rank,
              .left = order + row * size,
              .right = order + column * size,
              .left_count = count(row),
              .right_count = count(column),
              .diagonal = row == column,
              .packed = memory.get().reserve(kGramRows * 2 * size),
              .out = m.scratch.tile(row * tiles, column * tiles),
              .stride = m.scratch.size});
}

// Returns whether A is finite: squares of floats are finite in double, and so is their sum.
bool finite_columns(const LargeMatrix& m) {
  for (int k = 0; k < m.d->rank; ++k) {
    if (!std::isfinite(m.scratch.square[int64_t{k} * m.scratch.size + k])) return false;
  }
  return true;
}

void copy_tile(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
  for (int i = 0; i < kSquareTile; ++i) {
    std::copy_n(from + i * from_stride, kSquareTile, to + i * to_stride);
  }
}

// Scales the columns of A in its Gram matrix to norm 1, and pads the matrix with the identity.
void scale_gram(const LargeScratch& s, int rank) {
  for (int64_t k = 0; k < s.size; ++k) {
    const double square = s.square[k * s.size + k];
    s.scale[k] = k < rank && square > 0.0 ? 1.0 / std::sqrt(square) : 0.0;
  }
  for (int64_t i = 0; i < s.size; ++i) {
    double* const row = s.square + i * s.size;
    for (int64_t j = 0; j <= i; ++j) row[j] *= s.scale[i] * s.scale[j];
    if (i >= rank) row[i] = 1.0;
  }
}

// Factors tile `j` on the diagonal and computes the tiles of L below it. Subtracts their products from the
// matrix.
double eliminate(const LargeScratch& s, int j) {
  alignas(64) Tile dense, packed;
  const int tiles = s.size / kSquareTile;
  int32_t* const dependent = s.dependent + j * kSquareTile;
  copy_tile(s.tile(j, j), s.size, dense, kSquareTile);
  const double smallest = factor_tile(dense, dependent);
  for (int64_t row = 0; row < kSquareTile; ++row) {  // L_jj^-T
    for (int k = 0; k < kSquareTile; ++k) s.tile(j, j)[row * s.size + k] = dense[k * kSquareTile + row];
  }
  pack_tile(s.tile(j, j), s.size, packed);
  for (int i = j + 1; i < tiles; ++i) {
    double* const to = s.tile(i, j);
    copy_tile(to, s.size, dense, kSquareTile);
    multiply_tiles({.sign = 1.0,
                    .a = dense,
                    .a_stride = kSquareTile,
                    .b = packed,
                    .c = to,
                    .c_stride = s.size,
                    .b_upper = true});
    for (int k = 0; k < kSquareTile; ++k) {
      for (int64_t row = 0; dependent[k] != 0 && row < kSquareTile; ++row) to[row * s.size + k] = 0.0;
    }
  }
  for (int k = j + 1; k < tiles; ++k) {
    pack_transposed(s.tile(k, j), s.size, packed);
    for (int i = k; i < tiles; ++i) {
      multiply_tiles({.sign = -1.0,
                      .a = s.tile(i, j),
                      .a_stride = s.size,
                      .b = packed,
                      .c = s.tile(i, k),
                      .c_stride = s.size,
                      .add = true,
                      .lower = i == k});
    }
  }
  return smallest;
}

// Computes the tiles of L^-T above tile `j` on the diagonal, which holds L_jj^-T.
void invert_above(const LargeScratch& s, int j) {
  alignas(64) Tile sum, packed;
  for (int m = 0; m < j; ++m) {
    pack_transposed(s.tile(j, m), s.size, packed);
    for (int k = 0; k <= m; ++k) {
      multiply_tiles({.sign = 1.0,
                      .a = s.tile(k, m),
                      .a_stride = s.size,
                      .b = packed,
                      .c = s.tile(k, j),
                      .c_stride = s.size,
                      .add = m > k,
                      .a_upper = m == k});
    }
  }
  pack_tile(s.tile(j, j), s.size, packed);
  for (int k = 0; k < j; ++k) {
    copy_tile(s.tile(k, j), s.size, sum, kSquareTile);
    multiply_tiles({.sign = -1.0,
                    .a = sum,
                    .a_stride = kSquareTile,
                    .b = packed,
                    .c = s.tile(k, j),
                    .c_stride = s.size,
                    .b_upper = true});
  }
}

// Replaces the Gram matrix by weights, and orders the columns for the next pass: columns that were ever
// re-seeded come last. dependent[k] becomes 1 + the number of earlier draws of a dependent column, else 0.
void factor(const LargeMatrix& m, int pass) {
  const LargeScratch& s = m.scratch;
  const int rank = m.d->rank;
  scale_gram(s, rank);
  double smallest = 1.0;
  for (int j = 0; j < s.size / kSquareTile; ++j) {
    smallest = std::min(smallest, eliminate(s, j));
    invert_above(s, j);
  }
  for (int64_t k = 0; k < rank; ++k) {
    double* const row = s.square + k * s.size;
    for (int64_t c = k; c < rank; ++c) row[c] = exact_weight(row[c] * s.scale[k]);
  }
  int32_t* const next = s.order(pass + 1);
  const int32_t* const order = s.order(pass);
  for (int k = 0; k < rank; ++k) {
    if (s.dependent[k] != 0) s.dependent[k] = ++s.attempts[order[k]];
  }
  std::copy_n(order, rank, next);
  std::stable_partition(next, next + rank, [&](int32_t column) { return s.attempts[column] == 0; });
  *s.state = smallest >= kFinalPivotOfRoundedWeights ? LargeState::done : LargeState::active;
}

void weigh(const Orthonormalize& a, const LargeMatrix& m, int pass, int64_t rows_of_part, int part) {
  static PerThread<AlignedMemory<double>> memory;
  const LargeScratch& s = m.scratch;
  const int rank = m.d->rank;
  const int64_t row0 = part * rows_of_part, rows = std::min<int64_t>(rows_of_part, m.n - row0);
  const int32_t* const order = s.order(pass);
  float* const out = m.out + row0 * rank;
  double* const weights = memory.get().reserve(packed_weights(rank));
  pack_weights(s.square, s.size, rank, weights);
  weigh_rows(
      {.in = m.in + row0 * rank, .out = out, .rows = rows, .rank = rank, .order = order, .weights = weights});
  const uint64_t step = a.step != nullptr ? *a.step : 0;
  for (int k = 0; k < rank; ++k) {
    if (s.dependent[k] == 0) continue;
    for (int64_t row = 0; row < rows; ++row) {
      out[row * rank + order[k]] =
          reseed_value(a.seed, step, m.d->seed_id, static_cast<int>(a.which), order[k], s.dependent[k] - 1,
                       static_cast<int32_t>(row0 + row));
    }
  }
}

std::vector<LargeMatrix> large_matrices(const Orthonormalize& a) {
  std::vector<LargeMatrix> all;
  for (int index = 0; index < a.table->count(); ++index) {
    const MatrixDescriptor& d = a.table->host()[index];
    if (d.rank <= kMaxSmallRank || (a.keep_flags && a.flags[index] != 0)) continue;
    const bool p = a.which == Factor::p;
    const int64_t offset = p ? d.p_offset : d.q_offset;
    all.push_back({index, &d, LargeScratch(a.scratch + d.scratch, d.rank), a.in + offset, a.out + offset,
                   p ? d.rows : d.cols});
    for (int k = 0; k < d.rank; ++k) {
      all.back().scratch.order(0)[k] = k;
      all.back().scratch.attempts[k] = 0;
    }
  }
  return all;
}

// Returns the largest size of a task, from `most` by halves to `least`, that makes at least `tasks` tasks.
template <typename Parts>
int size_of_task(const std::vector<LargeMatrix>& all, int most, int least, int64_t tasks,
                 const Parts& parts) {
  for (; most > least; most /= 2) {
    int64_t count = 0;
    for (const LargeMatrix& m : all) count += parts(m, most);
    if (count >= tasks) break;
  }
  return most;
}

// Runs all passes of matrices, with at least `tasks` tasks at a time if the matrices are large enough.
void run_passes(const Orthonormalize& a, std::vector<LargeMatrix> active, int64_t tasks) {
  const auto blocks = [](const LargeMatrix& m, int tiles) {
    return lower_tiles((tiles_of(m.d->rank) + tiles - 1) / tiles);
  };
  const auto row_parts = [](const LargeMatrix& m, int rows) { return (m.n + rows - 1) / rows; };
  for (int pass = 0; pass < kMaxOrthonormalizePasses && !active.empty(); ++pass) {
    const int tiles = size_of_task(active, kMaxBlockTiles, 1, tasks, blocks);
    for_parts(
        active, [&](const LargeMatrix& m) { return blocks(m, tiles); },
        [&](const LargeMatrix& m, int part) { gram_part(m, pass, tiles, part); });
    if (pass == 0) {
      for (const LargeMatrix& m : active) {
        if (!finite_columns(m) || !a.keep_flags) a.flags[m.index] = finite_columns(m) ? 0 : 1;
      }
      std::erase_if(active, std::not_fn(finite_columns));
    }
    parallel_for(static_cast<int64_t>(active.size()), 1,
                 [&](int64_t at, int64_t) { factor(active[static_cast<size_t>(at)], pass); });
    const int rows = size_of_task(active, kMaxRows, kFewestRows, tasks, row_parts);
    for_parts(
        active, [&](const LargeMatrix& m) { return row_parts(m, rows); },
        [&](const LargeMatrix& m, int part) { weigh(a, m, pass, rows, part); });
    std::erase_if(active, [](const LargeMatrix& m) { return *m.scratch.state == LargeState::done; });
    for (LargeMatrix& m : active) m.in = m.out;
  }
}

}  // namespace

void orthonormalize_large(const Orthonormalize& a) {
  const std::vector<LargeMatrix> all = large_matrices(a);
  const auto count = static_cast<int64_t>(all.size());
  if (count < int64_t{kMatricesPerThread} * host_threads()) {
    return run_passes(a, all, int64_t{kTasksPerThread} * host_threads());
  }
  parallel_for(count, 1, [&](int64_t at, int64_t) { run_passes(a, {all[static_cast<size_t>(at)]}, 1); });
}

}  // namespace gradwire::host
