// Scalar reference of the formulas in gelu.h, with every sum in double.
#include <cmath>

#include "kernels/vit/gelu.h"
#include "kernels/vit/reference.h"

namespace gradwire::reference {

namespace {

constexpr double kPi = 3.14159265358979323846;

// Returns the argument of the tanh form: Phi is (1 + tanh(u)) / 2, computed without cancellation.
double tanh_argument(double x) {
  return std::sqrt(2.0 / kPi) * (x + 0.044715 * x * x * x);
}
double phi_cdf(double x, Gelu form) {
  if (form == Gelu::tanh) return 1.0 / (1.0 + std::exp(-2.0 * tanh_argument(x)));
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double phi_density(double x, Gelu form) {
  if (form == Gelu::tanh) {
    const double slope = std::sqrt(2.0 / kPi) * (1.0 + 3.0 * 0.044715 * x * x);
    return 2.0 * slope * phi_cdf(x, form) * phi_cdf(-x, form);
  }
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * kPi);
}

}  // namespace

template <typename S>
void bias_gelu(const BiasGelu<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    if (a.bias != nullptr) a.x[i] = narrow<S>(widen(a.x[i]) + a.bias[i % a.width]);
    const float pre = widen(a.x[i]);
    a.y[i] = rounded<S>(pre * phi_cdf(pre, a.form));
  }
}

template <typename S>
void bias_gelu_backward(const BiasGeluBackward<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) {
      const int64_t at = r * a.width + c;
      const double pre = widen(a.pre[at]);
      const double dx = widen(a.dy[at]) * (phi_cdf(pre, a.form) + pre * phi_density(pre, a.form));
      sum += dx;
      a.d_pre[at] = rounded<S>(dx);
    }
    if (a.d_bias != nullptr) store_sum(&a.d_bias[c], sum, a.accumulate);
  }
}

GW_INSTANTIATE_OP(bias_gelu, BiasGelu)
GW_INSTANTIATE_OP(bias_gelu_backward, BiasGeluBackward)

}  // namespace gradwire::reference
