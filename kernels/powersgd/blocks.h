// How the CUDA kernels of PowerSGD cut matrices into blocks: every matrix of a table in one grid, block b of
// the grid belonging to the last matrix whose first block is not beyond b.
#pragma once

#include <cstdint>

#include "kernels/math/hd.h"

namespace gradwire {

// project: a block takes whole rows, so that P needs no second pass. Two small blocks may share a row tile.
inline constexpr int kRowTileRows = 16;
// reconstruct: a block writes a tile.
inline constexpr int kTileRows = 64;
inline constexpr int kTileCols = 256;
// back_project: a block takes a panel of whole columns, a cache line wide; of tall matrices half of that, so that
// there are enough blocks and none takes long.
inline constexpr int kMostPanelColumns = 32;
GW_HD int panel_columns(int32_t rows) {
  return rows <= 1280 ? kMostPanelColumns : kMostPanelColumns / 2;
}

// First block of a matrix in the grid of each kernel.
struct MatrixBlocks {
  int32_t row_tile = 0;
  int32_t panel = 0;
  int32_t tile = 0;
};

}  // namespace gradwire
