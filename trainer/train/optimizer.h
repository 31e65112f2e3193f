// The optimizer's state and its step over the flat parameter buffer, or over a rank's parts of it: one launch for
// the whole model, or one per part.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/math/bf16.h"
#include "runtime/device.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"

namespace gradwire {

class Optimizer {
 public:
  // State for the parameters in these parts of the flat buffer, zeroed in stream order.
  Optimizer(const TrainConfig& config, const Stream& stream, std::vector<ElementRange> parts);

  // Sends the values that change with the step (from 0) to the device in stream order, so the host need not
  // wait for the previous step. Call before step(), and outside of a graph that contains step().
  void prepare(const Stream& stream, int64_t step, double lr);
  // Enqueues a step: the same work each time, so it can be captured. The new parameters are written as BF16 too, to
  // the same places in `rounded`, unless that is null.
  void step(const Stream& stream, Parts<float> params, Parts<const float> grads, Bf16* rounded = nullptr);
  // The same for these elements of the flat buffer only; the optimizer has state for all of it.
  void step(const Stream& stream, float* params, const float* grads, ElementRange range,
            Bf16* rounded = nullptr);

  // The state that a checkpoint saves: the parts, one after another.
  std::vector<FlatState> moments() const;
  const std::vector<ElementRange>& parts() const { return parts_; }
  int64_t elements() const { return elements_; }  // of all parts

 private:
  void step_part(const Stream& stream, float* params, const float* grads, Bf16* rounded, int64_t first,
                 int64_t count);

  OptimizerKind kind_;
  const std::vector<ElementRange> parts_;
  int64_t elements_ = 0;
  double momentum_, beta1_, beta2_, eps_, weight_decay_;
  Buffer first_;    // velocity, or AdamW's m
  Buffer second_;   // AdamW's v
  Buffer scalars_;  // one OptimizerScalars
};

}  // namespace gradwire
