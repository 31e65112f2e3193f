// Sixteen columns at a time (kernels/simd/vector.h); tiles of rows x columns whose sums stay in registers.
//
// Q is transposed piece by piece, (cols, rank) to (rank, columns of the piece), so that adjacent columns of a
// matrix row have adjacent elements of Q. Pieces are padded to whole vectors with zeros; a row's last,
// partial vector goes through a buffer. A product and its addition are rounded once where there is an fma.
#include "kernels/powersgd/powersgd_simd.h"

#include <algorithm>
#include <cfloat>

#include "kernels/simd/simd.h"
#include "kernels/simd/vector.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

using Vec = F32x16;
constexpr int kLanes = gradwire::kLanes<Vec>;

constexpr int64_t kPieceFloats = 32 * 1024;  // of turned Q, in the second-level cache
constexpr int kRowTile = 4;
constexpr int kRankTile = 4;
constexpr int64_t kPrefetchFloats = 512;

GW_INLINE Vec clamp_finite(const Vec& x) {
  Vec v = blend(x > FLT_MAX, Vec{} + FLT_MAX, x);
  return blend(v < -FLT_MAX, Vec{} - FLT_MAX, v);
}

// M = grad + residual, stored into the residual. Where the gradient is not finite the old residual stays; if
// only the sum is not, it is clamped.
GW_INLINE Vec form_m(const Vec& grad, float* residual, int64_t count) {
  const Vec e = load_some<Vec>(residual, count), sum = grad + e;
  store_some(residual, blend(finite_lanes(grad), clamp_finite(sum), e), count);
  return sum;
}

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Columns per piece of Q, a multiple of the strip.
int64_t piece_columns(int rank, int64_t cols) {
  int64_t most = kPieceFloats / round_up(rank, kRankTile) / kStrip * kStrip;
  return std::min(most, round_up(cols, kStrip));
}

// turned[k][column] = q[column][k]; zero up to `stride` and to a whole rank tile.
GW_INLINE void turn(const float* q, int rank, int64_t columns, int64_t stride, float* turned) {
  int64_t padded_rank = round_up(rank, kRankTile);
  for (int64_t k = 0; k < padded_rank; ++k) {
    float* to = turned + k * stride;
    int64_t there = k < rank ? columns : 0;
    for (int64_t j = 0; j < there; ++j) to[j] = q[j * rank + k];
    std::fill(to + there, to + stride, 0.0f);
  }
}

// M of kRows rows; adds their products with kRank turned columns of Q to sums (kRows, sum_stride). With
// kFresh, M is formed from grad and residual; else it is read from m_buffer, where an earlier call with
// kFresh left it.
template <int kRows, int kRank, bool kFresh>
GW_INLINE void project_tile(const ProjectRows& a, int64_t row0, int64_t column0, int64_t columns,
                            const float* turned, int64_t stride, float* m_buffer, bool keep_m, float* sums,
                            int64_t sum_stride) {
  Vec acc[kRows][kRank] = {};
  // One row is one stream, which continues in the next row; several rows are several
  // streams, which end together.
  const int64_t ahead = kRows == 1 ? kPrefetchFloats : kRows * a.cols;
  for (int64_t j = 0; j < columns; j += kLanes) {
    Vec q[kRank];
    for (int k = 0; k < kRank; ++k) q[k] = load<Vec>(turned + k * stride + j);
    for (int i = 0; i < kRows; ++i) {
      Vec m;
      if (kFresh) {
        int64_t at = (row0 + i) * a.cols + column0 + j, count = columns - j;
        m = load_some<Vec>(a.grad + at, count);
        __builtin_prefetch(a.grad + at + ahead);
        if (a.residual != nullptr) {
          __builtin_prefetch(a.residual + at + ahead, 1);
          m = form_m(m, a.residual + at, count);
        }
        if (keep_m) store(m_buffer + i * stride + j, m);
      } else {
        m = load<Vec>(m_buffer + i * stride + j);
      }
      for (int k = 0; k < kRank; ++k) acc[i][k] += m * q[k];
    }
  }
  if constexpr (kRows * kRank == kLanes) {
    Vec flat[kLanes];
    for (int i = 0; i < kLanes; ++i) flat[i] = acc[i / kRank][i % kRank];
    float total[kLanes];
    store(total, sums_of(flat));
    for (int i = 0; i < kLanes; ++i) sums[i / kRank * sum_stride + i % kRank] += total[i];
  } else {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kRank; ++k) sums[i * sum_stride + k] += sum_of(acc[i][k]);
    }
  }
}

