// The loops of the host's orthonormalization above rank kMostSmallRank, compiled for several instruction
// sets.
#pragma once

#include <cstdint>

#include "kernels/powersgd/large_orthonormalize.h"

namespace gradwire::host {

// Arguments for a tile of A^T A: `left` and `right` are the columns of A that the tile's rows and columns
// belong to, at most kSquareTile each; other elements of the tile become 0.
struct GramTile {
  const float* a;  // (n, rank)
  int64_t n;
  int rank;
  const int32_t *left, *right;
  int left_count, right_count;
  bool diagonal;  // left is right; only elements on or below the diagonal are defined
  double* out;    // rows `stride` apart
  int64_t stride;
};
void gram_tile(const GramTile& a);

// Arguments for rows of out = in W, at most kWeightedRows. Row and column k of W belong to column order[k] of
// the matrices; W is upper triangular, with weights from exact_weight(). `out` may equal `in`.
inline constexpr int64_t kWeightedRows = 32;
struct WeightedRows {
  const float* in;  // (rows, rank)
  float* out;       // (rows, rank)
  int64_t rows;
  int rank;
  const int32_t* order;
  const double* weights;  // rows `stride` apart
  int64_t stride;
};
void weigh_rows(const WeightedRows& a);

// Adds sign * A B^T to C, for tiles whose rows are `stride` apart, except B^T, which is dense.
void add_tile_product(double sign, const double* a, const double* b_transposed, double* c, int64_t a_stride,
                      int64_t c_stride);

// Factors a dense tile: A = L L^T, with 1 in place of the pivots of dependent columns. Replaces A by L^-1,
// with zeros above the diagonal, and sets dependent[column]. Returns the smallest pivot, or 0 if a column is
// dependent.
double factor_tile(double* a, int32_t* dependent);

}  // namespace gradwire::host
