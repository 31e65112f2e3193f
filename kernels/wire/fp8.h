// Block-scaled FP8 on the wire: E4M3 codes, one power-of-two scale per 128 values
// (kernels/math/small_float.h).
//
// The encoding of `count` values is Fp8::wire_bytes(count) long: count codes, padding to a multiple of 16,
// then one scale byte per block of 128 values; the last block may be short. The size is 1.0078 bytes per
// value.
//
// wire + residual == S exactly with round to nearest, and up to FP32 rounding with stochastic rounding.
// Values far below the block's largest value round to zero and stay in the residual. NaN and Inf are both
// sent as NaN; they do not affect the scale.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/wire/block.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/format.h"
#include "kernels/wire/microscaling.h"

namespace gradwire {

GW_HD int64_t fp8_scales_offset(int64_t count) {
  return (count + 15) / 16 * 16;
}

// FP8 as a block format (kernels/wire/block.h) whose codes and scales are apart, on the wire and in a tile of
// blocks in a GPU's shared memory.
struct Fp8 {
  static constexpr int kBlock = kFp8Block, kMaxBlock = kBlock;
  static constexpr const char* kSummary = "E4M3 with a power-of-two scale per 128 values";
  static constexpr const char* kSource = "OCP's 8-bit Floating Point Specification and Microscaling Formats";
  static constexpr Rounding kRounding = Rounding::nearest;
  static constexpr Rotation kRotation = Rotation::never;
  static constexpr bool kMasks = false, kStochastic = true;
  static constexpr std::array<const char*, 0> kExamples = {};

  GW_HD static int block() { return kBlock; }
  GW_HD static int bytes() { return kBlock + 1; }
  static int64_t wire_bytes(int64_t count) {
    return fp8_scales_offset(count) + (count + kFp8Block - 1) / kFp8Block;
  }
  static double gaussian_error(bool) { return 7.1e-4; }
  static double error_bound(bool stochastic) { return small_float_bound(3, stochastic); }
  static std::vector<FormatOption> options() { return {}; }

  template <typename Byte>
  struct Place {
    Byte *codes, *scale;
  };
  template <typename Byte>
  GW_HD static Place<Byte> place(Byte* wire, int64_t count, int64_t block) {
    return {wire + block * kBlock, wire + fp8_scales_offset(count) + block};
  }

  template <typename Lanes, typename Values, typename Random, typename Sink = NoSink>
  GW_HD static void encode(const Lanes& lanes, Values values, int count, Random random,
                           const Place<uint8_t>& to, const Sink& sink = {}) {
    *to.scale = encode_e4m3(lanes, values, count, count, random, to.codes, sink);
  }

  template <typename Lanes, typename Values>
  GW_HD static void decode(const Lanes& lanes, const Place<const uint8_t>& from, int count, Values values) {
    decode_e4m3(lanes, from.codes, *from.scale, count, count, values);
  }
  template <typename Lanes>
  GW_HD static void add(const Lanes& lanes, const Place<const uint8_t>& from, float scale, float* sums) {
    add_e4m3(lanes, from.codes, *from.scale, scale, sums);
  }
};

}  // namespace gradwire
