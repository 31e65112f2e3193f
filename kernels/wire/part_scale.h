// How an average stays within FP32's range where the sum would not: whoever adds up parts multiplies each by a power
// of two, at most 1 / ranks, as it does so, and the sum at its end by what is missing. Parts themselves travel as they
// are; sums of parts travel in these smaller units.
//
// A power of two changes no rounding, here or in the formats, so that results and residuals have the bits of a sum that
// is divided afterwards; except where a scaled value is below the smallest normal float, 1.2e-38. (There a product and
// its addition may be rounded once, as on a GPU, or twice.)
#pragma once

#include "kernels/math/bf16.h"

namespace gradwire {

// The most contributions that one op adds up.
inline constexpr int kMaxInputs = 64;

// Of an op's inputs; all 1 at first.
struct InputScales {
  float of[kMaxInputs];
  constexpr InputScales() : of() {
    for (float& scale : of) scale = 1.0f;
  }
};

// The parts' power of two where the result is `scale` times their sum: the largest that is neither above `scale`
// nor 1.
inline float part_scale_for(float scale) {
  float part = 1.0f;
  while (0 < scale && scale < part && part > 0x1p-100f) part *= 0.5f;
  return part;
}

// 1 / scale of a power of two from 2^-126 to 1.
GW_HD float inverse_part_scale(float scale) {
  return bits_float(0x7f000000u - float_bits(scale));
}

// What an encode lost of a sum, as a residual in the units of a part: not kept if it is more than a float holds, or if
// the sum was not finite. `unit` is the inverse of the part's scale in the sum.
GW_HD float to_residual(float rest, float unit) {
  rest *= unit;
  return is_finite(rest) ? rest : 0.0f;
}

}  // namespace gradwire
