// Orthonormalization on the host above rank kMostSmallRank. All matrices take each pass together; a task is a
// tile of a Gram matrix, a factor, or some rows, so that few large matrices use all cores too.
#include "kernels/powersgd/large_orthonormalize.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/math/orthonormalize.h"
#include "kernels/powersgd/large_orthonormalize_simd.h"
#include "kernels/powersgd/orthonormalize.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

using Tile = double[kSquareTile * kSquareTile];

struct LargeMatrix {
  int index;
  const MatrixDescriptor* d;
  LargeScratch scratch;
  const float* in;
  float* out;
  int32_t n;
};

// Runs body(matrix, part) for all parts of the matrices that are active. `parts` counts a matrix's parts.
template <typename Parts, typename Body>
void for_parts(const std::vector<LargeMatrix>& all, const Parts& parts, const Body& body) {
  std::vector<int64_t> first{0};
  for (const LargeMatrix& m : all) first.push_back(first.back() + parts(m));
  parallel_for(first.back(), 1, [&](int64_t at, int64_t) {
    const auto after = std::upper_bound(first.begin(), first.end(), at);
    const auto i = static_cast<size_t>(after - first.begin()) - 1;
    body(all[i], static_cast<int>(at - first[i]));
  });
}

void gram_part(const LargeMatrix& m, int pass, int part) {
  int row = 0, column = 0;
  split_lower(part, row, column);
  const int32_t* const order = m.scratch.order(pass);
  const auto count = [&](int tile) { return std::min(kSquareTile, m.d->rank - tile * kSquareTile); };
  gram_tile({.a = m.in,
             .n = m.n,
             .rank = m.d->rank,
             .left = order + row * kSquareTile,
             .right = order + column * kSquareTile,
             .left_count = count(row),
             .right_count = count(column),
             .diagonal = row == column,
             .out = m.scratch.tile(row, column),
             .stride = m.scratch.size});
}

// Returns whether A is finite: squares of floats are finite in double, and so is their sum.
bool finite_columns(const LargeMatrix& m) {
  for (int k = 0; k < m.d->rank; ++k) {
    if (!std::isfinite(m.scratch.square[int64_t{k} * m.scratch.size + k])) return false;
  }
  return true;
}

void transpose(const double* from, int64_t stride, Tile& to) {
  for (int i = 0; i < kSquareTile; ++i) {
    for (int j = 0; j < kSquareTile; ++j) to[j * kSquareTile + i] = from[i * stride + j];
  }
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
  alignas(64) Tile factor, other, product;
  int32_t dependent[kSquareTile];
  copy_tile(s.tile(j, j), s.size, factor, kSquareTile);
  const double smallest = factor_tile(factor, dependent);
  std::copy_n(dependent, kSquareTile, s.dependent + j * kSquareTile);
  transpose(factor, kSquareTile, other);  // L_jj^-T
  copy_tile(other, kSquareTile, s.tile(j, j), s.size);
  for (int i = j + 1; i < s.size / kSquareTile; ++i) {
    std::fill_n(product, kSquareTile * kSquareTile, 0.0);
    add_tile_product(1.0, s.tile(i, j), other, product, s.size, kSquareTile);
    for (int at = 0; at < kSquareTile * kSquareTile; ++at) {
      if (dependent[at % kSquareTile] != 0) product[at] = 0.0;
    }
    copy_tile(product, kSquareTile, s.tile(i, j), s.size);
  }
  for (int k = j + 1; k < s.size / kSquareTile; ++k) {
    transpose(s.tile(k, j), s.size, other);
    for (int i = k; i < s.size / kSquareTile; ++i) {
      add_tile_product(-1.0, s.tile(i, j), other, s.tile(i, k), s.size, s.size);
    }
  }
  return smallest;
}

// Computes the tiles of L^-T above tile `j` on the diagonal, which holds L_jj^-T.
void invert_above(const LargeScratch& s, int j) {
  alignas(64) Tile sum, other;
  for (int k = 0; k < j; ++k) {
    std::fill_n(sum, kSquareTile * kSquareTile, 0.0);
    for (int m = k; m < j; ++m) {
      transpose(s.tile(j, m), s.size, other);
      add_tile_product(1.0, s.tile(k, m), other, sum, s.size, kSquareTile);
    }
    copy_tile(s.tile(j, j), s.size, other, kSquareTile);
    for (int i = 0; i < kSquareTile; ++i) std::fill_n(s.tile(k, j) + int64_t{i} * s.size, kSquareTile, 0.0);
    add_tile_product(-1.0, sum, other, s.tile(k, j), kSquareTile, s.size);
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

void weigh(const Orthonormalize& a, const LargeMatrix& m, int pass, int part) {
  const LargeScratch& s = m.scratch;
  const int rank = m.d->rank;
  const int64_t row0 = part * kWeightedRows, rows = std::min<int64_t>(kWeightedRows, m.n - row0);
  const int32_t* const order = s.order(pass);
  float* const out = m.out + row0 * rank;
  weigh_rows({.in = m.in + row0 * rank,
              .out = out,
              .rows = rows,
              .rank = rank,
              .order = order,
              .weights = s.square,
              .stride = s.size});
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
    if (d.rank <= kMostSmallRank || (a.keep_flags && a.flags[index] != 0)) continue;
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

}  // namespace

void orthonormalize_large(const Orthonormalize& a) {
  std::vector<LargeMatrix> active = large_matrices(a);
  for (int pass = 0; pass < kMaxOrthonormalizePasses && !active.empty(); ++pass) {
    for_parts(
        active, [](const LargeMatrix& m) { return lower_tiles(tiles_of(m.d->rank)); },
        [&](const LargeMatrix& m, int part) { gram_part(m, pass, part); });
    if (pass == 0) {
      for (const LargeMatrix& m : active) {
        if (!finite_columns(m) || !a.keep_flags) a.flags[m.index] = finite_columns(m) ? 0 : 1;
      }
      std::erase_if(active, [&](const LargeMatrix& m) { return !finite_columns(m); });
    }
    for_parts(
        active, [](const LargeMatrix&) { return 1; }, [&](const LargeMatrix& m, int) { factor(m, pass); });
    for_parts(
        active, [](const LargeMatrix& m) { return (m.n + kWeightedRows - 1) / kWeightedRows; },
        [&](const LargeMatrix& m, int part) { weigh(a, m, pass, part); });
    std::erase_if(active, [](const LargeMatrix& m) { return *m.scratch.state == LargeState::done; });
    for (LargeMatrix& m : active) m.in = m.out;
  }
}

}  // namespace gradwire::host
