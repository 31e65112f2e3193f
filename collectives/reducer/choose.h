// Chooses a spec by trying each spec on a model's gradients over the group's own links.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/buckets.h"

namespace gradwire {

struct ChooseOptions {
  double error = 0.1;  // the largest relative L2 error of one encode
  int64_t bucket_bytes = 25 << 20;
  uint64_t seed = 0;  // for stochastic rounding
  // Milliseconds of a step without communication, and of its backward, during which gradients become ready in
  // proportion to their elements. May differ between ranks, and are averaged.
  double compute_ms = 0, backward_ms = 0;
};

struct SpecTrial {
  double error = 0;           // of one encode of the mean gradient (report.h); NaN: not finite
  double communicate_ms = 0;  // an allreduce of all gradients, with the codec's kernels
  double exposed_ms = 0;      // the part of it that backward does not hide
};

// Returns why specs cannot be compared by one encode of the same gradients; "" if they can.
std::string choice_obstacle(const CompressionSpec& spec);

// Candidates within this factor of the shortest step count as a tie: about the error of a prediction.
constexpr double kChoiceTie = 1.05;
// Returns the choice of `auto`: of the candidates whose step takes at most `tie` times the shortest, the one
// with the smallest error. The first is always allowed, the others only within `limit`; an infinite limit
// allows all. Errors that are not numbers come last.
size_t choose_candidate(const std::vector<double>& errors, const std::vector<double>& step_ms, double limit,
                        double tie = kChoiceTie);

// Averages the gradients in FP32, tries each spec on copies of that mean, and chooses a spec by
// choose_candidate(). Returns the index of the choice, and a trial per spec. Throws BadInput, on all ranks,
// if the mean is zero or not finite. Collective: all ranks pass the same arguments, and get the same result.
// `gradients` have the tensors' types, are on the communicator's device, and do not change. Blocks. Needs
// memory for two copies of the gradients on the device, two on the host, and one reducer.
size_t choose_spec(Communicator& comm, const Stream& stream, const Stream& caller,
                   const std::vector<CompressionSpec>& specs, const std::vector<GradientTensor>& tensors,
                   const std::vector<void*>& gradients, const ChooseOptions& options,
                   std::vector<SpecTrial>& trials);

}  // namespace gradwire
