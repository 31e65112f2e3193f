#include "kernels/gemm/bf16_gemm.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "runtime/threads/thread.h"

#ifdef __x86_64__
// GCC 12 warns about undefined values in the header itself:
// https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#define GW_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define GW_AVX512_INLINE __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) inline
#ifdef __linux__
#define GW_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace gradwire::host {
namespace {

// Returns the number of pairs along k, at least one (of zeros), so that k = 0 still applies bias and beta.
int64_t pairs_of(const Gemm& g, Bf16Products way) {
  const int64_t pairs = std::max<int64_t>(1, (g.k + 1) / 2);
  if (!tile_shape(way).in_blocks) return pairs;
  return (pairs + kPairsPerBlock - 1) / kPairsPerBlock * kPairsPerBlock;
}

// A finished tile and its destination in C: `rows` x `columns` elements of product `index`, starting at (row,
// column).
struct FinishedTile {
  const Gemm& g;
  const float* tile = nullptr;
  int64_t index = 0, row = 0, column = 0, rows = 0, columns = 0;
};

template <typename Out>
GW_INLINE void put(const FinishedTile& finished, int64_t begin, int64_t end, int64_t columns) {
  const Gemm& g = finished.g;
  const float* tile = finished.tile + begin * kBf16Columns;
  Out* c = g.c.at<Out>(finished.index * g.stride_c + (finished.row + begin) * g.ldc + finished.column);
  const Out* bias = g.bias.data == nullptr ? nullptr : g.bias.at<Out>(finished.column);
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
  f.columns == kBf16Columns ? put<Out>(f, begin, end, kBf16Columns) : put<Out>(f, begin, end, f.columns);
}
GW_SIMD void put_rows(const void* finished, int64_t begin, int64_t end) {
  const auto& f = *static_cast<const FinishedTile*>(finished);
  f.g.c.type == Element::fp32 ? put_any<float>(f, begin, end) : put_any<Bf16>(f, begin, end);
}

std::atomic<Bf16Products>& chosen() {
  static std::atomic<Bf16Products> way{best_bf16_products()};
  return way;
}

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
  alignas(64) float tiles_memory[2][kMaxBf16Rows * kBf16Columns];
  FinishedTile finished{g};
  const Bf16Tiles tiles(way);
  int turn = 0;
  for (int64_t j = 0; j < b.count(); ++j) {
    const int64_t column = j * kBf16Columns, columns = std::min<int64_t>(kBf16Columns, g.n - column);
    for (int64_t i = 0; i < panels; ++i, turn = 1 - turn) {
      float* const tile = tiles_memory[turn];
      tiles.multiply(rows_at(i), b.panel(j), pairs, tile, {put_rows, &finished, finished.rows});
      finished.tile = tile;
      finished.index = index, finished.row = begin + i * tile_rows, finished.column = column;
      finished.rows = rows_of_panel(i), finished.columns = columns;
    }
  }
  put_rows(&finished, 0, finished.rows);
}

}  // namespace gradwire::host

namespace gradwire::reference {

void pack_bf16(const host::Bf16Lines& lines, const host::Bf16Panel& panel) {
  auto element = [&](int64_t line, int64_t i) -> uint32_t {
    if (line >= lines.count || i >= lines.k) return 0;
    return lines.from[lines.are_rows ? line * lines.ld + i : i * lines.ld + line].bits;
  };
  for (int64_t p = 0; p < panel.pairs; ++p) {
    for (int64_t i = 0; i < panel.width; ++i) {
      const int64_t at =
          panel.in_blocks
              ? (p / host::kPairsPerBlock * panel.width + i) * host::kPairsPerBlock + p % host::kPairsPerBlock
              : p * panel.width + i;
      panel.to[at] = element(i, 2 * p) | element(i, 2 * p + 1) << 16;
    }
  }
}

}  // namespace gradwire::reference

