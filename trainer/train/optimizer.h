// The optimizer's state and its step over the flat parameter buffer: one launch for the whole model.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config.h"

namespace gradwire {

class Optimizer {
 public:
  // State for `elements` parameters, zeroed in stream order.
  Optimizer(const TrainConfig& config, const Stream& stream, int64_t elements);

  // Enqueues step number `step` (from 0) with this learning rate. What changes from step to step reaches the
  // device in stream order, so the host need not wait for the previous step.
  void step(const Stream& stream, int64_t step, double lr, float* params, const float* grads);

  // What outlives a step: each of `elements` floats.
  std::vector<FlatState> moments() const;

 private:
  OptimizerKind kind_;
  int64_t elements_;
  double momentum_, beta1_, beta2_, eps_, weight_decay_;
  Buffer first_;    // velocity, or AdamW's m
  Buffer second_;   // AdamW's v
  Buffer scalars_;  // one OptimizerScalars
};

}  // namespace gradwire