template <int kRows>
GW_INLINE void project_all_ranks(const ProjectRows& a, int64_t row0, int64_t column0, int64_t columns,
                                 const float* turned, int64_t stride, float* m_buffer, float* sums) {
  constexpr int kMost = kMaxPowerSgdRank;
  if (a.rank == 1)
    return project_tile<kRows, 1, true>(a, row0, column0, columns, turned, stride, m_buffer, false, sums,
                                        kMost);
  if (a.rank == 2)
    return project_tile<kRows, 2, true>(a, row0, column0, columns, turned, stride, m_buffer, false, sums,
                                        kMost);
  bool keep_m = a.rank > kRankTile;
  project_tile<kRows, kRankTile, true>(a, row0, column0, columns, turned, stride, m_buffer, keep_m, sums,
                                       kMost);
  for (int k = kRankTile; k < a.rank; k += kRankTile) {
    project_tile<kRows, kRankTile, false>(a, row0, column0, columns, turned + k * stride, stride, m_buffer,
                                          false, sums + k, kMost);
  }
}

// One strip of columns and one tile of rows of value - P Q^T (kSubtract) or P Q^T.
template <int kRows, int kVecs>
GW_INLINE void outer_tile(const float* p, int64_t p_stride, int rank, const float* turned, int64_t stride,
                          Vec (&value)[kRows][kVecs], bool subtract) {
  for (int k = 0; k < rank; ++k) {
    Vec q[kVecs];
    for (int v = 0; v < kVecs; ++v) q[v] = load<Vec>(turned + k * stride + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      float weight = subtract ? -p[i * p_stride + k] : p[i * p_stride + k];
      for (int v = 0; v < kVecs; ++v) value[i][v] += weight * q[v];
    }
  }
}

}  // namespace

GW_SIMD void project_rows(const ProjectRows& a) {
  alignas(64) float turned[kPieceFloats];
  alignas(64) float m_buffer[kRowTile * kPieceFloats / 8];  // pieces are longer only where rank <= kRankTile
  constexpr int64_t kMostRows = 128;
  for (int64_t first = 0; first < a.rows; first += kMostRows) {
    int64_t rows = std::min(kMostRows, a.rows - first);
    float sums[kMostRows][kMaxPowerSgdRank] = {};
    int64_t piece = piece_columns(a.rank, a.cols);
    for (int64_t column0 = 0; column0 < a.cols; column0 += piece) {
      int64_t columns = std::min(piece, a.cols - column0), stride = round_up(columns, kLanes);
      turn(a.q + column0 * a.rank, a.rank, columns, stride, turned);
      int64_t i = 0;
      // Where memory is the limit, one row after another (28 against 34 ms on ViT-B/32 at rank 4); where
      // arithmetic is, several rows share the loads of Q.
      for (; a.rank > kRankTile && i + kRowTile <= rows; i += kRowTile) {
        project_all_ranks<kRowTile>(a, first + i, column0, columns, turned, stride, m_buffer, sums[i]);
      }
      for (; i < rows; ++i)
        project_all_ranks<1>(a, first + i, column0, columns, turned, stride, m_buffer, sums[i]);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int k = 0; k < a.rank; ++k) a.p[(first + i) * a.rank + k] = sums[i][k];
    }
  }
}

