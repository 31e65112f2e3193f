// Packs lines of a BF16 matrix (rows of op(A), columns of op(B)) into panels of pairs along k. A word holds
// two elements, the first in its lower half. Bytes moved per element: 2 read, 2 written.
#pragma once

#include "kernels/gemm/bf16_tile.h"
#include "kernels/math/bf16.h"

namespace gradwire::host {

// The location of a panel's lines.
struct Bf16Lines {
  bool
      // true: line i begins at from + i ld and is contiguous. false: line i begins at from + i, and its
      // elements are ld apart.
      are_rows;
  const Bf16* from;
  int64_t ld, k, count;  // count <= width of the panel; further lines are zero
};

// The packed lines. to: pairs x width words, pairs >= (k + 1) / 2; all words are written.
//   in_blocks = false   to[p * width + i] = pair p of line i
//   in_blocks = true    to[(p / 16 * width + i) * 16 + p % 16] = pair p of line i; pairs is a multiple of 16
struct Bf16Panel {
  bool in_blocks;
  int width;
  int64_t pairs;
  uint32_t* to;
};

// Packs the lines into the panel. Uses AVX-512 where the processor has it.
void pack_bf16(const Bf16Lines& lines, const Bf16Panel& panel);

}  // namespace gradwire::host

namespace gradwire::reference {
void pack_bf16(const host::Bf16Lines& lines, const host::Bf16Panel& panel);
}
