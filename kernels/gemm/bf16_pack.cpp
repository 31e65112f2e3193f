#include "kernels/gemm/bf16_pack.h"

#include <algorithm>

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
#endif

namespace gradwire {

void reference::pack_bf16(const host::Bf16Lines& lines, const host::Bf16Panel& panel) {
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

namespace host {

#ifdef __x86_64__
namespace {

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

}  // namespace
#endif

void pack_bf16(const Bf16Lines& lines, const Bf16Panel& panel) {
#ifdef __x86_64__
  if (has_bf16_products(Bf16Products::avx512)) return pack_avx512(lines, panel);
#endif
  reference::pack_bf16(lines, panel);
}

}  // namespace host
}  // namespace gradwire
