// Measures what compression loses in one step, on given gradients.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "collectives/reducer/reducer.h"

namespace gradwire {

// Returns, for each spec, the relative L2 error of the mean of two ranks that both have these gradients, in
// the first step: the root mean square of ||mean - g|| / ||g|| over tensors, weighted by their elements.
// Tensors of zeros do not count. `gradients`: in packed_layout(), with zeros in gaps. Both ranks are threads
// that use `device`; nothing is sent to other processes. Works bucket by bucket, so that it needs little
// memory. Ignores schedule= and intra_node=, which the pair may not be able to follow. Returns
// NaN if a value is not finite, and 0 if all are 0. Blocks.
std::vector<double> encode_errors(Device device, const std::vector<GradientTensor>& tensors,
                                  const std::vector<float>& gradients, const std::vector<std::string>& specs);
// Returns the error of one spec, or nothing if the measurement fails: a run can continue without it.
std::optional<double> try_encode_error(Device device, const std::vector<GradientTensor>& tensors,
                                       const std::vector<float>& gradients, const std::string& spec);

}  // namespace gradwire
