// What GCC does not vectorize well in the block formats, eight values at a time: packed codes, small floats
// with a scale for 16 or 32 values, and Lloyd-Max levels. Bytes and values are those of the formats' own
// encode and decode, which the reference and CUDA use.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/eden.h"
#include "kernels/wire/microscaling.h"

namespace gradwire::host {

inline constexpr int kWidth = kLanes<F32x8>;

GW_INLINE U32x8 magnitudes(const F32x8& x) {
  return words_of(x) & 0x7fffffffu;
}
GW_INLINE F32x8 floats_of(const U32x8& words) {
  return std::bit_cast<F32x8>(words);
}
GW_INLINE F32x8 with_sign_of(const F32x8& magnitude, const F32x8& x) {
  return floats_of(words_of(magnitude) | (words_of(x) & 0x80000000u));
}

// Replaces infinity by the largest finite float of its sign.
GW_INLINE F32x8 saturated(const F32x8& x) {
  return floats_of(words_of(x) + std::bit_cast<U32x8>(magnitudes(x) == 0x7f800000u));
}

// The layouts of codes.h. (GCC 12 converts vectors of bytes to vectors of words byte by byte.)

// Returns words whose low bytes are the 8 bytes at `from`. Their other bits are arbitrary.
GW_INLINE U32x8 spread_bytes(const uint8_t* from) {
  using U64x4 = uint64_t __attribute__((vector_size(32)));
  uint64_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const U32x8 words = std::bit_cast<U32x8>(U64x4{bytes});
  return __builtin_shuffle(words, U32x8{0, 0, 0, 0, 1, 1, 1, 1}) >> U32x8{0, 8, 16, 24, 0, 8, 16, 24};
}
// Stores the low bytes of the first kCount of 16 words.
template <int kCount>
GW_INLINE void put_bytes(const U32x8& low, const U32x8& high, uint8_t* to) {
  alignas(32) uint32_t words[16];
  alignas(16) uint8_t bytes[16];
  store(words, low);
  store(words + 8, high);
#pragma omp simd
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(words[i]);
  std::memcpy(to, bytes, kCount);
}

// Packs bits [from, from + kBits) of n codes; ignores the other bits.
template <int kBits>
GW_INLINE void pack_words(const uint32_t* codes, int n, int from, uint8_t* bytes) {
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  const int m = n * kBits / 8;
  const auto at = [=](int j) __attribute__((always_inline)) {
    U32x8 byte = {};
    for (int part = 0; part < 8 / kBits; ++part)
      byte |= ((load<U32x8>(codes + part * m + j) >> from) & kMask) << (part * kBits);
    return byte;
  };
  int j = 0;
  for (; j + 16 <= m; j += 16) put_bytes<16>(at(j), at(j + 8), bytes + j);
  for (; j + 8 <= m; j += 8) put_bytes<8>(at(j), U32x8{}, bytes + j);
  for (; j < m; ++j) {
    uint32_t byte = 0;
    for (int part = 0; part < 8 / kBits; ++part)
      byte |= ((codes[part * m + j] >> from) & kMask) << (part * kBits);
    bytes[j] = static_cast<uint8_t>(byte);
  }
}
// Sets bits [to, to + kBits) of n codes and, unless kAdd, clears the other bits.
template <int kBits, bool kAdd>
GW_INLINE void unpack_words(const uint8_t* bytes, int n, int to, uint32_t* codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1u;
  const int m = n * kBits / 8;
  int j = 0;
  for (; j + 8 <= m; j += 8) {
    const U32x8 word = spread_bytes(bytes + j);
    for (int part = 0; part < 8 / kBits; ++part) {
      uint32_t* const at = codes + part * m + j;
      const U32x8 code = ((word >> (part * kBits)) & kMask) << to;
      store(at, kAdd ? load<U32x8>(at) | code : code);
    }
  }
  for (; j < m; ++j) {
    for (int part = 0; part < 8 / kBits; ++part) {
      const uint32_t code = ((static_cast<uint32_t>(bytes[j]) >> (part * kBits)) & kMask) << to;
      codes[part * m + j] = kAdd ? codes[part * m + j] | code : code;
    }
  }
}
template <int kBits>
GW_INLINE void pack_all(const uint32_t* codes, int n, uint8_t* bytes) {
  constexpr int kLower = lower_code_bits(kBits);
  pack_words<kLower>(codes, n, 0, bytes);
  if constexpr (kLower < kBits) pack_words<kBits - kLower>(codes, n, kLower, bytes + n * kLower / 8);
}
template <int kBits>
GW_INLINE void unpack_all(const uint8_t* bytes, int n, uint32_t* codes) {
  constexpr int kLower = lower_code_bits(kBits);
  unpack_words<kLower, false>(bytes, n, 0, codes);
  if constexpr (kLower < kBits) unpack_words<kBits - kLower, true>(bytes + n * kLower / 8, n, kLower, codes);
}

// SmallFloat (kernels/math/small_float.h) for eight numbers.

template <typename Float>
GW_INLINE F32x8 small_values(const U32x8& codes) {
  const F32x8 low = __builtin_convertvector(std::bit_cast<I32x8>(codes), F32x8) *
                    (bits_float(Float::kMin) / static_cast<float>(Float::kOne));
  return codes < Float::kOne ? low : floats_of((codes << Float::kDropped) + (Float::kMin - (1u << 23)));
}
// Rounds |x|. Sets the codes and returns their values. `random`: 16 bits for each number, or null to round to
// nearest.
template <typename Float>
GW_INLINE F32x8 round_to_small(const F32x8& x, const uint16_t* random, U32x8& codes) {
  const U32x8 most = U32x8{} + float_bits(Float::most()), any = magnitudes(x);
  const U32x8 magnitude = any < most ? any : most;
  if (random == nullptr) {
    const U32x8 binade = larger(magnitude & 0x7f800000u, U32x8{} + Float::kMin);
    const F32x8 large = floats_of(binade + (static_cast<uint32_t>(Float::kDropped) << 23));
    const F32x8 sum = floats_of(magnitude) + large;
    codes = words_of(sum) - words_of(large) + ((binade - Float::kMin) >> Float::kDropped);
    return sum - large;
  }
  const F32x8 least = F32x8{} + bits_float(Float::kMin);
  const I32x8 low = floats_of(magnitude) < least;
  const U32x8 bits = words_of(floats_of(magnitude) + blend(low, least, F32x8{}));
  const U32x8 draws = to_u32(load<U16x8>(random)) << (Float::kDropped - 16);
  codes = ((bits + draws) >> Float::kDropped) - ((Float::kMin >> Float::kDropped) - Float::kOne) -
          (std::bit_cast<U32x8>(low) & Float::kOne);
  return small_values<Float>(codes);
}

// Returns e8m0_for() of eight largest magnitudes, given as bits.
GW_INLINE U32x8 e8m0_scales(const U32x8& bits, int exponent, float fraction) {
  const U32x8 limit = U32x8{} + static_cast<uint32_t>(fraction * 8388608.0f);
  I32x8 byte = std::bit_cast<I32x8>(bits >> 23) - exponent - ((bits & 0x7fffffu) > limit);
  byte = byte > 253 - exponent ? I32x8{} + (253 - exponent) : byte;
  return std::bit_cast<U32x8>(byte < 1 ? I32x8{} + 1 : byte);
}

struct RotatingLane {
  // Does the same as rotate_block and rotate_block_back of block.h, with the steps before and after the
  // butterflies in registers. n is a power of two, at least 16.
  GW_INLINE void rotate(const float* values, int n, float scale, float* to) const {
    hadamard(
        values, n, to, [=](const F32x8& x, int i) GW_HD_LAMBDA { return with_sign(words_of(scale * x), i); },
        AsIs());
  }
  GW_INLINE void rotate_back(float* values, int n) const {
    hadamard(
        values, n, values, [](const F32x8& x, int) GW_HD_LAMBDA { return kRotationDown * x; },
        [](const F32x8& x, int i)
            GW_HD_LAMBDA { return with_sign(words_of(saturated(kRotationUp * x)), i); });
  }

