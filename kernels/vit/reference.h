// Definitions shared by the scalar references of this folder.
#pragma once

#include "kernels/math/small_float.h"

namespace gradwire::reference {

template <typename S>
S rounded(double x) {
  return narrow<S>(static_cast<float>(x));
}

inline void store_sum(float* out, double sum, bool accumulate) {
  *out = static_cast<float>((accumulate ? static_cast<double>(*out) : 0.0) + sum);
}

}  // namespace gradwire::reference
