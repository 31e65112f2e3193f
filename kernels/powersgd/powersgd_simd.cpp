// The loops process sixteen columns at a time (kernels/simd/vector.h), in tiles of rows x columns whose sums
// stay in registers.
//
// Q is transposed in pieces, (cols, rank) to (rank, columns of the piece), so that adjacent columns of a
// matrix row have adjacent elements of Q. Pieces are padded to whole vectors with zeros; a row's last,
// partial vector goes through a buffer. A product and its addition are rounded once where the processor has
// an FMA. The functions are templates of the type of the sixteen lanes: F32x16, or WideF32 with AVX-512.
#include "kernels/powersgd/powersgd_simd.h"

#include <algorithm>
#include <cfloat>

#include "kernels/simd/vector.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

constexpr int kLanes = gradwire::kLanes<F32x16>;

// Size of a piece of a transposed factor, which stays in the second-level cache.
constexpr int64_t kPieceFloats = 32 * 1024;
constexpr int kRowTile = 4;
constexpr int kRankTile = 4;
constexpr int kTileVecs = 2;  // vectors whose sums stay in registers
constexpr int64_t kTileColumns = kTileVecs * kLanes;
constexpr int64_t kPrefetchFloats = 512;

// Returns M = grad + E and stores it into the residual. The residual gets E where the gradient is not finite,
// and the clamped sum where only the sum is not finite.
template <typename Vec>
GW_INLINE Vec form_m(const Vec& grad, const Vec& e, float* residual, int64_t count) {
  const Vec sum = grad + e;
  Vec clamped = blend(sum > FLT_MAX, Vec{} + FLT_MAX, sum);
  clamped = blend(clamped < -FLT_MAX, Vec{} - FLT_MAX, clamped);
  store_some(residual, blend(finite_lanes(grad), clamped, e), count);
  return sum;
}

template <typename Vec>
GW_INLINE Vec finite_or_zero(const Vec& x) {
  return blend(finite_lanes(x), x, Vec{});
}

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Transposes turned[k][column] = q[column][k]; pads with zeros to `stride` columns and to a whole rank tile.
GW_INLINE void turn(const float* q, int rank, int64_t columns, int64_t stride, float* turned) {
  int64_t padded_rank = round_up(rank, kRankTile);
  for (int64_t k = 0; k < padded_rank; ++k) {
    float* to = turned + k * stride;
    int64_t there = k < rank ? columns : 0;
    for (int64_t j = 0; j < there; ++j) to[j] = q[j * rank + k];
    std::fill(to + there, to + stride, 0.0f);
  }
}

// Adds P Q^T to one tile of rows and columns.
template <typename Vec, int kRows, int kVecs>
GW_INLINE void outer_tile(const float* p, int rank, const float* turned, int64_t stride,
                          Vec (&value)[kRows][kVecs]) {
  for (int k = 0; k < rank; ++k) {
    Vec q[kVecs];
    for (int v = 0; v < kVecs; ++v) q[v] = load<Vec>(turned + k * stride + v * kLanes);
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVecs; ++v) value[i][v] += p[i * rank + k] * q[v];
    }
  }
}

// A part of M with its pending Q transposed: (rank, stride).
struct Fresh : MatrixPart {
  const float* pending;
  int64_t stride;
};

// Writes one tile of M to `m`, rows m_stride apart; columns from `count` on are 0.
template <typename Vec, int kRows>
GW_INLINE void form_tile(const Fresh& a, int64_t row, int64_t column, int64_t count, float* m,
                         int64_t m_stride) {
  Vec e[kRows][kTileVecs] = {};
  const int64_t at = row * a.cols + column;
  int64_t lanes[kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) lanes[v] = std::clamp<int64_t>(count - v * kLanes, 0, kLanes);
  if (a.residual != nullptr) {
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kTileVecs; ++v) {
        const float* from = a.residual + at + i * a.cols + v * kLanes;
        __builtin_prefetch(from + kPrefetchFloats, 1);
        e[i][v] = load_some<Vec>(from, lanes[v]);
      }
    }
    if (a.pending_p != nullptr) {
      outer_tile(a.pending_p + row * a.rank, a.rank, a.pending + column, a.stride, e);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) {
      const int64_t here = at + i * a.cols + v * kLanes;
      Vec x = load_some<Vec>(a.grad + here, lanes[v]);
      __builtin_prefetch(a.grad + here + kPrefetchFloats);
      if (a.residual != nullptr) {
        if (a.pending_p != nullptr) e[i][v] = finite_or_zero(e[i][v]);
        x = form_m(x, e[i][v], a.residual + here, lanes[v]);
      }
      store(m + i * m_stride + v * kLanes, x);
    }
  }
}