 private:
  struct AsIs {
    GW_INLINE F32x8 operator()(const F32x8& x, int) const { return x; }
  };
  GW_INLINE static F32x8 with_sign(const U32x8& bits, int i) {
    return std::bit_cast<F32x8>(bits ^ load<U32x8>(kRotationSigns.of + i));
  }

  // Computes to = after(H before(from)). Each callback receives the first of its eight indices.
  template <typename Before, typename After>
  GW_INLINE void hadamard(const float* from, int n, float* to, const Before& before,
                          const After& after) const {
    if (n == 512) {
      across<4>(from, n, to, before);
    } else if (n == 256) {
      across<2>(from, n, to, before);
    } else if (n == 128) {
      return in_registers<16>(from, to, 0, before, after);
    } else if (n == 64) {
      return in_registers<8>(from, to, 0, before, after);
    } else {
      return n == 32 ? in_registers<4>(from, to, 0, before, after)
                     : in_registers<2>(from, to, 0, before, after);
    }
    for (int begin = 0; begin < n; begin += 128) in_registers<16>(to, to, begin, AsIs(), after);
  }
  template <int kVectors>
  GW_INLINE static void butterflies(F32x8 (&v)[kVectors]) {
#pragma GCC unroll 5
    for (int h = kVectors / 2; h > 0; h /= 2) {
#pragma GCC unroll 16
      for (int k = 0; k < kVectors; ++k) {
        if ((k & h) != 0) continue;
        const F32x8 a = v[k], b = v[k + h];
        v[k] = a + b;
        v[k + h] = a - b;
      }
    }
  }
  // Applies the levels between kParts parts of the values.
  template <int kParts, typename Before>
  GW_INLINE void across(const float* from, int n, float* to, const Before& before) const {
    for (int i = 0; i < n / kParts; i += kWidth) {
      F32x8 v[kParts];
#pragma GCC unroll 16
      for (int k = 0; k < kParts; ++k) {
        const int at = i + k * (n / kParts);
        v[k] = before(load<F32x8>(from + at), at);
      }
      butterflies(v);
#pragma GCC unroll 16
      for (int k = 0; k < kParts; ++k) store(to + i + k * (n / kParts), v[k]);
    }
  }
  // Applies the butterflies to kVectors vectors. The last three levels are within a vector: each lane adds
  // its partner to plus or minus itself.
  template <int kVectors, typename Before, typename After>
  GW_INLINE void in_registers(const float* from, float* to, int begin, const Before& before,
                              const After& after) const {
    static_assert(kWidth == 8);
    constexpr uint32_t kMinus = 0x80000000u;
    const auto minus = [](const F32x8& y, const U32x8& signs)
                           GW_HD_LAMBDA { return std::bit_cast<F32x8>(words_of(y) ^ signs); };
    F32x8 v[kVectors];
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) {
      const int i = begin + k * kWidth;
      v[k] = before(load<F32x8>(from + i), i);
    }
    butterflies(v);
#pragma GCC unroll 16
    for (int k = 0; k < kVectors; ++k) {
      F32x8 y = v[k];
      y = __builtin_shufflevector(y, y, 4, 5, 6, 7, 0, 1, 2, 3) +
          minus(y, U32x8{0, 0, 0, 0, kMinus, kMinus, kMinus, kMinus});
      y = __builtin_shufflevector(y, y, 2, 3, 0, 1, 6, 7, 4, 5) +
          minus(y, U32x8{0, 0, kMinus, kMinus, 0, 0, kMinus, kMinus});
      y = __builtin_shufflevector(y, y, 1, 0, 3, 2, 5, 4, 7, 6) +
          minus(y, U32x8{0, kMinus, 0, kMinus, 0, kMinus, 0, kMinus});
      const int i = begin + k * kWidth;
      store(to + i, after(y, i));
    }
  }
};