namespace gradwire::host {
namespace {

#ifdef __x86_64__
// A block of words: 16 lines of 16 pairs, or 16 pairs of 16 lines.
struct Words {
  __m512i row[16];
};

GW_AVX512_INLINE Words transposed(Words w) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(w.row[i], w.row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(w.row[i], w.row[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    w.row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    w.row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    w.row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    w.row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // Now row 4g + c holds, in its 128-bit lane l, rows 4g to 4g + 3 of column 4l + c.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(w.row[c], w.row[4 + c], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(w.row[8 + c], w.row[12 + c], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(w.row[c], w.row[4 + c], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(w.row[8 + c], w.row[12 + c], 0xdd);
    t[c] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[8 + c] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[12 + c] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  Words out;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) out.row[i] = t[i];
  return out;
}

GW_AVX512_INLINE uint32_t first_bits(int64_t count) {
  if (count <= 0) return 0;
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// Loads lines `line` to line + 15, pairs `pair` to pair + 15, as far as they exist; a row per line.
GW_AVX512_INLINE Words load_rows(const Bf16Lines& lines, int64_t line, int64_t pair) {
  const __mmask32 there = first_bits(lines.k - 2 * pair);
  const Bf16* from = lines.from + line * lines.ld + 2 * pair;
  Words w;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    w.row[i] = _mm512_maskz_loadu_epi16(line + i < lines.count ? there : 0, from + i * lines.ld);
  }
  return w;
}
// Loads the same words as load_rows(), with a row per pair.
GW_AVX512_INLINE Words load_columns(const Bf16Lines& lines, int64_t line, int64_t pair) {
  const auto there = static_cast<__mmask16>(first_bits(lines.count - line));
  const Bf16* from = lines.from + 2 * pair * lines.ld + line;
  Words w;
#pragma GCC unroll 16
  for (int p = 0; p < 16; ++p) {
    const int64_t i = 2 * (pair + p);
    const __m256i first = _mm256_maskz_loadu_epi16(i < lines.k ? there : 0, from + 2 * p * lines.ld);
    const __m256i second =
        _mm256_maskz_loadu_epi16(i + 1 < lines.k ? there : 0, from + (2 * p + 1) * lines.ld);
    w.row[p] =
        _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
  }
  return w;
}

template <bool kLinesAreRows, bool kInBlocks>
GW_AVX512_INLINE void pack_blocks(const Bf16Lines& lines, const Bf16Panel& panel) {
  for (int64_t pair = 0; pair < panel.pairs; pair += kPairsPerBlock) {
    for (int64_t line = 0; line < panel.width; line += 16) {
      Words w = kLinesAreRows ? load_rows(lines, line, pair) : load_columns(lines, line, pair);
      if constexpr (kLinesAreRows != kInBlocks) w = transposed(w);
      if constexpr (kInBlocks) {
        uint32_t* to = panel.to + (pair / kPairsPerBlock * panel.width + line) * kPairsPerBlock;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          if (line + i < panel.width) _mm512_storeu_si512(to + i * kPairsPerBlock, w.row[i]);
        }
      } else {
        const auto columns = static_cast<__mmask16>(first_bits(panel.width - line));
        uint32_t* to = panel.to + pair * panel.width + line;
#pragma GCC unroll 16
        for (int p = 0; p < 16; ++p) {
          if (pair + p < panel.pairs) _mm512_mask_storeu_epi32(to + p * panel.width, columns, w.row[p]);
        }
      }
    }
  }
}

GW_AVX512 void pack_avx512(const Bf16Lines& lines, const Bf16Panel& panel) {
  if (lines.are_rows) {
    panel.in_blocks ? pack_blocks<true, true>(lines, panel) : pack_blocks<true, false>(lines, panel);
  } else {
    panel.in_blocks ? pack_blocks<false, true>(lines, panel) : pack_blocks<false, false>(lines, panel);
  }
}

#endif

constexpr int kAvx512Rows = 14;  // accumulators use 28 of 32 vector registers
constexpr int kAmxRows = 32;     // accumulators use 2 x 2 tile registers of 16 x 16

// Returns x, or zero if x is subnormal: applied to operands and results.
float flushed(float x) {
  return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
// Returns a BF16 number of a pair: number 0 in the lower half, or number 1.
float number_of(uint32_t pair, int which) {
  return flushed(bits_float(which == 0 ? pair << 16 : pair & 0xffff0000u));
}

void avx512_emulated(const Bf16Rows& rows, const uint32_t* b, int64_t pairs, float* tile,
                     const Bf16Meanwhile& meanwhile) {
  meanwhile.run(meanwhile.work, 0, meanwhile.parts);
  const uint32_t* a = rows.from;
  std::fill_n(tile, kAvx512Rows * kBf16Columns, 0.0f);
  for (int64_t p = 0; p < pairs; ++p, a += rows.block, b += kBf16Columns) {
    for (int row = 0; row < kAvx512Rows; ++row) {
      for (int column = 0; column < kBf16Columns; ++column) {
        float& sum = tile[row * kBf16Columns + column];
        sum = flushed(std::fma(number_of(a[row], 1), number_of(b[column], 1), sum));
        sum = flushed(std::fma(number_of(a[row], 0), number_of(b[column], 0), sum));
      }
    }
  }
}

void amx_emulated(const Bf16Rows& rows, const uint32_t* b, int64_t pairs, float* tile,
                  const Bf16Meanwhile& meanwhile) {
  meanwhile.run(meanwhile.work, 0, meanwhile.parts);
  const uint32_t* a = rows.from;
  std::fill_n(tile, kAmxRows * kBf16Columns, 0.0f);
  for (int64_t p = 0; p < pairs; p += kPairsPerBlock, a += rows.block, b += kPairsPerBlock * kBf16Columns) {
    for (int row = 0; row < kAmxRows; ++row) {
      for (int column = 0; column < kBf16Columns; ++column) {
        float first = 0.0f, second = 0.0f;
        for (int i = 0; i < kPairsPerBlock; ++i) {
          const uint32_t x = a[row * rows.row + i], y = b[i * kBf16Columns + column];
          first = flushed(std::fma(number_of(x, 0), number_of(y, 0), first));
          second = flushed(std::fma(number_of(x, 1), number_of(y, 1), second));
        }
        float& sum = tile[row * kBf16Columns + column];
        sum = flushed(sum + flushed(first + second));
      }
    }
  }
}

#ifdef __x86_64__
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void avx512(const Bf16Rows& rows,
                                                                            const uint32_t* b, int64_t pairs,
                                                                            float* tile,
                                                                            const Bf16Meanwhile& meanwhile) {
  meanwhile.run(meanwhile.work, 0, meanwhile.parts);
  const uint32_t* a = rows.from;
  __m512 low[kAvx512Rows], high[kAvx512Rows];
#pragma GCC unroll 14
  for (int row = 0; row < kAvx512Rows; ++row) low[row] = high[row] = _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, a += rows.block, b += kBf16Columns) {
    const auto b_low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    const auto b_high = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + kBf16Columns / 2));
#pragma GCC unroll 14
    for (int row = 0; row < kAvx512Rows; ++row) {
      const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[row])));
      low[row] = _mm512_dpbf16_ps(low[row], x, b_low);
      high[row] = _mm512_dpbf16_ps(high[row], x, b_high);
    }
  }
