// Floats of a few bits as integer codes: conversions in both directions take a few instructions, vectorize,
// and give the same bits on host and device.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"

namespace gradwire {

// A format with kMantissa bits of mantissa, exponent bias kBias and magnitudes up to code kMostCode; larger
// values saturate. Codes exclude the sign. The format has no infinity; the caller handles NaN.
template <int kMantissa, int kBias, uint32_t kMostCode>
struct SmallFloat {
  static constexpr int kDropped = 23 - kMantissa;  // bits of a float's mantissa
  static constexpr uint32_t kLeast = static_cast<uint32_t>(128 - kBias)
                                     << 23;          // the least normal number, as a float
  static constexpr uint32_t kOne = 1u << kMantissa;  // the code of the least normal number

  GW_HD static float most() { return bits_float((kMostCode << kDropped) + kLeast - (1u << 23)); }

  // Rounds |x| to nearest, ties to even.
  GW_HD static uint32_t nearest(float x) {
    const float magnitude = clamped(x);
    const uint32_t exponent = float_bits(magnitude) & 0x7f800000u;
    const uint32_t binade = exponent > kLeast ? exponent : kLeast;
    // A float whose unit in the last place is this binade's quantum: adding it rounds.
    const uint32_t large = binade + (static_cast<uint32_t>(kDropped) << 23);
    const uint32_t quanta = float_bits(magnitude + bits_float(large)) - large;
    return quanta + ((binade - kLeast) >> kDropped);
  }
  // Rounds |x| up with probability (discarded fraction), by 16 random bits.
  GW_HD static uint32_t stochastic(float x, uint32_t random) {
    const float magnitude = clamped(x), least = bits_float(kLeast);
    // Below the least normal number the quanta are as large as just above it, so such values are rounded
    // there.
    const bool low = magnitude < least;
    const uint32_t bits = float_bits(magnitude + (low ? least : 0.0f));
    const uint32_t code = (bits + (random << (kDropped - 16))) >> kDropped;
    return code - ((kLeast >> kDropped) - kOne) - (low ? kOne : 0u);
  }
  GW_HD static float value(uint32_t code) {
    const float low = static_cast<float>(code) * (bits_float(kLeast) / static_cast<float>(kOne));
    return code < kOne ? low : bits_float((code << kDropped) + kLeast - (1u << 23));
  }

 private:
  // Clamps the magnitude on integers, whose minimum and maximum are one instruction each.
  GW_HD static float clamped(float x) {
    const uint32_t magnitude = float_bits(x) & 0x7fffffffu, largest = float_bits(most());
    return bits_float(magnitude < largest ? magnitude : largest);
  }
};

}  // namespace gradwire