// Encodes and decodes whole runs of kRun values, or of a block if it is longer.
struct RunLane : RotatingLane {
  static constexpr int kRun = 256;

  // Encode a run and return true, or return false if a value is not finite. The sink gets the decoded values.
  template <int kMantissa, typename Sink>
  GW_INLINE bool encode_run(const MxMini<kMantissa>&, const float* values, const uint16_t* random,
                            uint8_t* to, const Sink& sink) const {
    using Format = MxMini<kMantissa>;
    const U32x8 most = largest_of_eight<32>(values);
    if (host::largest_of(most) >= 0x7f800000u) return false;
    const U32x8 bytes = e8m0_scales(most, 2, kMantissa == 1 ? 0.5f : 0.875f);
    alignas(32) uint32_t byte[8];
    alignas(32) float unit[8], inverse[8];
    store(byte, bytes);
    store(unit, floats_of(bytes << 23));
    store(inverse, floats_of((254u - bytes) << 23));
    for (int b = 0; b < 8; ++b, to += Format::bytes()) {
      const float down = inverse[b], up = unit[b];
      encode_minis<kMantissa, 32>(
          values, 32 * b, random, to,
          sink, [=](int, const F32x8& x) __attribute__((always_inline)) { return x * down; },
          [=](int, const F32x8& x) __attribute__((always_inline)) { return up * x; });
      to[Format::kCodes] = static_cast<uint8_t>(byte[b]);
    }
    return true;
  }
  template <typename Sink>
  GW_INLINE bool encode_run(const NvFp4&, const float* values, const uint16_t* random, uint8_t* to,
                            const Sink& sink) const {
    for (int begin = 0; begin < kRun; begin += 128, to += NvFp4::bytes()) {
      const U32x8 most = largest_of_eight<16>(values + begin);
      const uint32_t largest = host::largest_of(most);
      if (largest >= 0x7f800000u) return false;
      const uint8_t byte = e8m0_for(largest, 10, 0.5f);
      const float down = fp8_inverse_scale(byte), unit = fp8_scale(byte);
      U32x8 codes;
      const F32x8 scales = round_to_small<E4M3>(floats_of(most) * down * (1.0f / 6.0f), nullptr, codes);
      alignas(32) float up[8], scale[8];
      store(up, blend(scales > 0.0f, 1.0f / scales, F32x8{}));
      store(scale, scales);
      encode_minis<1, 128>(
          values, begin, random, to,
          sink, [&](int i, const F32x8& x) __attribute__((always_inline)) { return x * down * up[i / 16]; },
          [&](int i, const F32x8& x) __attribute__((always_inline)) { return unit * (scale[i / 16] * x); });
      put_bytes<8>(codes, U32x8{}, to + 64);
      to[72] = byte;
    }
    return true;
  }

