// The learning rate of a step: linear warm-up, then half a cosine down to 0.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace gradwire {

// lr * (step + 1) / warmup_steps while step < warmup_steps, so that no update is wasted on a rate of 0 and
// the peak is reached; then lr * (1 + cos(pi * p)) / 2, where p runs from 0 towards 1 at `steps`.
double learning_rate(const TrainConfig& config, int64_t step);

}  // namespace gradwire