// Forms M for `rows` rows starting at `row` and `columns` columns starting at `column`.
template <typename Vec>
GW_INLINE void form_block(const Fresh& a, int64_t row, int64_t rows, int64_t column, int64_t columns,
                          float* m, int64_t m_stride) {
  int64_t i = 0;
  for (; i + kRowTile <= rows; i += kRowTile) {
    for (int64_t j = 0; j < columns; j += kTileColumns) {
      form_tile<Vec, kRowTile>(a, row + i, column + j, columns - j, m + i * m_stride + j, m_stride);
    }
  }
  for (; i < rows; ++i) {
    for (int64_t j = 0; j < columns; j += kTileColumns) {
      form_tile<Vec, 1>(a, row + i, column + j, columns - j, m + i * m_stride + j, m_stride);
    }
  }
}

// Adds the products of kRows rows of M, m_stride apart, with kRank transposed columns of Q to sums.
template <typename Vec, int kRows, int kRank>
GW_INLINE void project_tile(const float* m, int64_t m_stride, int64_t columns, const float* turned,
                            int64_t stride, float* sums, int64_t sums_stride) {
  Vec acc[kRows][kRank] = {};
  for (int64_t j = 0; j < columns; j += kLanes) {
    Vec q[kRank];
    for (int k = 0; k < kRank; ++k) q[k] = load<Vec>(turned + k * stride + j);
    for (int i = 0; i < kRows; ++i) {
      const Vec x = load<Vec>(m + i * m_stride + j);
      for (int k = 0; k < kRank; ++k) acc[i][k] += x * q[k];
    }
  }
  if constexpr (kRows * kRank == kLanes) {
    Vec flat[kLanes];
    for (int i = 0; i < kLanes; ++i) flat[i] = acc[i / kRank][i % kRank];
    float total[kLanes];
    store(total, sums_of(flat));
    for (int i = 0; i < kLanes; ++i) sums[i / kRank * sums_stride + i % kRank] += total[i];
  } else {
    for (int i = 0; i < kRows; ++i) {
      for (int k = 0; k < kRank; ++k) sums[i * sums_stride + k] += sum_of(acc[i][k]);
    }
  }
}

// Processes one whole row at a time, a single stream that continues in the next row: fastest where memory is
// the limit.
template <typename Vec, int kRank, bool kPending>
GW_INLINE void project_row(const Fresh& a, int64_t row, int64_t column, int64_t columns, const float* turned,
                           float* sums) {
  Vec acc[kRank] = {};
  float weight[kRank] = {};
  for (int k = 0; kPending && k < a.rank; ++k) weight[k] = a.pending_p[row * a.rank + k];
  const float* grad = a.grad + row * a.cols + column;
  float* residual = a.residual != nullptr ? a.residual + row * a.cols + column : nullptr;
  for (int64_t j = 0; j < columns; j += kLanes) {
    const int64_t count = columns - j;
    Vec m = load_some<Vec>(grad + j, count);
    __builtin_prefetch(grad + j + kPrefetchFloats);
    if (residual != nullptr) {
      __builtin_prefetch(residual + j + kPrefetchFloats, 1);
      Vec e = load_some<Vec>(residual + j, count);
      if constexpr (kPending) {
        for (int k = 0; k < kRank; ++k) e += weight[k] * load<Vec>(a.pending + k * a.stride + j);
        e = finite_or_zero(e);
      }
      m = form_m(m, e, residual + j, count);
    }
    for (int k = 0; k < kRank; ++k) acc[k] += m * load<Vec>(turned + k * a.stride + j);
  }
  for (int k = 0; k < kRank; ++k) sums[k] += sum_of(acc[k]);
}

