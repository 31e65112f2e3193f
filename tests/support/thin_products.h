// Runs PowerSGD's products with a BLAS library's sgemm on the host, for machines without cuBLAS.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "kernels/powersgd/library.h"

namespace gradwire::testing {

// Computes the product as documented by BLAS: column-major C = A op(B).
inline void interpret(const ThinGemm& g) {
  for (int column = 0; column < g.n; ++column) {
    for (int row = 0; row < g.m; ++row) {
      double sum = 0.0;
      for (int k = 0; k < g.k; ++k) {
        const auto b = g.transpose_b ? int64_t{k} * g.ldb + column : int64_t{column} * g.ldb + k;
        sum += static_cast<double>(g.a[int64_t{k} * g.lda + row]) * g.b[b];
      }
      g.c[int64_t{column} * g.ldc + row] = static_cast<float>(sum);
    }
  }
}

// Replaces cuBLAS by the host's BLAS during its lifetime.
class StandInProducts final : public ThinProducts {
 public:
  StandInProducts() { stand_in_for_thin_products(this); }
  ~StandInProducts() override { stand_in_for_thin_products(nullptr); }
  StandInProducts(const StandInProducts&) = delete;
  StandInProducts& operator=(const StandInProducts&) = delete;

  std::string name() const override { return "stand-in 1"; }
  void run(const Stream& stream, std::span<const ThinGemm> products) override {
    for (const ThinGemm& gemm : products) {
      ++(gemm.transpose_b ? onto_p : onto_q);
      stream.submit([gemm] { interpret(gemm); });
    }
  }

  std::atomic<int> onto_q = 0, onto_p = 0;  // number of products so far
};

}  // namespace gradwire::testing
