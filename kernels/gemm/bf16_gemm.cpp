#include "kernels/gemm/bf16_gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "kernels/simd/simd.h"

namespace gradwire::host {
namespace {

constexpr int64_t kPairsAtOnce = 16;  // a cache line of a row

int64_t pairs_of(const Gemm& g) {
  return (g.k + 1) / 2;
}

// Two BF16 numbers, the first in the lower half.
uint32_t pair_of(Bf16 first, Bf16 second) {
  return first.bits | static_cast<uint32_t>(second.bits) << 16;
}

// One panel: to[p * width + i] = elements 2p and 2p + 1 along k of line i of `lines`; the lines beyond, to `width`,
// are zero.
//   lines_are_rows   line i begins at from + i ld and its elements follow each other
//   otherwise        line i begins at from + i and its elements are ld apart
GW_SIMD void pack_panel(bool lines_are_rows, const Bf16* from, int64_t ld, int64_t k, int64_t lines,
                        int width, uint32_t* to) {
  const int64_t whole = k / 2, pairs = (k + 1) / 2;
  if (lines < width) std::fill_n(to, pairs * width, 0u);
  if (lines_are_rows) {
    for (int64_t begin = 0; begin < whole; begin += kPairsAtOnce) {
      const int64_t end = std::min(whole, begin + kPairsAtOnce);
      for (int64_t i = 0; i < lines; ++i) {
        const Bf16* line = from + i * ld;
        for (int64_t p = begin; p < end; ++p) to[p * width + i] = pair_of(line[2 * p], line[2 * p + 1]);
      }
    }
  } else {
    for (int64_t p = 0; p < whole; ++p) {
      const Bf16 *first = from + 2 * p * ld, *second = first + ld;
      uint32_t* const out = to + p * width;
      for (int64_t i = 0; i < lines; ++i) out[i] = pair_of(first[i], second[i]);
    }
  }
  if (whole == pairs) return;
  for (int64_t i = 0; i < lines; ++i) {
    to[whole * width + i] = pair_of(lines_are_rows ? from[i * ld + k - 1] : from[(k - 1) * ld + i], Bf16{0});
  }
}

// Each kernel: tile (kBf16Rows, kBf16Columns) = the products of a panel of A and one of B.
#ifdef __x86_64__
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void tile_avx512(const uint32_t* a,
                                                                                 const uint32_t* b,
                                                                                 int64_t pairs, float* tile) {
  __m512 low[kBf16Rows], high[kBf16Rows];
#pragma GCC unroll 14
  for (int row = 0; row < kBf16Rows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, a += kBf16Rows, b += kBf16Columns) {
    const auto b_low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    const auto b_high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + kBf16Columns / 2));
#pragma GCC unroll 14
    for (int row = 0; row < kBf16Rows; ++row) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[row])));
      low[row] = _mm512_dpbf16_ps(low[row], x, b_low);
      high[row] = _mm512_dpbf16_ps(high[row], x, b_high);
    }
  }
#pragma GCC unroll 14
  for (int row = 0; row < kBf16Rows; ++row) {
    _mm512_storeu_ps(tile + row * kBf16Columns, low[row]);
    _mm512_storeu_ps(tile + row * kBf16Columns + kBf16Columns / 2, high[row]);
  }
}
#endif

