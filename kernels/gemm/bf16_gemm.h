// Host products of BF16 matrices that stay BF16 up to the multiplication: by AMX tiles or by AVX512-BF16, at
// up to 16 and 2 times the FMA rate and half the bytes of FP32.
//
// Rows of op(A) and columns of op(B) are packed into panels of pairs, consecutive along k and padded with
// zeros. AMX reads rows of A in place if they are whole cache lines. A tile of C stays in
// registers for all of k, so its sums are in the order of k, for any number of threads and any
// division of C.
//
// Floor: 2 m n k FLOPs at 1024 (AMX) or 64 (each 512-bit unit) per cycle. Packing moves 4 B per element of A
// and of B.
#pragma once

#include <cstdint>

#include "kernels/gemm/gemm.h"
#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"

namespace gradwire::host {

// Tiles of C = op(A) op(B) for BF16 operands, for each instruction set. Each instruction set also has an
// emulation in plain arithmetic with the same bits, so that any processor tests all instruction sets.
//
//   avx512   VDPBF16PS: of a pair, the second product is added first. Every addition is rounded.
//   amx      TDPBF16PS: 16 pairs at a time. The products of the first numbers and of the second numbers have
//            separate sums, from zero; the sums are added, and the result to C. Every addition is rounded.
//
// Subnormal operands and results are zero in both instruction sets.

enum class Bf16Products : uint8_t {
  amx,
  amx_emulated,
  avx512,
  avx512_emulated,
  widened,  // gemm_host.cpp: FP32 products of operands widened to FP32
};

// Returns the fastest way to multiply BF16 that the processor has and the operating system permits.
Bf16Products best_bf16_products();
bool has_bf16_products(Bf16Products way);
// Returns the way's name: "AMX", "AVX512-BF16" or "FP32".
const char* name_of(Bf16Products way);

constexpr int kBf16Columns = 32;  // columns of a tile
constexpr int kMaxBf16Rows = 32;
constexpr int kPairsPerBlock = 16;  // 64 bytes of a row

// The layout for packing. in_blocks: A's panel is blocks of 16 pairs, each with its rows in sequence, and k
// is rounded up to whole blocks in A and B. Otherwise, as in B's panels, the first pairs of all lines come
// first, then the second, ...
struct Bf16TileShape {
  int rows;  // rows of a tile
  bool in_blocks;
};
Bf16TileShape tile_shape(Bf16Products way);

// The rows of A for a tile, in place or packed: `row` words between two rows, `block` between two blocks of
// pairs (not in blocks: between one pair of all rows and the next).
struct Bf16Rows {
  const uint32_t* from;
  int64_t row, block;
};

// Other work to do while a tile is computed: parts [0, parts), in order. Between AMX's instructions such work
// costs almost no time, since AMX leaves the core's other units idle.
struct Bf16Meanwhile {
  void (*run)(const void* work, int64_t begin, int64_t end);
  const void* work;
  int64_t parts;
};

// Sets the processor up for tiles. Between construction and destruction the thread must not use AMX outside
// this class.
class Bf16Tiles {
 public:
  explicit Bf16Tiles(Bf16Products way);
  ~Bf16Tiles();
  Bf16Tiles(const Bf16Tiles&) = delete;
  Bf16Tiles& operator=(const Bf16Tiles&) = delete;

  // Computes tile (rows, kBf16Columns) as the product of rows of A and a panel of B, and runs `meanwhile`.
  // The tile, the rows and the panel begin with a cache line, as does each row in blocks.
  void (*multiply)(const Bf16Rows& a, const uint32_t* b, int64_t pairs, float* tile,
                   const Bf16Meanwhile& meanwhile);

 private:
  Bf16Products way_;
};

// Returns how the process multiplies BF16 matrices: the processor's fastest way, unless a test overrides it.
Bf16Products bf16_products();
void use_bf16_products(Bf16Products way);

// op(B) of one product, packed for one way to multiply.
class Bf16Panels {
 public:
  // Resizes to the panels of a product. pack() then packs the columns of panels [begin, end) of count().
  void resize(const Gemm& g, Bf16Products way);
  void pack(const Gemm& g, int64_t index, int64_t begin, int64_t end);
  int64_t count() const { return count_; }
  const uint32_t* panel(int64_t i) const { return words_ + i * pairs_ * kBf16Columns; }

 private:
  int64_t count_ = 0, pairs_ = 0;
  uint32_t* words_ = nullptr;
  AlignedMemory<uint32_t> memory_;
};

// Computes rows [begin, end) of C of product `index` of the batch. `way` must not be widened; b: op(B) packed
// for it. Bias, alpha and beta as in Gemm.
void bf16_gemm_rows(const Gemm& g, Bf16Products way, const Bf16Panels& b, int64_t index, int64_t begin,
                    int64_t end);

// Packs lines of a BF16 matrix (rows of op(A), columns of op(B)) into panels of pairs along k. A word holds
// two elements, the first in its lower half. Bytes moved per element: 2 read, 2 written.

// The location of a panel's lines.
struct Bf16Lines {
  // true: line i begins at from + i ld and is contiguous. false: line i begins at from + i, and its elements
  // are ld apart.
  bool are_rows;
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
