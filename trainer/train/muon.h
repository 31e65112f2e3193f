// Muon (Jordan et al., 2024) for the layers' matrices, as a baseline for Dion: M <- mu M + G with the mean
// gradient G, and the step sqrt(rows / cols) NS5(M), where NS5 nearly orthonormalizes M by five steps of a
// Newton-Schulz iteration, X <- a X + (b A + c A^2) X with A = X X^T, from X = M / |M|. Without Nesterov's
// step. Products are FP32 (or TF32), of the smaller side. On CUDA one block sums a matrix's norm, slowly.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/device.h"

namespace gradwire {

// A matrix of the model in a flat buffer.
struct FlatMatrix {
  int64_t begin = 0, rows = 0, cols = 0;
  int64_t end() const { return begin + rows * cols; }
};

class Muon {
 public:
  // `elements`: size of the flat buffer.
  Muon(const Stream& stream, std::vector<FlatMatrix> matrices, int64_t elements, double mu,
       Precision precision);
  // Enqueues the momentum's update and the steps. `grads` and `momentum` are flat buffers.
  void run(const Stream& stream, const float* grads, float* momentum);
  // Returns the flat buffer of the matrices' steps; other elements are unspecified.
  const float* steps() const { return steps_.as<const float>(); }

 private:
  // Enqueues X <- s (a X + (b A + c A^2) X) from `x` to `out`.
  void iterate(const Stream& stream, const FlatMatrix& matrix, const float* x, float* out, float scale);

  const std::vector<FlatMatrix> matrices_;
  const float mu_;
  const Precision precision_;
  MatrixTable columns_;  // each matrix as one column
  Buffer steps_, x_;     // flat; the iteration's two halves
  Buffer a_, b_;         // (side, side) of the largest smaller side
  Buffer flags_;         // zeros
};

}  // namespace gradwire
