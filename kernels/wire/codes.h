// Functions that the block formats share: codes of a few bits, and unaligned floats.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/math/small_float.h"

namespace gradwire {

// Returns the size in bytes of n codes of kBits (1, 2, 3, 4, 5, 6 or 8).
template <int kBits>
GW_HD constexpr int code_bytes(int n) {
  return n * kBits / 8;
}

// The lower bits of a code whose bits are in two arrays. Equal to `bits` where one array holds whole codes.
GW_HD constexpr int lower_code_bits(int bits) {
  return bits % 3 == 0 ? 2 * bits / 3 : bits == 5 ? 4 : bits;
}

// Packs code(i), i in [0, n). Byte j of m holds codes j, j + m, j + 2m, ... starting at the low bits, so that
// neighbours are read and written together. 3, 5 and 6 bits: the lower 2 or 4 bits of all codes, then the
// upper bits. Lanes may override this.
template <int kBits, typename Lanes, typename Code>
GW_HD void pack_codes(const Lanes& lanes, int n, uint8_t* bytes, const Code& code) {
  if constexpr (requires { lanes.template pack<kBits>(n, bytes, code); }) {
    lanes.template pack<kBits>(n, bytes, code);
  } else if constexpr (lower_code_bits(kBits) < kBits) {
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
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

// Calls take(i, code) for i in [0, count) of n packed codes.
template <int kBits, typename Lanes, typename Take>
GW_HD void unpack_codes(const Lanes& lanes, const uint8_t* bytes, int n, int count, const Take& take) {
  if constexpr (requires { lanes.template unpack<kBits>(bytes, n, count, take); }) {
    lanes.template unpack<kBits>(bytes, n, count, take);
  } else if constexpr (lower_code_bits(kBits) < kBits) {
    constexpr int kLower = lower_code_bits(kBits), kUpper = kBits - kLower;
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

// Returns random[i], or a negative number if `random` is null.
template <typename Random, typename Index>
GW_HD int32_t draw_of(const Random& random, Index i) {
  return random != nullptr ? static_cast<int32_t>(random[i]) : -1;
}
// Calls body(draw), with draw(i) = draw_of(random, i). Tests `random` for null only once.
template <typename Random, typename Body>
GW_HD void with_draws(const Random& random, const Body& body) {
  if (random != nullptr) {
    body([=](auto i) GW_HD_LAMBDA { return static_cast<int32_t>(random[i]); });
  } else {
    body([](auto) GW_HD_LAMBDA { return int32_t{-1}; });
  }
}

// Returns the largest magnitude of a block's values, as bits; at least 0x7f800000 if a value is not finite.
template <typename Lanes, typename Values>
GW_HD uint32_t largest_bits(const Lanes& lanes, Values values, int count) {
  if constexpr (requires { lanes.largest(values); }) {
    return lanes.largest(values);
  } else {
    return lanes.max(count, [=](auto i) GW_HD_LAMBDA { return float_bits(values[i]) & 0x7fffffffu; });
  }
}

// Sink that ignores decoded values.
struct NoSink {
  template <bool kFinite, typename Index>
  GW_HD void put(Index, float) const {}
};

// Computes a block's largest finite magnitude, as bits, and whether all values are finite, so that loops need
// not test each value.
struct Largest {
  uint32_t bits;
  bool finite;
  template <typename Lanes, typename Values>
  GW_HD Largest(const Lanes& lanes, Values values, int count)
      : bits(largest_bits(lanes, values, count)), finite(bits < 0x7f800000u) {
    if (!finite)
      bits = lanes.max(count, [=](auto i) GW_HD_LAMBDA { return finite_magnitude_bits(values[i]); });
  }
};

// Clamps the magnitude of x to `most`; NaN is unchanged. Compares integers, whose minimum is one instruction.
GW_HD float within(float x, float most) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu, limit = float_bits(most);
  const uint32_t less = magnitude < limit ? magnitude : limit;
  return bits_float((magnitude > 0x7f800000u ? magnitude : less) | (bits & 0x80000000u));
}

// Encodes n values, at least `count`, as E4M3. Returns the byte of their power-of-two scale, the least scale
// that does not clamp any value.
template <typename Lanes, typename Values, typename Random, typename Sink>
GW_HD uint8_t encode_e4m3(const Lanes& lanes, Values values, int count, int n, Random random, uint8_t* codes,
                          const Sink& sink) {
  const Largest largest(lanes, values, count);
  const uint8_t scale = fp8_scale_byte(largest.bits);
  const float inverse = fp8_inverse_scale(scale), unit = fp8_scale(scale);
  if constexpr (requires { Lanes::kRows; }) {  // converts four values at a time
    float x[Lanes::kHeld];
    uint32_t fours[Lanes::kRows] = {};
    lanes.each(n, [&](auto i) GW_HD_LAMBDA { x[i.k] = values[i] * inverse; });
    if (!largest.finite || largest.bits > kFp8MostBits) {  // rare
      lanes.each(n, [&](auto i) GW_HD_LAMBDA {
        const bool finite = is_finite(x[i.k]);
        fours[i.k / 4] |= finite ? 0u : 0x7fu << (8 * (i.k % 4));
        x[i.k] = finite ? within(x[i.k], E4M3::most()) : bits_float(float_bits(x[i.k]) & 0x80000000u);
      });
    }
    if (random != nullptr)
      lanes.each(n, [&](auto i) GW_HD_LAMBDA { x[i.k] = e4m3_stochastic(x[i.k], random[i]); });
    for (int row = 0; row < Lanes::kRows; ++row) {
      fours[row] |= floats_to_e4m3x4(x + 4 * row);
      e4m3x4_to_floats(fours[row], x + 4 * row);
    }
    lanes.each(n, [&](auto i) GW_HD_LAMBDA { sink.template put<false>(i, unit * x[i.k]); });
    lanes.template pack_fours<8>(fours, codes);
  } else {
    const auto pack = [=](auto finite, const auto& draw) GW_HD_LAMBDA {
      constexpr bool kFinite = finite;
      pack_codes<8>(lanes, n, codes, [=](auto i) GW_HD_LAMBDA {
        const uint32_t code = float_to_e4m3<kFinite>(values[i] * inverse, draw(i));
        sink.template put<kFinite>(i, unit * e4m3_to_float<kFinite>(code));
        return code;
      });
    };
    if (largest.finite)
      with_draws(random, [=](const auto& draw) GW_HD_LAMBDA { pack(std::true_type(), draw); });
    else
      pack(std::false_type(), [=](auto i) GW_HD_LAMBDA { return draw_of(random, i); });
  }
  return scale;
}
// Decodes n codes of encode_e4m3(), whose scale is `scale`; only the first `count` are needed.
template <typename Lanes, typename Values>
GW_HD void decode_e4m3(const Lanes& lanes, const uint8_t* codes, uint8_t scale, int n, int count,
                       Values values) {
  const float unit = fp8_scale(scale);
  unpack_codes<8>(lanes, codes, n, count,
                  [=](auto i, uint32_t code) GW_HD_LAMBDA { values[i] = unit * e4m3_to_float(code); });
}
// Returns whether products of `unit` with a small float and a scale of at most 448, both of few bits, are
// exact.
GW_HD bool has_exact_products(float unit) {
  return unit >= 0x1p-140f && unit < 0x1p90f;
}
// Adds what decode_e4m3() decodes, times `by`, to sums in registers.
template <typename Lanes>
GW_HD void add_e4m3(const Lanes& lanes, const uint8_t* codes, uint8_t scale, float by, float* sums) {
  const float unit = fp8_scale(scale);
  const bool exact = has_exact_products(by * unit);
  const auto four = [=](const auto& words, float* x) GW_HD_LAMBDA {
    for (int row = 0; row < Lanes::kRows; ++row) e4m3x4_to_floats(words[row], x + 4 * row);
    for (int k = 0; !exact && k < Lanes::kHeld; ++k) x[k] *= unit;
  };
  lanes.template add_fours<8>(codes, exact ? by * unit : by, sums, four);
}

// Stores a float at any address, little-endian. All lanes may store the same float.
GW_HD void put_float(uint8_t* to, float x) {
  const uint32_t bits = float_bits(x);
  for (int k = 0; k < 4; ++k) to[k] = static_cast<uint8_t>(bits >> (8 * k));
}
GW_HD float get_float(const uint8_t* from) {
  uint32_t bits = 0;
  for (int k = 0; k < 4; ++k) bits |= static_cast<uint32_t>(from[k]) << (8 * k);
  return bits_float(bits);
}

template <typename Lanes>
GW_HD float get_float(const Lanes& lanes, const uint8_t* from) {
  if constexpr (requires { lanes.word_at(from); }) {
    return bits_float(lanes.word_at(from));
  } else {
    return get_float(from);
  }
}

// Returns the exponent + 127 of a power of two near a magnitude. Squares relative to this power neither
// overflow nor vanish, and the power has an inverse.
GW_HD uint8_t near_exponent(uint32_t magnitude_bits) {
  const uint32_t exponent = magnitude_bits >> 23;
  return static_cast<uint8_t>(exponent > 253u ? 253u : exponent < 1u ? 1u : exponent);
}

// Rounds `magnitude`, at least 0 and under 2^22, to an integer: to nearest with ties to even if `random` is
// negative, otherwise up with probability (discarded fraction).
GW_HD uint32_t round_magnitude(float magnitude, int32_t random) {
  // Floats from 2^23 have units of 1, so adding 2^23 rounds to nearest.
  return random < 0 ? float_bits(magnitude + 8388608.0f) - 0x4b000000u
                    : static_cast<uint32_t>(
                          static_cast<int32_t>(magnitude + static_cast<float>(random) * (1.0f / 65536.0f)));
}

}  // namespace gradwire
