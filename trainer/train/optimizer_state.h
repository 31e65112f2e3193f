// The optimizer's state and its step over the flat parameter buffer or a rank's parts of the buffer: one
// launch for the whole model, or one launch per part; with Dion or Muon, per run of matrices or of other
// tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/math/small_float.h"
#include "runtime/device/device.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/config/config.h"
#include "trainer/train/muon.h"

namespace gradwire {

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

}  // namespace gradwire
