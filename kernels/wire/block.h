// A block format: a block of N values becomes B bytes, in arithmetic that is written once for host and device.
// Loops over blocks, sums, residuals, threads and launches are generic (block_host.h, block.cu,
// reference.cpp); to add a format, write one struct like kernels/wire/int8.h and list it in block_formats.h:
//
//   struct X {
//     static constexpr int kBlock = 128;    // values, 32 to 512
//     static constexpr int kBytes = 129;    // of a block; the last one of an array is as long
//     static constexpr const char *kSummary = "...", *kSource = "...";  // as in WireFormat
//     static constexpr bool kStochastic = true;
//     static constexpr double kGaussianError = 8.4e-5;
//     template <typename Lanes>
//     GW_HD static void encode(const Lanes& lanes, const float* values, int count, const uint16_t* random,
//                              uint8_t* bytes);
//     template <typename Lanes, typename Values>
//     GW_HD static void decode(const Lanes& lanes, const uint8_t* bytes, int count, Values values);
//   };
//
// encode writes all kBytes for values[kBlock], of which only the last block of an array has fewer than kBlock
// that count; the others are 0. `random` holds 16 uniform bits for each value, or is null: round to nearest.
// decode assigns to each of values[0..count) once. One that needs more, such as to read them again, takes
// `float* values`, which has room for kBlock; on the host that costs a pass more.
//
// `lanes` are those who work on the block together, one on the host, a warp on the GPU. Each of them calls
// encode, and gets the same results from
//   lanes.each(n, f)   calls f(i) once for each i in [0, n), in any order, and shows all lanes what f wrote
//   lanes.max(n, f)    the largest f(i), unsigned; 0 when n is 0
//   lanes.sum(n, f)    the sum of floats f(i), always in the same order: 32 sums of every 32nd, then halves
// where f is [&](int i) GW_HD_LAMBDA { ... }. What is computed outside of f, every lane computes.
#pragma once

#include <cstdint>

#include "kernels/math/hd.h"

namespace gradwire {

inline constexpr int kSumLanes = 32;

// Blocks of F one after the other, which is where a block format's lie.
template <typename F>
struct Packed : F {
  static constexpr int64_t bytes(int64_t count) { return (count + F::kBlock - 1) / F::kBlock * F::kBytes; }
  // Of a wire of `count` values.
  template <typename Byte>
  GW_HD static Byte* place(Byte* wire, int64_t /*count*/, int64_t block) {
    return wire + block * F::kBytes;
  }
};

}  // namespace gradwire
