// The optimizer's state and its step over the flat parameter buffer or a rank's parts of the buffer: one
// launch for the whole model, or one launch per part; with Dion or Muon, per run of matrices or of other
// tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/device.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"

namespace gradwire {

// Muon (Jordan et al., 2024) for the layers' matrices, as a baseline for Dion: M <- mu M + G with the mean
// gradient G, and the step sqrt(rows / cols) NS5(M), where NS5 nearly orthonormalizes M by five steps of a
// Newton-Schulz iteration, X <- a X + (b A + c A^2) X with A = X X^T, from X = M / |M|. Without Nesterov's
// step. Products are FP32 (or TF32), of the smaller side. On CUDA one block sums a matrix's norm, slowly.

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

class Optimizer {
 public:
  // Allocates state for the parameters in `parts` of the flat buffer, and zeroes it in stream order.
  // `matrices`: whose gradients are Dion's steps, or that Muon updates, in order.
  Optimizer(const TrainConfig& config, const Stream& stream, std::vector<ElementRange> parts,
            const std::vector<FlatMatrix>& matrices = {});

  // Sends the values that change with the step (counted from 0) to the device in stream order, so the host
  // need not wait for the previous step. Call before step(), and outside a graph that contains step().
  void prepare(const Stream& stream, int64_t step, double lr);
  // Enqueues a step. The work is the same in each step, so a graph can capture it. Also writes the new
  // parameters as BF16 to the same offsets in `rounded`, unless `rounded` is null.
  void step(const Stream& stream, Parts<float> params, const float* grads, Bf16* rounded = nullptr);
  // Enqueues a step of the elements `range` of the flat buffer. Requires state for the whole buffer.
  void step(const Stream& stream, float* params, const float* grads, ElementRange range,
            Bf16* rounded = nullptr);

  // Returns the state for a checkpoint: the parts, one after another.
  std::vector<FlatState> moments() const;
  const std::vector<ElementRange>& parts() const { return parts_; }
  int64_t elements() const { return elements_; }  // elements of all parts

 private:
  // Elements of one part that take the same kind of step. dion: of Dion or Muon.
  struct Run {
    ElementRange elements;
    int64_t first = 0;  // position in the state
    bool dion = false;
  };
  void add_runs(const std::vector<FlatMatrix>& matrices);
  void step_run(const Stream& stream, float* params, const float* grads, Bf16* rounded, const Run& run);

  OptimizerKind kind_;
  const std::vector<ElementRange> parts_;
  std::vector<Run> runs_;
  int64_t elements_ = 0;
  double dion_rate_;  // the matrices' learning rate divided by AdamW's
  double momentum_, beta1_, beta2_, eps_, weight_decay_;
  Buffer first_;              // velocity, or AdamW's m
  Buffer second_;             // AdamW's v
  Buffer scalars_;            // two OptimizerScalars; the second is the matrices'
  std::optional<Muon> muon_;  // its momentum is in first_
};

// The learning-rate schedule: linear warm-up, then half a cosine down to 0.

// Returns lr * (step + 1) / warmup_steps while step < warmup_steps, so the first rate is not 0 and the last
// warm-up rate is the peak. Then lr * (1 + cos(pi * p)) / 2, where p rises from 0 to 1 at `steps`.
double learning_rate(const TrainConfig& config, int64_t step);

}  // namespace gradwire
