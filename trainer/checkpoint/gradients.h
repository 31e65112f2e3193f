// The gradients of one step on one rank, before communication. `gradwire train --dump-gradients` writes them
// to a safetensors file with torchvision's names and shapes, for `gradwire-bench formats --gradients`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "trainer/config/config.h"
#include "trainer/model/parameters.h"

namespace gradwire {

// Returns DIR/gradients-step-N.safetensors.
std::string gradients_path(const std::string& directory, int64_t step);

class GradientDump {
 public:
  // Prepares to dump the gradients of config.gradients_step. All referenced arguments must outlive the
  // object.
  GradientDump(const TrainConfig& config, const std::vector<VitParameter>& parameters,
               const ParameterLayout& layout, Device device);

  // Copies gradient i in stream order. Call after enqueuing the computation of the gradient, and before the
  // reducer may change the gradient. `gradient` is on the stream's device.
  void take(const Stream& stream, int i, const float* gradient);
  // Returns the gradients, laid out as `layout`. Requires that the stream has passed every take().
  std::vector<float> values() const;
  // Writes the file; requires that the stream has passed every take(). The file is complete or absent.
  // Reports a failure without ending the run.
  void write() const;

 private:
  void write_file(const std::string& path) const;
  const TrainConfig& config_;
  const std::vector<VitParameter>& parameters_;
  const ParameterLayout& layout_;
  Buffer copies_;  // pinned; (layout.elements)
};

}  // namespace gradwire
