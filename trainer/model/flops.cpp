#include "trainer/model/flops.h"

namespace gradwire {

double training_flops_per_image(const VitConfig& config) {
  const double t = config.tokens(), c = config.width, f = config.mlp;
  const double pixels = double{1} * config.channels * config.patch * config.patch;
  const double projections = t * c * 3 * c + t * c * c;
  const double attention = 2 * t * t * c;  // scores and weighted sums of v, over all heads
  const double mlp = 2 * t * c * f;
  const double layers = config.depth * (projections + attention + mlp);
  const double patches = (t - 1) * c * pixels, head = c * config.classes;
  return 2 * (3 * layers + 2 * patches + 3 * head);
}

}  // namespace gradwire