template <typename Vec, int kRank>
GW_INLINE void project_rows_of_rank(const Fresh& a, int64_t row, int64_t rows, int64_t column,
                                    int64_t columns, const float* turned, float* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    if (a.pending_p != nullptr) {
      project_row<Vec, kRank, true>(a, row + i, column, columns, turned,
                                    sums + i * round_up(kRank, kRankTile));
    } else {
      project_row<Vec, kRank, false>(a, row + i, column, columns, turned,
                                     sums + i * round_up(kRank, kRankTile));
    }
  }
}

// Processes several rows, which share the loads of Q: fastest where arithmetic is the limit.
template <typename Vec, int kRows>
GW_INLINE void project_block(const Fresh& a, int64_t row, int64_t column, int64_t columns,
                             const float* turned, float* m, float* sums, int64_t sums_stride) {
  // The transposed factors begin at `column`.
  Fresh here = a;
  here.grad += column;
  if (a.residual != nullptr) here.residual += column;
  form_block<Vec>(here, row, kRows, 0, columns, m, a.stride);
  for (int k = 0; k < a.rank; k += kRankTile) {
    project_tile<Vec, kRows, kRankTile>(m, a.stride, columns, turned + k * a.stride, a.stride, sums + k,
                                        sums_stride);
  }
}

template <typename Vec>
GW_INLINE void project(const MatrixPart& a, const float* q, float* p) {
  alignas(64) float turned[kPieceFloats], pending[kPieceFloats];
  alignas(64) float m[kRowTile * kPieceFloats / 8];  // used where rank > kRankTile
  constexpr int64_t kMaxRows = 128;
  alignas(64) float sums[kMaxRows * kMaxPowerSgdRank];
  const int64_t sums_stride = round_up(a.rank, kRankTile);
  for (int64_t first = 0; first < a.rows; first += kMaxRows) {
    int64_t rows = std::min(kMaxRows, a.rows - first);
    std::fill_n(sums, rows * sums_stride, 0.0f);
    int64_t piece = piece_columns(a.rank, a.cols);
    for (int64_t column = 0; column < a.cols; column += piece) {
      int64_t columns = std::min(piece, a.cols - column), stride = round_up(columns, kStrip);
      turn(q + column * a.rank, a.rank, columns, stride, turned);
      if (a.pending_p != nullptr) turn(a.pending_q + column * a.rank, a.rank, columns, stride, pending);
      const Fresh fresh{a, pending, stride};
      if (a.rank == 1) {
        project_rows_of_rank<Vec, 1>(fresh, first, rows, column, columns, turned, sums);
      } else if (a.rank == 2) {
        project_rows_of_rank<Vec, 2>(fresh, first, rows, column, columns, turned, sums);
      } else if (a.rank <= kRankTile) {
        project_rows_of_rank<Vec, kRankTile>(fresh, first, rows, column, columns, turned, sums);
      } else if (a.rank == 2 * kRankTile && std::is_same_v<Vec, WideF32>) {  // sums stay in registers
        project_rows_of_rank<Vec, 2 * kRankTile>(fresh, first, rows, column, columns, turned, sums);
      } else {
        int64_t i = 0;
        for (; i + kRowTile <= rows; i += kRowTile) {
          project_block<Vec, kRowTile>(fresh, first + i, column, columns, turned, m, sums + i * sums_stride,
                                       sums_stride);
        }
        for (; i < rows; ++i) {
          project_block<Vec, 1>(fresh, first + i, column, columns, turned, m, sums + i * sums_stride,
                                sums_stride);
        }
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int k = 0; k < a.rank; ++k) p[(first + i) * a.rank + k] = sums[i * sums_stride + k];
    }
  }
}

// Rows of M that are summed together: few rows, so that prefetched rows stay in the cache, but more rows
// where loading and storing the sums takes longer.
constexpr int64_t kMaxBlockRows = 16;
constexpr int64_t kBlockColumns = 512;  // columns of M per block where M is formed