  template <typename Sink>
  GW_INLINE bool encode_run(const Eden& format, const float* values, const uint16_t*, uint8_t* to,
                            const Sink& sink) const {
    const int n = format.size;
    for (int begin = 0; begin < std::max(n, kRun); begin += n, to += format.bytes()) {
      if (largest_of(values + begin, n) >= 0x7f800000u) return false;
      alignas(32) float rotated[Eden::kMaxBlock];
      rotate(values + begin, n, 1.0f / static_cast<float>(n), rotated);
      with_bits(
          format, [&](auto bits) __attribute__((always_inline)) {
            alignas(32) uint32_t codes[Eden::kMaxBlock];
            const float scale = encode_levels<bits>(rotated, n, to, codes);
            put_levels<bits>(codes, n, scale, rotated);
          });
      rotate_back(rotated, n);
      for (int i = 0; i < n; i += 8) sink.template put_vector<true>(begin + i, load<F32x8>(rotated + i));
    }
    return true;
  }

  // Encode a block of rotated values, and decode a block.
  GW_INLINE void encode_block(const Eden& format, const float* values, uint8_t* to) const {
    with_bits(
        format, [&](auto bits) __attribute__((always_inline)) {
          alignas(32) uint32_t codes[Eden::kMaxBlock];
          encode_levels<bits>(values, format.size, to, codes);
        });
  }
  GW_INLINE void decode_block(const Eden& format, const uint8_t* from, float* values) const {
    with_bits(
        format, [&](auto bits) __attribute__((always_inline)) {
          alignas(32) uint32_t codes[Eden::kMaxBlock];
          unpack_all<bits>(from, format.size, codes);
          put_levels<bits>(codes, format.size, get_float(from + format.size * bits / 8), values);
        });
  }
  template <int kMantissa>
  GW_INLINE void decode_block(const MxMini<kMantissa>&, const uint8_t* from, float* values) const {
    const float unit = fp8_scale(from[MxMini<kMantissa>::kCodes]);
    decode_minis<kMantissa, 32>(
        from, values, [=](int, const F32x8& x) __attribute__((always_inline)) { return unit * x; });
  }
  GW_INLINE void decode_block(const NvFp4&, const uint8_t* from, float* values) const {
    float scale[8];
    for (int g = 0; g < 8; ++g) scale[g] = e4m3_to_float(from[64 + g]);
    const float unit = fp8_scale(from[72]);
    decode_minis<1, 128>(
        from, values, [&](int i, const F32x8& x) __attribute__((always_inline)) {
          return unit * (scale[i / 16] * x);
        });
  }

