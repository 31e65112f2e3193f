#include "kernels/gemm/bf16_gemm.h"

#include <algorithm>
#include <atomic>

#include "kernels/gemm/bf16_pack.h"
#include "kernels/simd/simd.h"
#include "runtime/threads/thread.h"

namespace gradwire::host {
namespace {

// Returns the number of pairs along k, at least one (of zeros), so that k = 0 still applies bias and beta.
int64_t pairs_of(const Gemm& g, Bf16Products way) {
  const int64_t pairs = std::max<int64_t>(1, (g.k + 1) / 2);
  if (!tile_shape(way).in_blocks) return pairs;
  return (pairs + kPairsPerBlock - 1) / kPairsPerBlock * kPairsPerBlock;
}

// The part of C that a tile covers: `rows` x `columns` elements, starting at (row, column).
struct TilePlace {
  int64_t index, row, column, rows, columns;
};

// A finished tile and its destination in C.
struct FinishedTile {
  const Gemm& g;
  const float* tile;
  TilePlace at;
};

template <typename Out>
GW_INLINE void put(const FinishedTile& finished, int64_t begin, int64_t end, int64_t columns) {
  const auto& [g, tiles, at] = finished;
  const float* tile = tiles + begin * kBf16Columns;
  Out* c = g.c.at<Out>(at.index * g.stride_c + (at.row + begin) * g.ldc + at.column);
  const Out* bias = g.bias.data == nullptr ? nullptr : g.bias.at<Out>(at.column);
  for (int64_t i = begin; i < end; ++i, c += g.ldc, tile += kBf16Columns) {
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
// Writes a finished tile to C. Most tiles are whole, so loops of constant length keep them in registers.
template <typename Out>
GW_INLINE void put_any(const FinishedTile& f, int64_t begin, int64_t end) {
  f.at.columns == kBf16Columns ? put<Out>(f, begin, end, kBf16Columns)
                               : put<Out>(f, begin, end, f.at.columns);
}
GW_SIMD void put_rows(const void* finished, int64_t begin, int64_t end) {
  const auto& f = *static_cast<const FinishedTile*>(finished);
  f.g.c.type == Element::fp32 ? put_any<float>(f, begin, end) : put_any<Bf16>(f, begin, end);
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

namespace {

// Packs all of `lines`, `width` per panel, panels in sequence, starting at `first`. Lines that are columns
// share their rows' cache lines and pages, so some pairs of all panels are packed before the next pairs.
void pack_panels(const Bf16Lines& lines, const Bf16Panel& first) {
  const int64_t pairs_at_once = lines.are_rows ? first.pairs : kPairsPerBlock;
  for (int64_t pair = 0; pair < first.pairs; pair += pairs_at_once) {
    for (int64_t line = 0; line < lines.count; line += first.width) {
      Bf16Lines some = lines;
      some.from += lines.are_rows ? line * lines.ld : 2 * pair * lines.ld + line;
      some.k -= 2 * pair;
      some.count = std::min<int64_t>(first.width, lines.count - line);
      Bf16Panel panel = first;
      panel.pairs = std::min(pairs_at_once, first.pairs - pair);
      panel.to += line * first.pairs + pair * first.width;
      pack_bf16(some, panel);
    }
  }
}

}  // namespace

void Bf16Panels::pack(const Gemm& g, int64_t index, int64_t begin, int64_t end) {
  const int64_t column = begin * kBf16Columns;
  pack_panels({.are_rows = g.transpose_b,
               .from = g.b.at<Bf16>(index * g.stride_b) + (g.transpose_b ? column * g.ldb : column),
               .ld = g.ldb,
               .k = g.k,
               .count = std::min(end * kBf16Columns, g.n) - column},
              {.in_blocks = false,
               .width = kBf16Columns,
               .pairs = pairs_,
               .to = words_ + begin * pairs_ * kBf16Columns});
}

void bf16_gemm_rows(const Gemm& g, Bf16Products way, const Bf16Panels& b, int64_t index, int64_t begin,
                    int64_t end) {
  static PerThread<AlignedMemory<uint32_t>> memory;
  const auto [tile_rows, in_blocks] = tile_shape(way);
  const int64_t pairs = pairs_of(g, way), panel = pairs * tile_rows;
  const int64_t panels = (end - begin + tile_rows - 1) / tile_rows;
  const auto rows_of_panel = [=](int64_t i) {
    return std::min<int64_t>(tile_rows, end - begin - i * tile_rows);
  };
  const Bf16* a = g.a.at<Bf16>(index * g.stride_a + (g.transpose_a ? begin : begin * g.lda));
  // Whole tiles of A are read in place if each row begins with a cache line and ends with a block.
  const bool in_place = in_blocks && !g.transpose_a && g.k % (2 * kPairsPerBlock) == 0 && g.k > 0 &&
                        g.lda % 32 == 0 && reinterpret_cast<uintptr_t>(a) % 64 == 0;
  const int64_t unpacked = in_place ? (end - begin) / tile_rows : 0, first = unpacked * tile_rows;
  uint32_t* const packed = memory.get().reserve((panels - unpacked) * panel);
  pack_panels({.are_rows = !g.transpose_a,
               .from = a + first * g.lda,
               .ld = g.lda,
               .k = g.k,
               .count = end - begin - first},
              {.in_blocks = in_blocks, .width = tile_rows, .pairs = pairs, .to = packed});
  const auto rows_at = [&](int64_t i) -> Bf16Rows {
    if (i < unpacked)
      return {reinterpret_cast<const uint32_t*>(a + i * tile_rows * g.lda), g.lda / 2, kPairsPerBlock};
    return {packed + (i - unpacked) * panel, kPairsPerBlock, tile_rows * (in_blocks ? kPairsPerBlock : 1)};
  };
  // While a tile is computed, the previous tile is written to C.
  alignas(64) float tiles_memory[2][kMostBf16Rows * kBf16Columns];
  FinishedTile finished{g, nullptr, {}};
  const Bf16Tiles tiles(way);
  int turn = 0;
  for (int64_t j = 0; j < b.count(); ++j) {
    const int64_t column = j * kBf16Columns, columns = std::min<int64_t>(kBf16Columns, g.n - column);
    for (int64_t i = 0; i < panels; ++i, turn = 1 - turn) {
      float* const tile = tiles_memory[turn];
      tiles.multiply(rows_at(i), b.panel(j), pairs, tile, {put_rows, &finished, finished.at.rows});
      finished.tile = tile;
      finished.at = {index, begin + i * tile_rows, column, rows_of_panel(i), columns};
    }
  }
  put_rows(&finished, 0, finished.at.rows);
}

}  // namespace gradwire::host