// Adds rows of P^T M to sums[k][strip], for a strip of columns and kRank of P's columns.
template <typename Vec, int kRank, bool kWhole>
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
      if (ahead != nullptr) __builtin_prefetch(ahead + i * kTileColumns + v * kLanes);
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

template <typename Vec, bool kWhole>
GW_INLINE void back_all_ranks(const float* m, int64_t m_stride, int64_t columns, const float* p, int rank,
                              int64_t rows, const float* ahead, float* sums, int64_t stride) {
  int k = 0;
  for (; k + kRankTile <= rank; k += kRankTile) {
    back_tile<Vec, kRankTile, kWhole>(m, m_stride, columns, p + k, rank, rows, k == 0 ? ahead : nullptr,
                                      sums + k * stride, stride);
  }
  for (; k < rank; ++k) {
    back_tile<Vec, 1, kWhole>(m, m_stride, columns, p + k, rank, rows, k == 0 ? ahead : nullptr,
                              sums + k * stride, stride);
  }
}

// Adds the products of `rows` rows of M and of P to the sums.
template <typename Vec>
GW_INLINE void back_rows(const float* m, int64_t m_stride, int64_t columns, const float* p, int rank,
                         int64_t rows, const float* ahead, float* sums, int64_t stride) {
  for (int64_t j = 0; j < columns; j += kTileColumns, ahead += ahead != nullptr ? rows * kTileColumns : 0) {
    if (j + kTileColumns <= columns) {
      back_all_ranks<Vec, true>(m + j, m_stride, kTileColumns, p, rank, rows, ahead, sums + j, stride);
    } else {
      back_all_ranks<Vec, false>(m + j, m_stride, columns - j, p, rank, rows, ahead, sums + j, stride);
    }
  }
}

template <typename Vec>
GW_INLINE void back_project(const MatrixPart& a, const float* p, float* sums, int64_t stride) {
  alignas(64) float pending[kPieceFloats];
  alignas(64) float block[kMaxBlockRows * kBlockColumns];  // a block of M
  std::fill(sums, sums + a.rank * stride, 0.0f);
  if (a.pending_p != nullptr) turn(a.pending_q, a.rank, a.columns, stride, pending);
  const Fresh fresh{a, pending, stride};
  const int64_t step = a.rank <= 2 ? 8 : kMaxBlockRows;
  for (int64_t row = 0; row < a.rows; row += step) {
    const int64_t rows = std::min(step, a.rows - row);
    const float* weights = p + row * a.rank;
    if (a.residual == nullptr) {
      const float* m = a.grad + row * a.cols;
      // Prefetches the next rows in memory order, independent of the order of the tiles.
      const float* ahead = a.columns == a.cols ? m + rows * a.cols : nullptr;
      back_rows<Vec>(m, a.cols, a.columns, weights, a.rank, rows, ahead, sums, stride);
      continue;
    }
    for (int64_t column = 0; column < a.columns; column += kBlockColumns) {
      const int64_t columns = std::min(kBlockColumns, a.columns - column);
      form_block<Vec>(fresh, row, rows, column, columns, block, kBlockColumns);
      back_rows<Vec>(block, kBlockColumns, columns, weights, a.rank, rows, nullptr, sums + column, stride);
    }
  }
}

template <typename Vec, int kRows, int kVecs>
GW_INLINE void reconstruct_tile(const ReconstructRows& a, int64_t row0, int64_t column, int64_t count,
                                const float* turned, int64_t stride) {
  Vec value[kRows][kVecs] = {};
  float* at = a.out + row0 * a.cols + column;
  const bool settle = a.mode == Reconstruct::settle;
  for (int i = 0; settle && i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      value[i][v] = load_some<Vec>(at + i * a.cols + v * kLanes, kVecs > 1 ? kLanes : count);
    }
  }
  outer_tile(a.p + row0 * a.rank, a.rank, turned, stride, value);
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      float* to = at + i * a.cols + v * kLanes;
      int64_t lanes = kVecs > 1 ? kLanes : count;
      if (settle) {
        store_some(to, finite_or_zero(value[i][v]), lanes);
      } else if (a.mode == Reconstruct::stream && lanes == kLanes &&
                 reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        stream_store(to, a.scale * value[i][v]);
      } else {
        store_some(to, a.scale * value[i][v], lanes);
      }
    }
  }
}