#pragma GCC unroll 14
  for (int row = 0; row < kAvx512Rows; ++row) {
    _mm512_storeu_ps(tile + row * kBf16Columns, low[row]);
    _mm512_storeu_ps(tile + row * kBf16Columns + kBf16Columns / 2, high[row]);
  }
}
#endif

#ifdef GW_AMX
// Computes a tile by AMX. Tile registers 0 to 3: C; 4 and 5: rows 0 to 15 and 16 to 31 of A; 6 and 7: columns
// 0 to 15 and 16 to 31 of B.
__attribute__((target("amx-tile,amx-bf16"))) void amx(const Bf16Rows& rows, const uint32_t* b, int64_t pairs,
                                                      float* tile, const Bf16Meanwhile& meanwhile) {
  constexpr int kTileBytes = kBf16Columns * 4;
  const uint32_t* a = rows.from;
  const int64_t half = kAmxRows / 2 * rows.row, row_bytes = 4 * rows.row;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t blocks = pairs / kPairsPerBlock;
  for (int64_t i = 0; i < blocks; ++i, a += rows.block, b += kPairsPerBlock * kBf16Columns) {
    _tile_loadd(4, a, row_bytes);
    _tile_loadd(6, b, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 16, kTileBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + half, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    meanwhile.run(meanwhile.work, meanwhile.parts * i / blocks, meanwhile.parts * (i + 1) / blocks);
  }
  _tile_stored(0, tile, kTileBytes);
  _tile_stored(1, tile + 16, kTileBytes);
  _tile_stored(2, tile + 16 * kBf16Columns, kTileBytes);
  _tile_stored(3, tile + 16 * kBf16Columns + 16, kTileBytes);
}

// The operand of LDTILECFG: 8 tile registers of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
__attribute__((target("amx-tile"))) void configure_amx() {
  // `config` is static, so that all 64 bytes are in memory: the intrinsic's argument type covers only the
  // first 8
  static constexpr TileConfig config;
  _tile_loadconfig(&config);
}
// Releases the tile registers. Otherwise the kernel saves 8 KB more at each of this thread's context
// switches.
__attribute__((target("amx-tile"))) void release_amx() {
  _tile_release();
}

// Returns whether the process may use tile registers: checks CPUID's bits and requests Linux's permission.
bool permits_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool has_avx512_bf16() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Returns whether AMX is usable. Packing for AMX uses AVX-512; every processor with AMX has AVX-512.
bool has_amx() {
#ifdef GW_AMX
  static const bool permitted = has_avx512_bf16() && permits_amx();
  return permitted;
#else
  return false;
#endif
}

}  // namespace

