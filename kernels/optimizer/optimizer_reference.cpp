// Scalar optimizer steps in double, rounded once when stored.
#include <cmath>

#include "kernels/optimizer/optimizer.h"

namespace gradwire::reference {

void sgd_step(const SgdStep& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    double g = a.grads[i] + static_cast<double>(a.weight_decay) * a.params[i];
    double v = g;
    if (a.velocity != nullptr) {
      v += static_cast<double>(a.momentum) * a.velocity[i];
      a.velocity[i] = static_cast<float>(v);
    }
    a.params[i] = static_cast<float>(a.params[i] - a.scalars->lr * v);
    if (a.rounded != nullptr) a.rounded[i] = narrow<Bf16>(a.params[i]);
  }
}

void adamw_step(const AdamWStep& a) {
  const double lr = a.scalars->lr, correction1 = a.scalars->correction1, correction2 = a.scalars->correction2;
  const double b1 = a.beta1, b2 = a.beta2;
  for (int64_t i = 0; i < a.count; ++i) {
    double g = a.grads[i];
    double w = a.params[i] * (1.0 - lr * a.weight_decay);
    double m = b1 * a.m[i] + (1.0 - b1) * g;
    double v = b2 * a.v[i] + (1.0 - b2) * g * g;
    a.m[i] = static_cast<float>(m);
    a.v[i] = static_cast<float>(v);
    a.params[i] =
        static_cast<float>(w - lr / correction1 * m / (std::sqrt(v) / std::sqrt(correction2) + a.eps));
    if (a.rounded != nullptr) a.rounded[i] = narrow<Bf16>(a.params[i]);
  }
}

}  // namespace gradwire::reference