 private:
  template <int kMantissa>
  using Magnitude = typename Mini<kMantissa>::Magnitude;

  template <int kBits = 5, typename Body>
  GW_INLINE static void with_bits(const Eden& format, const Body& body) {
    if constexpr (kBits > 1) {
      if (format.bits < kBits) return with_bits<kBits - 1>(format, body);
    }
    body(std::integral_constant<int, kBits>());
  }
  // Returns the Lloyd-Max levels of codes without a sign.
  template <int kBits>
  GW_INLINE static F32x8 levels_of(const U32x8& codes) {
    alignas(32) float table[16] = {};
    with_lloyd_max<kBits>([&](auto... x) __attribute__((always_inline)) {
      const float all[] = {x...};
      for (int k = 0; k < 1 << (kBits - 1); ++k) table[k] = all[2 * k];
    });
    if constexpr (kBits < 5) return __builtin_shuffle(load<F32x8>(table), std::bit_cast<I32x8>(codes));
    return __builtin_shuffle(load<F32x8>(table), load<F32x8>(table + 8), std::bit_cast<I32x8>(codes));
  }
  template <int kBits>
  GW_INLINE static void put_levels(const uint32_t* codes, int n, float scale, float* to) {
    constexpr uint32_t kSign = 1u << (kBits - 1);
    for (int i = 0; i < n; i += 8) {
      const U32x8 code = load<U32x8>(codes + i);
      const F32x8 x = scale * levels_of<kBits>(code & (kSign - 1u));
      store(to + i, floats_of(words_of(x) ^ ((code & kSign) << (32 - kBits))));
    }
  }
  // Does Eden::encode_bits(), and returns the scale and the codes.
  template <int kBits>
  GW_INLINE static float encode_levels(const float* values, int n, uint8_t* to, uint32_t* codes) {
    const uint8_t near = near_exponent(largest_of(values, n));
    const float down = fp8_inverse_scale(near);
    F32x8 squares[4] = {}, dots[4] = {}, norms[4] = {};  // 32 sums, as in OneLane::sum()
    const auto sum = [](const F32x8(&x)[4]) __attribute__((always_inline)) {
      return sum_of((x[0] + x[2]) + (x[1] + x[3]));
    };
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < 4; ++v) {
        const F32x8 x = load<F32x8>(values + i + 8 * v) * down;
        squares[v] += x * x;
      }
    }
    const float deviation = sqrtf(sum(squares) / static_cast<float>(n));
    const float per = deviation > 0.0f ? down / deviation : 0.0f;
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < 4; ++v) {
        const F32x8 x = load<F32x8>(values + i + 8 * v), units = floats_of(magnitudes(x)) * per;
        I32x8 code = {};
        with_lloyd_max<kBits>([&](auto... all) __attribute__((always_inline)) {
          const float bounds[] = {all...};
          for (int k = 1; k < (1 << kBits) - 1; k += 2) code -= units > bounds[k];
        });
        const U32x8 bits = std::bit_cast<U32x8>(code);
        const F32x8 level = levels_of<kBits>(bits);
        dots[v] += floats_of(magnitudes(x * down)) * level;
        norms[v] += level * level;
        store(codes + i + 8 * v, bits | (words_of(x) >> 31) << (kBits - 1));
      }
    }
    const float best = sum(dots) / sum(norms) * fp8_scale(near), most = 0x1p126f;
    const float scale = best > most ? most : best;
    pack_all<kBits>(codes, n, to);
    put_float(to + n * kBits / 8, scale);
    return scale;
  }
  // Returns the largest magnitude of n values, a multiple of 32, as bits.
  GW_INLINE static uint32_t largest_of(const float* values, int n) {
    U32x8 most[4] = {};
    for (int i = 0; i < n; i += 32) {
      for (int v = 0; v < 4; ++v) most[v] = larger(most[v], magnitudes(load<F32x8>(values + i + 8 * v)));
    }
    return host::largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
  }
  // Returns the largest magnitudes of eight groups of kGroup values, as bits.
  template <int kGroup>
  GW_INLINE static U32x8 largest_of_eight(const float* values) {
    U32x8 most[8], four[4], two[2];
    for (int g = 0; g < 8; ++g) {
      most[g] = magnitudes(load<F32x8>(values + kGroup * g));
      for (int i = 8; i < kGroup; i += 8)
        most[g] = larger(most[g], magnitudes(load<F32x8>(values + kGroup * g + i)));
    }
    const auto join = [](const U32x8& a, const U32x8& b) __attribute__((always_inline)) {
      return larger(a, b);
    };
    for (int i = 0; i < 4; ++i) four[i] = join_halves<4>(most[2 * i], most[2 * i + 1], join);
    for (int i = 0; i < 2; ++i) two[i] = join_halves<2>(four[2 * i], four[2 * i + 1], join);
    return join_halves<1>(two[0], two[1], join);
  }
  // Encodes values begin to begin + n. to_units(i, x) scales values i to i + 7, from_units() scales back.
  template <int kMantissa, int n, typename Sink, typename ToUnits, typename FromUnits>
  GW_INLINE void encode_minis(const float* values, int begin, const uint16_t* random, uint8_t* to,
                              const Sink& sink, const ToUnits& to_units, const FromUnits& from_units) const {
    alignas(32) uint32_t words[n];
    const auto encode = [&](auto draws) __attribute__((always_inline)) {
      for (int i = 0; i < n; i += 8) {
        const F32x8 units = to_units(i, load<F32x8>(values + begin + i));
        U32x8 codes;
        const F32x8 sent =
            round_to_small<Magnitude<kMantissa>>(units, draws ? random + begin + i : nullptr, codes);
        store(words + i, codes | (words_of(units) >> 31) * Mini<kMantissa>::kSign);
        if constexpr (!std::is_same_v<Sink, NoSink>)
          sink.template put_vector<false>(begin + i, from_units(i, with_sign_of(sent, units)));
      }
    };
    if (random != nullptr) {
      encode(std::true_type());
    } else {
      encode(std::false_type());
    }
    pack_all<3 + kMantissa>(words, n, to);
  }
  template <int kMantissa, int n, typename FromUnits>
  GW_INLINE void decode_minis(const uint8_t* from, float* values, const FromUnits& from_units) const {
    constexpr uint32_t kSign = Mini<kMantissa>::kSign;
    alignas(32) uint32_t words[n];
    unpack_all<3 + kMantissa>(from, n, words);
    for (int i = 0; i < n; i += 8) {
      const U32x8 codes = load<U32x8>(words + i);
      F32x8 x;
      if constexpr (kMantissa == 1) {
        x = __builtin_shuffle(F32x8{0, 0.5f, 1, 1.5f, 2, 3, 4, 6}, std::bit_cast<I32x8>(codes));
      } else {
        x = small_values<Magnitude<kMantissa>>(codes & (kSign - 1u));
      }
      store(values + i, from_units(i, with_sign_of(x, floats_of(codes << (29 - kMantissa)))));
    }
  }
};

}  // namespace gradwire::host
