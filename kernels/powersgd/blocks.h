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
// back_project: a block takes a panel of whole columns and holds it in shared memory. 96 KiB fit every device
// from sm_80 on, and twice into an SM of sm_90, so that one block loads while the other stores.
inline constexpr int kPanelSharedBytes = 96 * 1024;

// Columns of a panel: as wide as can be held (long pieces of rows are better for memory), but never narrower
// than the 8 floats of a memory sector. A taller panel is held in part, and its rest comes from the L2 cache
// the second time.
GW_HD int panel_columns(int32_t rows) {
  return rows <= 576 ? 32 : rows <= 1280 ? 16 : 8;
}

// First block of a matrix in the grid of each kernel.
struct MatrixBlocks {
  int32_t row_tile = 0;
  int32_t panel = 0;
  int32_t tile = 0;
};

}  // namespace gradwire
