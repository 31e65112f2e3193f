#include "trainer/train/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace gradwire {

double learning_rate(const TrainConfig& config, int64_t step) {
  if (step < config.warmup_steps) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup_steps);
  }
  int64_t span = std::max<int64_t>(1, config.steps - config.warmup_steps);
  double progress =
      std::min(1.0, static_cast<double>(step - config.warmup_steps) / static_cast<double>(span));
  return config.lr * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace gradwire
