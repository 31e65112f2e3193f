// The learning-rate schedule: linear warm-up, then half a cosine down to 0.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace gradwire {

// Returns lr * (step + 1) / warmup_steps while step < warmup_steps, so the first rate is not 0 and the last
// warm-up rate is the peak. Then lr * (1 + cos(pi * p)) / 2, where p rises from 0 to 1 at `steps`.
double learning_rate(const TrainConfig& config, int64_t step);

}  // namespace gradwire
