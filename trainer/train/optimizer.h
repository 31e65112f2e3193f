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

  // Sends the values that change with the step (from 0) to the device in stream order, so the host need not
  // wait for the previous step. Call before step(), and outside of a graph that contains step().
  void prepare(const Stream& stream, int64_t step, double lr);
  // Enqueues a step: the same work each time, so it can be captured.
  void step(const Stream& stream, float* params, const float* grads);

  // The state that a checkpoint saves: buffers of `elements` floats.
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
