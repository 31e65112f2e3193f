// Orthonormalization above rank kMostSmallRank: the scratch memory of a matrix, the same on host and CUDA.
//
// A pass computes the lower triangle of the Gram matrix, tile by tile, into `square`; the factor L overwrites
// the Gram matrix, and the weights L^-T are stored in the upper triangle, with the tiles on the diagonal.
// Rows and columns of `square` are in the order of elimination, padded with the identity to whole tiles.
#pragma once

#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

inline constexpr int kMostSmallRank = 64;
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
  return rank > kMostSmallRank ? size * (size + 4) : 0;
}

// What a pass has left to do for a matrix.
enum class LargeState : int32_t { active, last_rows, done };

struct LargeScratch {
  int size;        // the rank, rounded up to whole tiles
  double* square;  // (size, size)
  double* scale;   // (size) 1 / norm of each column
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