template <typename Vec, int kRows>
GW_INLINE void reconstruct_piece(const ReconstructRows& a, int64_t row0, int64_t column0, int64_t columns,
                                 const float* turned, int64_t stride) {
  int64_t j = 0;
  if (a.mode == Reconstruct::stream) {
    // Up to the next cache line. A line that is written past the caches in two parts, interleaved with other
    // rows, becomes two partial writes, which reach a third of the speed on Intel's Granite Rapids.
    const auto at = reinterpret_cast<uintptr_t>(a.out + row0 * a.cols + column0);
    j = std::min(columns, static_cast<int64_t>((64 - at % 64) % 64 / sizeof(float)));
    if (j > 0) reconstruct_tile<Vec, kRows, 1>(a, row0, column0, j, turned, stride);
  }
  for (; j + kTileColumns <= columns; j += kTileColumns) {
    reconstruct_tile<Vec, kRows, kTileVecs>(a, row0, column0 + j, kTileColumns, turned + j, stride);
  }
  for (; j < columns; j += kLanes) {
    reconstruct_tile<Vec, kRows, 1>(a, row0, column0 + j, std::min<int64_t>(kLanes, columns - j), turned + j,
                                    stride);
  }
}

template <typename Vec>
GW_INLINE void reconstruct(const ReconstructRows& a) {
  alignas(64) float turned[kPieceFloats + kLanes];  // the last vector may begin between two vectors
  int64_t piece = piece_columns(a.rank, a.cols);
  // Rows whose cache lines begin in different columns are written one at a time, unless the slower sums cost
  // more time than whole-line writes save.
  const bool together = a.mode != Reconstruct::stream || a.cols % 16 == 0 || a.rank > 8;
  for (int64_t column0 = 0; column0 < a.cols; column0 += piece) {
    int64_t columns = std::min(piece, a.cols - column0), stride = round_up(columns, kLanes);
    turn(a.q + column0 * a.rank, a.rank, columns, stride, turned);
    int64_t i = 0;
    for (; together && i + kRowTile <= a.rows; i += kRowTile) {
      reconstruct_piece<Vec, kRowTile>(a, i, column0, columns, turned, stride);
    }
    for (; i < a.rows; ++i) reconstruct_piece<Vec, 1>(a, i, column0, columns, turned, stride);
  }
  if (a.mode == Reconstruct::stream) stream_fence();
}

}  // namespace

// Returns the columns per piece, a multiple of the strip.
int64_t piece_columns(int rank, int64_t cols) {
  int64_t most = kPieceFloats / round_up(rank, kRankTile) / kStrip * kStrip;
  return std::min(most, round_up(cols, kStrip));
}

GW_SIMD void add_pieces(float* sums, int64_t pieces, int64_t columns, int64_t stride, int rank, float* q) {
  const int64_t size = rank * stride;
  for (int64_t piece = 1; piece < pieces; ++piece) {
    for (int64_t i = 0; i < size; i += kLanes) {
      F32x16 sum = load<F32x16>(sums + i);
      sum += load<F32x16>(sums + piece * size + i);
      store(sums + i, sum);
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int k = 0; k < rank; ++k) q[j * rank + k] = sums[k * stride + j];
  }
}

GW_DEFINE_WIDEST(void, project_rows, project, F32x16, WideF32,
                 (const MatrixPart& a, const float* q, float* p), (a, q, p))
GW_DEFINE_WIDEST(void, back_project_piece, back_project, F32x16, WideF32,
                 (const MatrixPart& a, const float* p, float* sums, int64_t stride), (a, p, sums, stride))
GW_DEFINE_WIDEST(void, reconstruct_rows, reconstruct, F32x16, WideF32, (const ReconstructRows& a), (a))

}  // namespace gradwire::host
