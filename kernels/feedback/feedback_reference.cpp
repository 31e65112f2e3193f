#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/feedback/feedback.h"

namespace gradwire::reference {

void ef21_difference(const Ef21Difference& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (std::isfinite(a.grad[i])) {
      a.kept[i] = a.grad[i] - a.unit * a.estimate[i];
      a.grad[i] = a.kept[i] - a.residual[i];
    } else {
      a.kept[i] = a.residual[i];
    }
    a.residual[i] = 0.0f;
  }
}

void ef21_update(const Ef21Update& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const float next = a.estimate[i] + a.grad[i];
    const float deviation = a.kept[i] - a.residual[i] - a.unit * a.grad[i];
    a.residual[i] = std::isfinite(next) && std::isfinite(deviation) ? deviation : 0.0f;
    if (std::isfinite(next)) a.estimate[i] = next;
    a.grad[i] = next;
  }
}

void momentum_add(const MomentumAdd& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const float next = a.factor * a.momentum[i] + a.grad[i];
    if (!std::isfinite(a.grad[i])) continue;
    a.grad[i] = next;
    a.momentum[i] = std::isfinite(next) ? next : 0.0f;
  }
}

void momentum_mask(const MomentumMask& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.grad[i] != 0.0f) a.momentum[i] = 0.0f;
  }
}

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