void pack_bf16(const Bf16Lines& lines, const Bf16Panel& panel) {
#ifdef __x86_64__
  if (has_avx512_bf16()) return pack_avx512(lines, panel);
#endif
  reference::pack_bf16(lines, panel);
}

bool has_bf16_products(Bf16Products way) {
  if (way == Bf16Products::amx) return has_amx();
  if (way == Bf16Products::avx512) return has_avx512_bf16();
  return true;
}

Bf16Products best_bf16_products() {
  if (has_amx()) return Bf16Products::amx;
#ifdef __x86_64__
  // On processors with AVX512-FP16, Intel's since Sapphire Rapids, VDPBF16PS is slower than two FP32 FMAs:
  // 115 against 174 GFLOP/s were measured. They should use AMX, but a virtual machine may hide it.
  if (has_avx512_bf16() && !__builtin_cpu_supports("avx512fp16")) return Bf16Products::avx512;
#endif
  return Bf16Products::widened;
}

const char* name_of(Bf16Products way) {
  static constexpr const char* kNames[] = {"AMX", "AMX, emulated", "AVX512-BF16", "AVX512-BF16, emulated",
                                           "FP32"};
  return kNames[static_cast<size_t>(way)];
}

Bf16TileShape tile_shape(Bf16Products way) {
  const bool blocks = way == Bf16Products::amx || way == Bf16Products::amx_emulated;
  return {.rows = blocks ? kAmxRows : kAvx512Rows, .in_blocks = blocks};
}

Bf16Tiles::Bf16Tiles(Bf16Products way) : way_(way) {
  multiply = way == Bf16Products::amx_emulated ? amx_emulated : avx512_emulated;
#ifdef __x86_64__
  if (way == Bf16Products::avx512) multiply = avx512;
#endif
#ifdef GW_AMX
  if (way == Bf16Products::amx) {
    multiply = amx;
    configure_amx();
  }
#endif
}

Bf16Tiles::~Bf16Tiles() {
#ifdef GW_AMX
  if (way_ == Bf16Products::amx) release_amx();
#endif
}

}  // namespace gradwire::host