namespace {

constexpr int64_t kBlockRows = 16;  // that pass through the first-level cache while their sums are taken
constexpr int kTileVecs = 2;        // whose sums stay in registers
constexpr int64_t kTileColumns = kTileVecs * kLanes;

// sums[k][strip] += rows of P^T M, for a strip of columns and kRank of P's columns.
template <int kRank, bool kWhole>
GW_INLINE void back_tile(const float* m, int64_t m_stride, int64_t columns, const float* p, int64_t p_stride,
                         int64_t rows, const float* ahead, float* sums, int64_t stride) {
  Vec acc[kRank][kTileVecs];
  for (int k = 0; k < kRank; ++k) {
    for (int v = 0; v < kTileVecs; ++v) acc[k][v] = load<Vec>(sums + k * stride + v * kLanes);
  }
  for (int64_t i = 0; i < rows; ++i) {
    Vec x[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) {
      const float* from = m + i * m_stride + v * kLanes;
      x[v] = kWhole ? load<Vec>(from)
                    : load_some<Vec>(from, std::clamp<int64_t>(columns - v * kLanes, 0, kLanes));
      if (ahead != nullptr) __builtin_prefetch(ahead + i * m_stride + v * kLanes, 0, 3);
    }
    for (int k = 0; k < kRank; ++k) {
      float weight = p[i * p_stride + k];
      for (int v = 0; v < kTileVecs; ++v) acc[k][v] += weight * x[v];
    }
  }
  for (int k = 0; k < kRank; ++k) {
    for (int v = 0; v < kTileVecs; ++v) store(sums + k * stride + v * kLanes, acc[k][v]);
  }
}

// Of `rows` rows of M at m, m_stride apart, from column0 on.
template <bool kWhole>
GW_INLINE void back_all_ranks(const BackProjectPanel& a, const float* m, int64_t m_stride, int64_t row0,
                              int64_t rows, int64_t column0, const float* ahead, float* sums,
                              int64_t stride) {
  const float* p = a.p + row0 * a.rank;
  int64_t columns = a.panel - column0;
  int k = 0;
  for (; k + kRankTile <= a.rank; k += kRankTile) {
    back_tile<kRankTile, kWhole>(m, m_stride, columns, p + k, a.rank, rows, ahead, sums + k * stride, stride);
    ahead = nullptr;
  }
  for (; k < a.rank; ++k) {
    back_tile<1, kWhole>(m, m_stride, columns, p + k, a.rank, rows, ahead, sums + k * stride, stride);
    ahead = nullptr;
  }
}

// Adds rows [row0, row0 + rows) of M, at m, to the panel's sums.
GW_INLINE void back_rows(const BackProjectPanel& a, const float* m, int64_t m_stride, int64_t row0,
                         int64_t rows, bool prefetch, float* sums, int64_t stride) {
  for (int64_t column0 = 0; column0 < a.panel; column0 += kTileColumns) {
    // Each row's piece of a panel is short, so the next block is prefetched while this one is computed.
    const float* ahead = prefetch ? m + kBlockRows * m_stride + column0 : nullptr;
    if (column0 + kTileColumns <= a.panel) {
      back_all_ranks<true>(a, m + column0, m_stride, row0, rows, column0, ahead, sums + column0, stride);
    } else {
      back_all_ranks<false>(a, m + column0, m_stride, row0, rows, column0, ahead, sums + column0, stride);
    }
  }
}

GW_INLINE void store_q(const BackProjectPanel& a, const float* sums, int64_t stride) {
  for (int64_t j = 0; j < a.panel; ++j) {
    for (int k = 0; k < a.rank; ++k) a.q[j * a.rank + k] = sums[k * stride + j];
  }
}

template <int kRows, bool kWhole>
GW_INLINE void residual_tile(const BackProjectPanel& a, int64_t row0, int64_t column0, const float* turned,
                             int64_t stride) {
  Vec left[kRows][kTileVecs];
  float* at = a.residual + row0 * a.cols + column0;
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) {
      const float* from = at + i * a.cols + v * kLanes;
      left[i][v] = kWhole
                       ? load<Vec>(from)
                       : load_some<Vec>(from, std::clamp<int64_t>(a.panel - column0 - v * kLanes, 0, kLanes));
    }
  }
  outer_tile<kRows, kTileVecs>(a.p + row0 * a.rank, a.rank, a.rank, turned + column0, stride, left, true);
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) {
      Vec e = blend(finite_lanes(left[i][v]), left[i][v], Vec{});
      float* to = at + i * a.cols + v * kLanes;
      if (kWhole) {
        store(to, e);
      } else {
        store_some(to, e, std::clamp<int64_t>(a.panel - column0 - v * kLanes, 0, kLanes));
      }
    }
  }
}

template <int kRows>
GW_INLINE void residual_rows(const BackProjectPanel& a, int64_t row0, const float* turned, int64_t stride) {
  int64_t column0 = 0;
  for (; column0 + kTileColumns <= a.panel; column0 += kTileColumns)
    residual_tile<kRows, true>(a, row0, column0, turned, stride);
  if (column0 < a.panel) residual_tile<kRows, false>(a, row0, column0, turned, stride);
}

}  // namespace

GW_SIMD void back_project_panel(const BackProjectPanel& a) {
  alignas(64) float sums[kMaxPowerSgdRank * kMaxPanelColumns];  // Q turned around: (rank, stride)
  int64_t stride = round_up(a.panel, kStrip);
  std::fill(sums, sums + a.rank * stride, 0.0f);
  for (int64_t row0 = 0; row0 < a.rows; row0 += kBlockRows) {
    back_rows(a, a.m + row0 * a.cols, a.cols, row0, std::min(kBlockRows, a.rows - row0),
              row0 + 2 * kBlockRows <= a.rows, sums, stride);
  }
  store_q(a, sums, stride);
  if (a.residual == nullptr) return;
  // From the last row up, because what was read last is most likely still in the cache.
  int64_t row = a.rows;
  for (; row >= kRowTile; row -= kRowTile) residual_rows<kRowTile>(a, row - kRowTile, sums, stride);
  for (; row > 0; --row) residual_rows<1>(a, row - 1, sums, stride);
}

