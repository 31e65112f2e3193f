#include "kernels/gemm/bf16_tile.h"

#include <algorithm>
#include <cmath>

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#define GW_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/math/bf16.h"
#include "runtime/util/error.h"

namespace gradwire::host {
namespace {

constexpr int kAvx512Rows = 14;  // accumulators use 28 of 32 vector registers
constexpr int kAmxRows = 32;     // accumulators use 2 x 2 tile registers of 16 x 16

// Returns x, or zero if x is subnormal: applied to operands and results.
float flushed(float x) {
  return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
// Return the two BF16 numbers of a pair; the first is in the lower half.
float first_of(uint32_t pair) {
  return flushed(bits_float(pair << 16));
}
float second_of(uint32_t pair) {
  return flushed(bits_float(pair & 0xffff0000u));
}

void run_all(const Bf16Meanwhile& meanwhile) {
  meanwhile.run(meanwhile.work, 0, meanwhile.parts);
}

void avx512_emulated(const Bf16Rows& rows, const uint32_t* b, int64_t pairs, float* tile,
                     const Bf16Meanwhile& meanwhile) {
  run_all(meanwhile);
  const uint32_t* a = rows.from;
  std::fill_n(tile, kAvx512Rows * kBf16Columns, 0.0f);
  for (int64_t p = 0; p < pairs; ++p, a += rows.block, b += kBf16Columns) {
    for (int row = 0; row < kAvx512Rows; ++row) {
      for (int column = 0; column < kBf16Columns; ++column) {
        float& sum = tile[row * kBf16Columns + column];
        sum = flushed(std::fma(second_of(a[row]), second_of(b[column]), sum));
        sum = flushed(std::fma(first_of(a[row]), first_of(b[column]), sum));
      }
    }
  }
}

void amx_emulated(const Bf16Rows& rows, const uint32_t* b, int64_t pairs, float* tile,
                  const Bf16Meanwhile& meanwhile) {
  run_all(meanwhile);
  const uint32_t* a = rows.from;
  std::fill_n(tile, kAmxRows * kBf16Columns, 0.0f);
  for (int64_t p = 0; p < pairs; p += kPairsPerBlock, a += rows.block, b += kPairsPerBlock * kBf16Columns) {
    for (int row = 0; row < kAmxRows; ++row) {
      for (int column = 0; column < kBf16Columns; ++column) {
        float first = 0.0f, second = 0.0f;
        for (int i = 0; i < kPairsPerBlock; ++i) {
          const uint32_t x = a[row * rows.row + i], y = b[i * kBf16Columns + column];
          first = flushed(std::fma(first_of(x), first_of(y), first));
          second = flushed(std::fma(second_of(x), second_of(y), second));
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
  run_all(meanwhile);
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

// Returns whether the processor has AVX512-FP16, which identifies Intel's processors since Sapphire Rapids.
// Their VDPBF16PS is slower than two FP32 FMAs: 115 against 174 GFLOP/s were measured. These processors
// should use AMX, but a virtual machine may hide it.
bool has_avx512_fp16() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512fp16");
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

bool has_bf16_products(Bf16Products way) {
  if (way == Bf16Products::amx) return has_amx();
  if (way == Bf16Products::avx512) return has_avx512_bf16();
  return true;
}

Bf16Products best_bf16_products() {
  if (has_amx()) return Bf16Products::amx;
  return has_avx512_bf16() && !has_avx512_fp16() ? Bf16Products::avx512 : Bf16Products::widened;
}

const char* name_of(Bf16Products way) {
  switch (way) {
    case Bf16Products::amx:
      return "AMX";
    case Bf16Products::amx_emulated:
      return "AMX, emulated";
    case Bf16Products::avx512:
      return "AVX512-BF16";
    case Bf16Products::avx512_emulated:
      return "AVX512-BF16, emulated";
    case Bf16Products::widened:
      return "FP32";
  }
  throw Error("unknown Bf16Products");
}

Bf16TileShape tile_shape(Bf16Products way) {
  const bool blocks = way == Bf16Products::amx || way == Bf16Products::amx_emulated;
  return {.rows = blocks ? kAmxRows : kAvx512Rows, .in_blocks = blocks};
}

Bf16Tiles::Bf16Tiles(Bf16Products way) : way_(way) {
  multiply_ = way == Bf16Products::amx_emulated ? amx_emulated : avx512_emulated;
#ifdef __x86_64__
  if (way == Bf16Products::avx512) multiply_ = avx512;
#endif
#ifdef GW_AMX
  if (way == Bf16Products::amx) {
    multiply_ = amx;
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
