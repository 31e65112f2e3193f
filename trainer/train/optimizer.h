// The optimizer's state and its step over the flat parameter buffer: one launch for the whole model.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"

namespace gradwire {

class Optimizer {
 public:
  // State for `elements` parameters, zeroed in stream order.
  Optimizer(const TrainConfig& config, const Stream& stream, int64_t elements);

  // What changes from step to step, for step number `step` (from 0): it reaches the device in stream order,
  // so the host need not wait for the previous step. Before step(), and outside of any graph that holds it.
  void prepare(const Stream& stream, int64_t step, double lr);
  // Enqueues a step. The same work each time.
  void step(const Stream& stream, float* params, const float* grads);

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
