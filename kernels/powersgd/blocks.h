// Division of matrices into blocks by the CUDA kernels of PowerSGD: all matrices of a table in one grid.
// Block b of the grid belongs to the last matrix whose first block is at most b.
#pragma once

#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

// project(): a block processes whole rows, so that P needs no second pass. Two small blocks may share a row
// tile.
inline constexpr int kRowTileRows = 16;
// reconstruct(): a block writes a tile of this many rows.
inline constexpr int kTileRows = 64;
inline constexpr int kTileCols = 256;
// back_project(): a block processes a panel of whole columns, one cache line wide. For tall matrices the
// panel is half as wide, so that there are more blocks, which end sooner.
inline constexpr int kMostPanelColumns = 32;
GW_HD int panel_columns(int32_t rows) {
  return rows <= 1280 ? kMostPanelColumns : kMostPanelColumns / 2;
}

// The first block of a matrix in the grid of each kernel.
struct MatrixBlocks {
  int32_t row_tile = 0;
  int32_t panel = 0;
  int32_t tile = 0;
};

}  // namespace gradwire
