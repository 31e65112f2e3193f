// What the block formats share: codes of a few bits, and unaligned floats.
#pragma once

#include <cstdint>

#include "kernels/math/bf16.h"

namespace gradwire {

// The bytes of n codes of kBits (1, 2, 3, 4, 6 or 8).
template <int kBits>
GW_HD constexpr int code_bytes(int n) {
  return n * kBits / 8;
}

// Packs code(i), i in [0, n). Byte j of m holds codes j, j + m, j + 2m, ... from its low bits on, so that
// neighbours are read and written together. 3 and 6 bits: the lower two thirds of all codes, then the upper ones.
template <int kBits, typename Lanes, typename Code>
GW_HD void pack_codes(const Lanes& lanes, int n, uint8_t* bytes, const Code& code) {
  if constexpr (kBits % 3 == 0) {
    constexpr int kUpper = kBits / 3, kLower = 2 * kUpper;
    pack_codes<kLower>(lanes, n, bytes, [=](int i) GW_HD_LAMBDA { return code(i) & ((1u << kLower) - 1u); });
    pack_codes<kUpper>(lanes, n, bytes + code_bytes<kLower>(n),
                       [=](int i) GW_HD_LAMBDA { return code(i) >> kLower; });
  } else {
    const int m = code_bytes<kBits>(n);
    lanes.each(m, [=](int j) GW_HD_LAMBDA {
      uint32_t byte = 0;
      for (int part = 0; part < 8 / kBits; ++part) byte |= code(j + part * m) << (part * kBits);
      bytes[j] = static_cast<uint8_t>(byte);
    });
  }
}

// Calls take(i, code) for i in [0, count) of n codes.
template <int kBits, typename Lanes, typename Take>
GW_HD void unpack_codes(const Lanes& lanes, const uint8_t* bytes, int n, int count, const Take& take) {
  if constexpr (kBits % 3 == 0) {
    constexpr int kUpper = kBits / 3, kLower = 2 * kUpper;
    const uint8_t* const upper = bytes + code_bytes<kLower>(n);
    const int m = code_bytes<kUpper>(n);
    unpack_codes<kLower>(lanes, bytes, n, count, [=](int i, uint32_t code) GW_HD_LAMBDA {
      const uint32_t more = static_cast<uint32_t>(upper[i % m]) >> (kUpper * (i / m));
      take(i, code | (more & ((1u << kUpper) - 1u)) << kLower);
    });
  } else {
    const int m = code_bytes<kBits>(n);
    for (int part = 0; part < 8 / kBits && part * m < count; ++part) {
      const int first = part * m, here = count - first < m ? count - first : m;
      lanes.each(here, [=](int j) GW_HD_LAMBDA {
        take(first + j, (static_cast<uint32_t>(bytes[j]) >> (part * kBits)) & ((1u << kBits) - 1u));
      });
    }
  }
}

// A float at any address, little-endian. All lanes may write the same.
GW_HD void put_float(uint8_t* to, float x) {
  const uint32_t bits = float_bits(x);
  for (int k = 0; k < 4; ++k) to[k] = static_cast<uint8_t>(bits >> (8 * k));
}
GW_HD float get_float(const uint8_t* from) {
  uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) bits |= static_cast<uint32_t>(from[k]) << (8 * k);
  return bits_float(bits);
}

// The exponent + 127 of a power of two near a magnitude: relative to it squares neither overflow nor vanish, and it
// has an inverse.
GW_HD uint8_t near_exponent(uint32_t magnitude_bits) {
  const uint32_t exponent = magnitude_bits >> 23;
  return static_cast<uint8_t>(exponent > 253u ? 253u : exponent < 1u ? 1u : exponent);
}

// `magnitude`, at least 0 and under 2^22, as an integer: to nearest with ties to even if random is negative, else
// up with probability (discarded fraction).
GW_HD uint32_t round_magnitude(float magnitude, int32_t random) {
  // A float of 2^23 has units of 1: adding 2^23 rounds to nearest.
  return random < 0 ? float_bits(magnitude + 8388608.0f) - 0x4b000000u
                    : static_cast<uint32_t>(
                          static_cast<int32_t>(magnitude + static_cast<float>(random) * (1.0f / 65536.0f)));
}

// random[i], or a negative number where there is none.
GW_HD int32_t draw_of(const uint16_t* random, int i) {
  return random != nullptr ? static_cast<int32_t>(random[i]) : -1;
}

}  // namespace gradwire