// Operands and results below the least normal number are zero.
float flushed(float x) {
  return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
float first_of(uint32_t pair) {
  return flushed(bits_float(pair << 16));
}
float second_of(uint32_t pair) {
  return flushed(bits_float(pair & 0xffff0000u));
}

void tile_emulated(const uint32_t* a, const uint32_t* b, int64_t pairs, float* tile) {
  std::fill_n(tile, kBf16Rows * kBf16Columns, 0.0f);
  for (int64_t p = 0; p < pairs; ++p, a += kBf16Rows, b += kBf16Columns) {
    for (int row = 0; row < kBf16Rows; ++row) {
      for (int column = 0; column < kBf16Columns; ++column) {
        float& sum = tile[row * kBf16Columns + column];
        sum = flushed(std::fma(second_of(a[row]), second_of(b[column]), sum));
        sum = flushed(std::fma(first_of(a[row]), first_of(b[column]), sum));
      }
    }
  }
}

// What of a tile is in C, `rows` x `columns` from (row, column) on, goes there.
struct TilePlace {
  int64_t index, row, column, rows, columns;
};

template <typename Out>
GW_INLINE void put(const Gemm& g, const float* tile, const TilePlace& at) {
  Out* c = g.c.at<Out>(at.index * g.stride_c + at.row * g.ldc + at.column);
  const Out* bias = g.bias.data == nullptr ? nullptr : g.bias.at<Out>(at.column);
  for (int64_t i = 0; i < at.rows; ++i, c += g.ldc, tile += kBf16Columns) {
    float x[kBf16Columns];
    for (int64_t j = 0; j < at.columns; ++j) x[j] = g.alpha * tile[j];
    if (g.beta != 0.0f) {
      for (int64_t j = 0; j < at.columns; ++j) x[j] += g.beta * widen(c[j]);
    }
    if (bias != nullptr) {
      for (int64_t j = 0; j < at.columns; ++j) x[j] += widen(bias[j]);
    }
    for (int64_t j = 0; j < at.columns; ++j) c[j] = narrow<Out>(x[j]);
  }
}
GW_SIMD void put_tile(const Gemm& g, const float* tile, const TilePlace& at) {
  g.c.type == Element::fp32 ? put<float>(g, tile, at) : put<Bf16>(g, tile, at);
}

}  // namespace

bool has_avx512_bf16() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

namespace {
std::atomic<Bf16Products>& chosen() {
  static std::atomic<Bf16Products> way{has_avx512_bf16() ? Bf16Products::avx512 : Bf16Products::widened};
  return way;
}
}  // namespace

Bf16Products bf16_products() {
  return chosen().load(std::memory_order_relaxed);
}
void use_bf16_products(Bf16Products way) {
  chosen().store(way, std::memory_order_relaxed);
}

void Bf16Panels::resize(const Gemm& g) {
  pairs_ = pairs_of(g);
  count_ = (g.n + kBf16Columns - 1) / kBf16Columns;
  const auto words = static_cast<size_t>(count_ * pairs_ * kBf16Columns);
  if (words_.size() < words) words_.resize(words);
}

void Bf16Panels::pack(const Gemm& g, int64_t index, int64_t begin, int64_t end) {
  const Bf16* b = g.b.at<Bf16>(index * g.stride_b);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t column = i * kBf16Columns;
    pack_panel(g.transpose_b, b + (g.transpose_b ? column * g.ldb : column), g.ldb, g.k,
               std::min<int64_t>(kBf16Columns, g.n - column), kBf16Columns,
               words_.data() + i * pairs_ * kBf16Columns);
  }
}

void bf16_gemm_rows(const Gemm& g, Bf16Products way, const Bf16Panels& b, int64_t index, int64_t begin,
                    int64_t end) {
  thread_local std::vector<uint32_t> memory;
  const int64_t pairs = pairs_of(g), panel = pairs * kBf16Rows;
  const int64_t panels = (end - begin + kBf16Rows - 1) / kBf16Rows;
  if (static_cast<int64_t>(memory.size()) < panels * panel)
    memory.resize(static_cast<size_t>(panels * panel));
  uint32_t* const packed = memory.data();
  const Bf16* a = g.a.at<Bf16>(index * g.stride_a);
  for (int64_t i = 0; i < panels; ++i) {
    const int64_t row = begin + i * kBf16Rows;
    pack_panel(!g.transpose_a, a + (g.transpose_a ? row : row * g.lda), g.lda, g.k,
               std::min<int64_t>(kBf16Rows, end - row), kBf16Rows, packed + i * panel);
  }
  alignas(64) float tile[kBf16Rows * kBf16Columns];
  for (int64_t j = 0; j < b.count(); ++j) {
    const int64_t column = j * kBf16Columns, columns = std::min<int64_t>(kBf16Columns, g.n - column);
    for (int64_t i = 0; i < panels; ++i) {
#ifdef __x86_64__
      if (way == Bf16Products::avx512) {
        tile_avx512(packed + i * panel, b.panel(j), pairs, tile);
      } else
#endif
        tile_emulated(packed + i * panel, b.panel(j), pairs, tile);
      const int64_t row = begin + i * kBf16Rows;
      put_tile(g, tile, {index, row, column, std::min<int64_t>(kBf16Rows, end - row), columns});
    }
  }
}

}  // namespace gradwire::host
