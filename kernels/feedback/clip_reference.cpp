#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/feedback/clip.h"

namespace gradwire::reference {
namespace {

// Adds the upper half of the lanes to the lower one until one is left.
double halve(std::vector<double>& lanes) {
  for (size_t half = lanes.size() / 2; half > 0; half /= 2) {
    for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

double chunk_squares(const float* x, int64_t count) {
  std::vector<double> lanes(kClipLanes), folded(kClipFold);
  for (int64_t i = 0; i < count; ++i) {
    if (std::isfinite(x[i])) lanes[static_cast<size_t>(i) % kClipLanes] += double{x[i]} * x[i];
  }
  for (size_t j = 0; j < folded.size(); ++j) {
    folded[j] = clip_fold(lanes[4 * j], lanes[4 * j + 1], lanes[4 * j + 2], lanes[4 * j + 3]);
  }
  return halve(folded);
}

}  // namespace

void clip_norm(const ClipNorm& a) {
  std::vector<double> lanes(kClipFold);
  for (int64_t c = 0; c < clip_chunks(a.count); ++c) {
    const int64_t begin = c * kClipChunk;
    lanes[static_cast<size_t>(c) % kClipFold] +=
        chunk_squares(a.grad + begin, std::min<int64_t>(kClipChunk, a.count - begin));
  }
  const float factor = clip_factor(halve(lanes), a.max_norm);
  for (int64_t i = 0; i < a.count && factor != 1.0f; ++i) {
    if (std::isfinite(a.grad[i])) a.grad[i] *= factor;
  }
}

}  // namespace gradwire::reference
