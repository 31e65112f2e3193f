#include "kernels/gemm/bf16_gemm.h"

#include <algorithm>
#include <atomic>

#include "kernels/gemm/bf16_pack.h"
#include "kernels/simd/simd.h"

namespace gradwire::host {
namespace {

int64_t pairs_of(const Gemm& g, Bf16Products way) {
  const int64_t pairs = (g.k + 1) / 2;
  if (!tile_shape(way).in_blocks) return pairs;
  return (pairs + kPairsPerBlock - 1) / kPairsPerBlock * kPairsPerBlock;
}

// What of a tile is in C, `rows` x `columns` from (row, column) on, goes there.
struct TilePlace {
  int64_t index, row, column, rows, columns;
};

template <typename Out>
GW_INLINE void put(const Gemm& g, const float* tile, const TilePlace& at, int64_t columns) {
  Out* c = g.c.at<Out>(at.index * g.stride_c + at.row * g.ldc + at.column);
  const Out* bias = g.bias.data == nullptr ? nullptr : g.bias.at<Out>(at.column);
  for (int64_t i = 0; i < at.rows; ++i, c += g.ldc, tile += kBf16Columns) {
    float x[kBf16Columns];
    for (int64_t j = 0; j < columns; ++j) x[j] = g.alpha * tile[j];
    if (g.beta != 0.0f) {
      for (int64_t j = 0; j < columns; ++j) x[j] += g.beta * widen(c[j]);
    }
    if (bias != nullptr) {
      for (int64_t j = 0; j < columns; ++j) x[j] += widen(bias[j]);
    }
    for (int64_t j = 0; j < columns; ++j) c[j] = narrow<Out>(x[j]);
  }
}
// Most tiles are whole: loops of a known length stay in registers.
template <typename Out>
GW_INLINE void put_any(const Gemm& g, const float* tile, const TilePlace& at) {
  at.columns == kBf16Columns ? put<Out>(g, tile, at, kBf16Columns) : put<Out>(g, tile, at, at.columns);
}
GW_SIMD void put_tile(const Gemm& g, const float* tile, const TilePlace& at) {
  g.c.type == Element::fp32 ? put_any<float>(g, tile, at) : put_any<Bf16>(g, tile, at);
}

std::atomic<Bf16Products>& chosen() {
  static std::atomic<Bf16Products> way{best_bf16_products()};
  return way;
}

}  // namespace

Bf16Products bf16_products() {
  return chosen().load(std::memory_order_relaxed);
}
void use_bf16_products(Bf16Products way) {
  chosen().store(way, std::memory_order_relaxed);
}

void Bf16Panels::resize(const Gemm& g, Bf16Products way) {
  pairs_ = pairs_of(g, way);
  count_ = (g.n + kBf16Columns - 1) / kBf16Columns;
  words_ = memory_.reserve(count_ * pairs_ * kBf16Columns);
}

void Bf16Panels::pack(const Gemm& g, int64_t index, int64_t begin, int64_t end) {
  const Bf16* b = g.b.at<Bf16>(index * g.stride_b);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t column = i * kBf16Columns;
    pack_bf16({.are_rows = g.transpose_b,
               .from = b + (g.transpose_b ? column * g.ldb : column),
               .ld = g.ldb,
               .k = g.k,
               .count = std::min<int64_t>(kBf16Columns, g.n - column)},
              {.in_blocks = false,
               .width = kBf16Columns,
               .pairs = pairs_,
               .to = words_ + i * pairs_ * kBf16Columns});
  }
}

void bf16_gemm_rows(const Gemm& g, Bf16Products way, const Bf16Panels& b, int64_t index, int64_t begin,
                    int64_t end) {
  thread_local AlignedMemory<uint32_t> memory;
  const auto [tile_rows, in_blocks] = tile_shape(way);
  const int64_t pairs = pairs_of(g, way), panel = pairs * tile_rows;
  const int64_t panels = (end - begin + tile_rows - 1) / tile_rows;
  uint32_t* const packed = memory.reserve(panels * panel);
  const Bf16* a = g.a.at<Bf16>(index * g.stride_a);
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t row = begin + i * tile_rows;
    pack_bf16({.are_rows = !g.transpose_a,
               .from = a + (g.transpose_a ? row : row * g.lda),
               .ld = g.lda,
               .k = g.k,
               .count = std::min<int64_t>(tile_rows, end - row)},
              {.in_blocks = in_blocks, .width = tile_rows, .pairs = pairs, .to = packed + i * panel});
  }
  alignas(64) float tile[kMostBf16Rows * kBf16Columns];
  const Bf16Tiles tiles(way);
  for (int64_t j = 0; j < b.count(); ++j) {
    const int64_t column = j * kBf16Columns, columns = std::min<int64_t>(kBf16Columns, g.n - column);
    for (int64_t i = 0; i < panels; ++i) {
      tiles.multiply(packed + i * panel, b.panel(j), pairs, tile);
      const int64_t row = begin + i * tile_rows;
      put_tile(g, tile, {index, row, column, std::min<int64_t>(tile_rows, end - row), columns});
    }
  }
}

}  // namespace gradwire::host
