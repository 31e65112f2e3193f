// Keeps an average within FP32's range where the sum would overflow. The rank that sums parts multiplies each
// part by a power of two, at most 1 / ranks. At the end it multiplies the sum by the remaining factor. Parts
// are sent unscaled; sums of parts are sent scaled.
//
// A power of two does not change any rounding, neither in sums nor in formats. Results and residuals
// therefore have the bits of a sum that is divided afterwards. Exception: scaled values below the smallest
// normal float, 1.2e-38. (For such values, a product and its addition may be rounded once, as on a GPU, or
// twice.)
#pragma once

#include "kernels/math/small_float.h"

namespace gradwire {

// The largest number of inputs of one op.
inline constexpr int kMaxInputs = 64;

// The scales of an op's inputs, initially 1.
struct InputScales {
  float of[kMaxInputs];
  constexpr InputScales() : of() {
    for (float& scale : of) scale = 1.0f;
  }
};

// Returns the power of two by which each part is multiplied if the result is `scale` times the sum of the
// parts: the largest power that is at most `scale` and at most 1.
inline float part_scale_for(float scale) {
  float part = 1.0f;
  while (0 < scale && scale < part && part > 0x1p-100f) part *= 0.5f;
  return part;
}

// Returns 1 / scale for a power of two from 2^-126 to 1.
GW_HD float inverse_part_scale(float scale) {
  return bits_float(0x7f000000u - float_bits(scale));
}

// Returns the encoding error of a sum as a residual in the units of a part; 0 if the residual overflows a
// float or the sum is not finite. `unit` is the inverse of the part's scale in the sum.
GW_HD float to_residual(float rest, float unit) {
  rest *= unit;
  return is_finite(rest) ? rest : 0.0f;
}

}  // namespace gradwire
