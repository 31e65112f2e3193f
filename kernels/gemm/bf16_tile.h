// Tiles of C = op(A) op(B) for BF16 operands, for each instruction set. Each instruction set also has an
// emulation in plain arithmetic with the same bits, so that any processor tests all instruction sets.
//
//   avx512   VDPBF16PS: of a pair, the second product is added first. Every addition is rounded.
//   amx      TDPBF16PS: 16 pairs at a time. The products of the first numbers and of the second numbers have
//            separate sums, from zero; the sums are added, and the result to C. Every addition is rounded.
//
// Subnormal operands and results are zero in both instruction sets.
#pragma once

#include <cstdint>

namespace gradwire::host {

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
constexpr int kMostBf16Rows = 32;
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
  void multiply(const Bf16Rows& a, const uint32_t* b, int64_t pairs, float* tile,
                const Bf16Meanwhile& meanwhile) const {
    multiply_(a, b, pairs, tile, meanwhile);
  }

 private:
  Bf16Products way_;
  void (*multiply_)(const Bf16Rows&, const uint32_t*, int64_t, float*, const Bf16Meanwhile&);
};

}  // namespace gradwire::host
