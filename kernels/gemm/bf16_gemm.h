// Host products of BF16 matrices that stay BF16 up to the multiplication, for processors with AVX512-BF16: twice the
// FMA rate and half the bytes of FP32.
//
// Elements of op(A)'s rows and op(B)'s columns are packed into panels of pairs that follow each other along k, an odd
// last one with a zero. A tile of C stays in registers for all of k: its sums run in the order of k, whatever
// the number of threads and wherever C was cut. Of a pair, the second product is added first, each addition
// rounded, subnormals taken as zero: what VDPBF16PS does, and the emulation bit for bit.
//
// Floor: 2 m n k FLOPs at 64 per cycle and 512-bit unit. Packing moves 4 B per element of A and of B once.
#pragma once

#include <vector>

#include "kernels/gemm/gemm.h"

namespace gradwire::host {

enum class Bf16Products : uint8_t {
  avx512,    // VDPBF16PS
  emulated,  // the same bits in plain arithmetic, slowly: tests that way on any processor
  widened,   // gemm_host.cpp: FP32 products of operands made FP32
};

// Whether the processor has VDPBF16PS.
bool has_avx512_bf16();

// How the process multiplies BF16 matrices: by AVX-512 where the processor can, else widened; or as a test says.
Bf16Products bf16_products();
void use_bf16_products(Bf16Products way);

constexpr int kBf16Rows = 14, kBf16Columns = 32;  // of a tile: 28 of 32 vector registers

// op(B) of one product, packed.
class Bf16Panels {
 public:
  // Packs the columns of panels [begin, end) of count().
  void resize(const Gemm& g);
  void pack(const Gemm& g, int64_t index, int64_t begin, int64_t end);
  int64_t count() const { return count_; }
  const uint32_t* panel(int64_t i) const { return words_.data() + i * pairs_ * kBf16Columns; }

 private:
  int64_t count_ = 0, pairs_ = 0;
  std::vector<uint32_t> words_;
};

// `way`: not widened. Rows [begin, end) of C of product `index` of the batch; b: op(B) packed. Bias, alpha and beta as in Gemm.
void bf16_gemm_rows(const Gemm& g, Bf16Products way, const Bf16Panels& b, int64_t index, int64_t begin,
                    int64_t end);

}  // namespace gradwire::host
