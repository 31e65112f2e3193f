#include <cmath>

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

}  // namespace gradwire::reference