GW_SIMD void project_onto_panel(const BackProjectPanel& a) {
  alignas(64) float sums[kMaxPowerSgdRank * kMaxPanelColumns];
  alignas(64) float block[kBlockRows * kMaxPanelColumns];  // of M
  const int64_t stride = round_up(a.panel, kStrip);
  std::fill(sums, sums + a.rank * stride, 0.0f);
  for (int64_t row0 = 0; row0 < a.rows; row0 += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, a.rows - row0);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < a.panel; j += kLanes) {
        const int64_t at = (row0 + i) * a.cols + j, count = std::min<int64_t>(kLanes, a.panel - j);
        Vec m = load_some<Vec>(a.m + at, count);
        if (a.residual != nullptr) m = form_m(m, a.residual + at, count);
        store(block + i * stride + j, m);
      }
    }
    back_rows(a, block, stride, row0, rows, false, sums, stride);
  }
  store_q(a, sums, stride);
}

namespace {

template <int kRows, int kVecs>
GW_INLINE void reconstruct_tile(const ReconstructRows& a, int64_t row0, int64_t column, int64_t count,
                                const float* turned, int64_t stride) {
  Vec value[kRows][kVecs] = {};
  outer_tile<kRows, kVecs>(a.p + row0 * a.rank, a.rank, a.rank, turned, stride, value, false);
  float* at = a.out + row0 * a.cols + column;
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      float* to = at + i * a.cols + v * kLanes;
      int64_t lanes = kVecs > 1 ? kLanes : count;
      if (a.mode == Reconstruct::add_finite) {
        Vec old = load_some<Vec>(to, lanes), sum = old + value[i][v];
        store_some(to, blend(finite_lanes(sum), sum, old), lanes);
      } else if (a.mode == Reconstruct::stream && lanes == kLanes &&
                 reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        stream_store(to, a.scale * value[i][v]);
      } else {
        store_some(to, a.scale * value[i][v], lanes);
      }
    }
  }
}

// From here to the next cache line. Lines that are written past the caches in two parts, with other rows' in between,
// leave as two partial writes: a third of the speed on Intel's Granite Rapids.
GW_INLINE int64_t floats_to_line(const float* at) {
  return static_cast<int64_t>((64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float));
}

template <int kRows>
GW_INLINE void reconstruct_piece(const ReconstructRows& a, int64_t row0, int64_t column0, int64_t columns,
                                 const float* turned, int64_t stride) {
  int64_t j = 0;
  if (a.mode == Reconstruct::stream) {
    j = std::min(columns, floats_to_line(a.out + row0 * a.cols + column0));
    if (j > 0) reconstruct_tile<kRows, 1>(a, row0, column0, j, turned, stride);
  }
  for (; j + kTileColumns <= columns; j += kTileColumns) {
    reconstruct_tile<kRows, kTileVecs>(a, row0, column0 + j, kTileColumns, turned + j, stride);
  }
  for (; j < columns; j += kLanes) {
    reconstruct_tile<kRows, 1>(a, row0, column0 + j, std::min<int64_t>(kLanes, columns - j), turned + j,
                               stride);
  }
}

}  // namespace

GW_SIMD void reconstruct_rows(const ReconstructRows& a) {
  alignas(64) float turned[kPieceFloats + kLanes];  // a last vector may begin between two
  int64_t piece = piece_columns(a.rank, a.cols);
  // Rows whose lines do not begin in the same columns are written one after the other, unless that costs more sums
  // than it saves.
  const bool together = a.mode != Reconstruct::stream || a.cols % 16 == 0 || a.rank > 8;
  for (int64_t column0 = 0; column0 < a.cols; column0 += piece) {
    int64_t columns = std::min(piece, a.cols - column0), stride = round_up(columns, kLanes);
    turn(a.q + column0 * a.rank, a.rank, columns, stride, turned);
    int64_t i = 0;
    for (; together && i + kRowTile <= a.rows; i += kRowTile) {
      reconstruct_piece<kRowTile>(a, i, column0, columns, turned, stride);
    }
    for (; i < a.rows; ++i) reconstruct_piece<1>(a, i, column0, columns, turned, stride);
  }
  if (a.mode == Reconstruct::stream) stream_fence();
}

}  // namespace gradwire::host
