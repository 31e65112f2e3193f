// Host products of BF16 matrices that stay BF16 up to the multiplication: by AMX tiles or by AVX512-BF16, at
// up to 16 and 2 times the FMA rate and half the bytes of FP32.
//
// Rows of op(A) and columns of op(B) are packed into panels of pairs, consecutive along k and padded with
// zeros (bf16_pack.h). AMX reads rows of A in place if they are whole cache lines. A tile of C stays in
// registers for all of k (bf16_tile.h), so its sums are in the order of k, for any number of threads and any
// division of C.
//
// Floor: 2 m n k FLOPs at 1024 (AMX) or 64 (each 512-bit unit) per cycle. Packing moves 4 B per element of A
// and of B.
#pragma once

#include "kernels/gemm/bf16_tile.h"
#include "kernels/gemm/gemm.h"
#include "kernels/simd/aligned_memory.h"

namespace gradwire::host {

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

}  // namespace gradwire::host
