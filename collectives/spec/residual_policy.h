// The options of a spec that say what a rank does with the values that its encodes lose, and when compression
// begins. They apply to every codec and format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

struct ResidualPolicy {
  // on: the errors of a step are added to the next step's gradient. ef21: ranks send the difference from an
  // estimate of their gradient (policy_codec.cpp).
  enum class Feedback : uint8_t { off, on, ef21 };
  Feedback feedback = Feedback::on;
  double decay = 1.0;  // ef_decay: the share of the residual that is added to the next step's gradient
  int64_t start = 0;   // [PyTorch: start_powerSGD_iter, 1000] first compressed step; earlier steps send FP32
  int64_t ramp = 0;    // steps, from `start` on, in formats wider than the spec's
  double momentum = 0.0;  // momentum correction, for codecs that send a few of the values
  double max_norm =
      0.0;  // times 1 / sqrt(ranks): the largest norm of a tensor's gradient on a rank; 0: not clipped

  bool keeps_errors() const { return feedback != Feedback::off; }
  // Returns which of `stages` formats, of which the last is the spec's, step `step` uses.
  size_t stage(int64_t step, size_t stages) const;
  bool operator==(const ResidualPolicy&) const = default;
};

}  // namespace gradwire
