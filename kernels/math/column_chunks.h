// Sums over rows are taken in two stages, the same on host and CUDA: first each chunk of rows is summed into
// a row of partial sums in the workspace, then the partial sums are added in chunk order. The chunks depend
// only on the number of rows, so the sum is deterministic without atomics.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/math/small_float.h"

namespace gradwire {

inline constexpr int64_t kMaxChunks = 256;

struct ColumnChunks {
  int64_t count = 0;  // number of chunks, at most kMaxChunks
  int64_t rows = 0;   // rows per chunk; the last chunk may be shorter
};

inline ColumnChunks column_chunks(int64_t rows) {
  int64_t per_chunk = std::max<int64_t>(16, (rows + kMaxChunks - 1) / kMaxChunks);
  return {(rows + per_chunk - 1) / per_chunk, per_chunk};
}

// Returns the size of the workspace, in floats, for the partial sums of `width` columns.
inline int64_t column_sum_workspace(int64_t rows, int64_t width) {
  return column_chunks(rows).count * width;
}

// Up to three sums over the same rows, whose partial sums an op has left in its workspace.
struct PartialSums {
  const float* partial = nullptr;  // (count, pitch): the partial sums of sum i begin at column i * width
  int64_t count = 0, pitch = 0, width = 0;
  std::array<float*, 3> sums = {};  // (width) elements each; a pointer may be null
  bool accumulate = false;
  const Bf16* partial_bf16 = nullptr;  // if not null: read instead of `partial`
};

}  // namespace gradwire
