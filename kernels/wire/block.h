// A block format: a block of N values becomes B bytes, in arithmetic written once for host and device. Loops
// over blocks, sums, residuals, rotation, threads and launches are generic (block_host.h, block.cu,
// reference.cpp). To add a format, write one struct like the one in qsgd.h and list it in block_formats.h:
//
//   struct X {
//     int size = 128;  // the options are members of type int; may have none
//     static constexpr int kMaxBlock = 512;
//     static constexpr const char *kSummary = "...", *kSource = "...";  // as in WireFormat
//     static constexpr Rounding kRounding = Rounding::nearest;          // unless the spec says otherwise
//     static constexpr bool kStochastic = true;
//     static constexpr Rotation kRotation = Rotation::optional;
//     static constexpr bool kMasks = false;                             // see "Non-finite values"
//     static constexpr bool kSelects = true;                            // optional; as in WireFormat
//     static constexpr bool kFar = true;  // optional: a value minus the decoded value may overflow a float
//     static constexpr std::array<const char*, 1> kExamples = {"size=64"};  // as in WireFormat
//
//     GW_HD int block() const;             // values: a multiple of 32, or 16, that divides kMaxBlock
//     GW_HD int bytes() const;             // per block; the same for the last block of an array
//     GW_HD bool clips() const;            // optional; as in WireFormat
//     GW_HD int scale_bytes() const;       // 1 or 4: length of the scale that ends a maskable block
//     double gaussian_error(bool rotated) const;    // as in WireFormat
//     double error_bound(bool stochastic) const;    // as in WireFormat
//     std::vector<FormatOption> options(); // pointing to members; {} when it has none
//     template <typename Lanes, typename Values, typename Random>
//     GW_HD void encode(const Lanes& lanes, Values values, int count, Random random,
//                       uint8_t* bytes) const;  // optionally also float* scratch, with room for block()
//     template <typename Lanes, typename Values>
//     GW_HD void decode(const Lanes& lanes, const uint8_t* bytes, int count, Values values) const;
//   };
//
// Values is const float*, or on the GPU values in registers (block_registers.cuh), which are indexed only by
// the index that `lanes` passes to a function. So these functions take `auto i`. Random is const uint16_t*,
// or random bits in registers.
//
// encode writes all bytes() of a block from values[block()]. Only the last block of an array has a count
// below block(); its other values are 0, unless rotated: then all values count. `random` holds 16 uniform
// bits per value; null means round to nearest. decode assigns each of values[0..count) once. A decode that
// also reads values, or assigns values in another order, takes `float* values`, which has room for kMaxBlock;
// on the host this costs an extra pass.
//
// Non-finite values: where kMasks is false, encode receives non-finite values, and decode returns NaN only in
// their positions. Where kMasks is true, or the block is rotated, encode and decode see only finite blocks. A
// block with a non-finite value is sent as a mask instead: bit i % 8 of byte i / 8 is set where value i is
// not finite, the other bytes are 0, and the scale, which ends the block, is NaN (FP32) or 255 (one byte). A
// mask decodes to NaN at the marked positions and to 0 elsewhere, so that error feedback keeps the finite
// values of the block.
//
// `lanes` are the workers of a block: one on the host, a warp or a thread block on the GPU. Every lane calls
// encode, and gets the same results from
//   lanes.each(n, f)        calls f(i) once for each i in [0, n), in any order; all lanes see the writes of f
//   lanes.max(n, f)         the largest f(i), unsigned; 0 when n is 0
//   lanes.sum(n, f)         the sum of floats f(i), in a fixed order: 32 sums of every 32nd, then halves
//   lanes.count(n, f)       the number of i for which f(i) is true
//   lanes.pick(n, f, take)  calls take(k, i) for the k-th i, ascending, for which f(i) is true
// where f is [&](auto i) GW_HD_LAMBDA { ... }. max and sum may include the zeros after a block's last value,
// for which f must return 0. Every lane computes the code outside of f. codes.h builds on these functions;
// the host's lanes and those of registers override some functions of codes.h.
//
// Example: qsgd.h, here with blocks of 8 values, encodes 0.5 -1.5 1 -2 0.25 -0.75 3 -1 into 5 bytes:
//
//   encode    mean = lanes.sum(8, |values[i]| / 8) = 1.25, stored by put_float(bytes + 1, mean)
//             pack_codes<1>(lanes, 8, bytes, sign bit of values[i]): byte 0 = 0b10101010, value 0 lowest
//   decode    mean = get_float(bytes + 1); unpack_codes<1>(lanes, bytes, 8, 8, take), where take(i, code)
//   sets
//             values[i] = code ? -mean : mean: 1.25 -1.25 1.25 -1.25 1.25 -1.25 1.25 -1.25
//   residual  values - decoded = -0.75 -0.25 -0.25 -0.75 -1 0.5 1.75 0.25, computed by the generic loops
//
// int.h also draws random bits and takes a sink: with_draws(random, body) calls body(draw), where draw(i) is
// the bits of value i, or negative to round to nearest. For each value, encode calls sink.put(i, x) with the
// decoded value x, so that the host stores residuals without decoding. Sinks are optional (NoSink).
// Also optional: add(lanes, bytes, scale, sums) adds a block, times a power of two, to sums in registers,
// with the bits of decode, where adds(lanes, bytes, scale) is true or missing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/math/small_float.h"
#include "kernels/wire/codes.h"
#include "kernels/wire/format.h"

namespace gradwire {

inline constexpr int kSumLanes = 32;

// The use of a randomized Hadamard transform before encoding. The transform makes the values nearly normal.
enum class Rotation : uint8_t { never, optional, always };

// The random signs of the transform, as sign bits; the same for every block.
struct RotationSigns {
  uint32_t of[512] = {};
  constexpr RotationSigns() {
    for (int i = 0; i < 512; ++i) of[i] = at(i);
  }
  GW_HD static constexpr uint32_t at(int i) {
    uint32_t x = (static_cast<uint32_t>(i) + 1u) * 0x9e3779b1u;
    x ^= x >> 15;
    return (x * 0x85ebca6bu) & 0x80000000u;
  }
};
inline constexpr RotationSigns kRotationSigns;
GW_HD uint32_t rotation_sign(int i) {
#ifdef __CUDA_ARCH__
  return RotationSigns::at(i);  // cheaper than memory on a GPU
#else
  return kRotationSigns.of[i];
#endif
}

// Computes in `to` the randomized Hadamard transform of n values. Lanes may override this and
// rotate_block_back().
//
// The transform scales by 1/n and the inverse by 1, instead of 1/sqrt(n) in each: scaling by a power of two
// is exact.
template <typename Lanes, typename Values, typename To>
GW_HD void rotate_block(const Lanes& lanes, Values values, int n, To to) {
  const float scale = 1.0f / static_cast<float>(n);
  if constexpr (requires { lanes.rotate(values, n, scale, to); }) {
    lanes.rotate(values, n, scale, to);
  } else {
    lanes.each(
        n, [=](int i) GW_HD_LAMBDA { to[i] = bits_float(float_bits(values[i] * scale) ^ rotation_sign(i)); });
    lanes.hadamard(to, n);
  }
}
// Scales that keep finite values finite: a sum of 512 values, each scaled by 2^-10, does not overflow;
// scaling back saturates.
inline constexpr float kRotationDown = 0x1p-10f, kRotationUp = 0x1p10f,
                       kRotationMost = 0x1.fffffep127f * kRotationDown;
// Transforms n values back; only the first `count` are needed.
template <typename Lanes, typename Values>
GW_HD void rotate_block_back(const Lanes& lanes, Values values, int n, int count) {
  if constexpr (requires { lanes.rotate_back(values, n); }) {
    lanes.rotate_back(values, n);
  } else {
    lanes.each(n, [=](int i) GW_HD_LAMBDA { values[i] *= kRotationDown; });
    lanes.hadamard(values, n);
    lanes.each(count, [=](int i) GW_HD_LAMBDA {
      values[i] = bits_float(float_bits(within(values[i], kRotationMost) * kRotationUp) ^ rotation_sign(i));
    });
  }
}

// Returns the residual of a sum s if the encoding decodes to `sent`. kFar: the difference may overflow a
// float, for example after a rotation.
template <bool kFar>
GW_HD float rest_of(float s, float sent, float unit = 1.0f) {
  float rest = s - sent;
  if constexpr (kFar) rest = within(rest, 0x1.fffffep127f);
  return to_residual(rest, unit);
}

// A format and whether it rotates; the interface for loops over blocks. kNeverOptional: a rotation that is
// optional is off.
template <typename F, bool kNeverOptional = false>
struct BlockCoder {
  static constexpr int kMaxBlock = F::kMaxBlock;
  F format;
  bool rotate = F::kRotation == Rotation::always;

  GW_HD int block() const { return format.block(); }
  GW_HD int bytes() const { return format.bytes(); }
  GW_HD bool rotates() const {
    return F::kRotation == Rotation::always ||
           (F::kRotation == Rotation::optional && !kNeverOptional && rotate);
  }
  // Returns whether a block with a non-finite value is sent as a mask.
  static constexpr bool kMayMask = F::kMasks || F::kRotation != Rotation::never;
  GW_HD bool masks() const { return F::kMasks || rotates(); }
  // Returns whether a value minus the decoded value may overflow a float, as after a rotation.
  GW_HD bool far() const {
    if constexpr (requires { F::kFar; }) {
      return F::kFar;
    } else {
      return masks();
    }
  }
  GW_HD int64_t blocks(int64_t count) const { return (count + block() - 1) / block(); }
  // Returns the address of block number `block` in the encoding of `count` values.
  template <typename Byte>
  GW_HD auto place(Byte* wire, int64_t count, int64_t block) const {
    if constexpr (requires { F::place(wire, count, block); }) {
      return F::place(wire, count, block);
    } else {
      return wire + block * bytes();
    }
  }

  // Encodes a block. `s` holds block() values, 0 after `count`, and is unchanged. `scratch` has room for
  // block() values.
  template <typename Lanes, typename Values, typename Random, typename To, typename Scratch>
  GW_HD void encode(const Lanes& lanes, Values s, int count, Random random, const To& to,
                    Scratch scratch) const {
    const int n = block();
    Values values = s;
    if constexpr (kMayMask) {
      if (masks()) {
        if (largest_bits(lanes, s, count) >= 0x7f800000u) return put_mask(lanes, s, to);
      }
      if (rotates()) {
        rotate_block(lanes, s, n, scratch);
        values = scratch;
      }
    }
    // The code has a single call of encode, because every call is inlined.
    const int coded = rotates() ? n : count;
    if constexpr (F::kStochastic) {
      encode_values(lanes, values, coded, random, to, scratch);
    } else {
      encode_values(lanes, values, coded, static_cast<const uint16_t*>(nullptr), to, scratch);
    }
  }

  // Encodes values that are neither rotated nor masked.
  template <typename Lanes, typename Values, typename Random, typename To, typename Scratch,
            typename Sink = NoSink>
  GW_HD void encode_values(const Lanes& lanes, Values values, int count, Random random, const To& to,
                           Scratch scratch, const Sink& sink = {}) const {
    if constexpr (requires { lanes.encode_block(format, values, to); }) {
      lanes.encode_block(format, values, to);
    } else if constexpr (requires { format.encode(lanes, values, count, random, to, scratch, sink); }) {
      format.encode(lanes, values, count, random, to, scratch, sink);
    } else if constexpr (requires { format.encode(lanes, values, count, random, to, sink); }) {
      format.encode(lanes, values, count, random, to, sink);
    } else {
      format.encode(lanes, values, count, random, to);
    }
  }

  // Decodes a block; `values` has room for block() values.
  template <typename Lanes, typename From, typename Values>
  GW_HD void decode(const Lanes& lanes, const From& from, int count, Values values) const {
    const int n = block();
    if constexpr (kMayMask) {
      if (masks() && is_mask(lanes, from)) {
        return each_rarely(lanes, count, [=](auto i) GW_HD_LAMBDA {
          values[i] = ((from[i / 8] >> (i % 8)) & 1) != 0 ? bits_float(0x7fc00000u) : 0.0f;
        });
      }
    }
    if constexpr (requires { lanes.decode_block(format, from, values); }) {
      lanes.decode_block(format, from, values);
    } else {
      format.decode(lanes, from, rotates() ? n : count, values);
    }
    if constexpr (F::kRotation == Rotation::always ||
                  (F::kRotation == Rotation::optional && !kNeverOptional)) {
      if (rotates()) rotate_block_back(lanes, values, n, count);
    }
  }

 private:
  // Does the same as lanes.each(), for masks, without unrolling: unrolling costs registers in every encode
  // and decode.
  template <typename Lanes, typename Body>
  GW_HD static void each_rarely(const Lanes& lanes, int n, const Body& body) {
    if constexpr (requires { lanes.each_rarely(n, body); }) {
      lanes.each_rarely(n, body);
    } else {
      lanes.each(n, body);
    }
  }
  // Writes a mask; `s` is 0 after the block's last value. Lanes may override the bytes before the scale.
  template <typename Lanes, typename Values>
  GW_HD void put_mask(const Lanes& lanes, Values s, uint8_t* to) const {
    if constexpr (requires { lanes.put_mask(s, 0, to); }) {
      lanes.put_mask(s, bytes(), to);
    } else {
      const int n = block();
      each_rarely(lanes, bytes(), [=](int j) GW_HD_LAMBDA {
        uint32_t byte = 0;
        GW_NO_UNROLL
        for (int i = 8 * j + 7; i >= 8 * j; --i) byte = 2 * byte + (i < n && !is_finite(s[i]) ? 1u : 0u);
        to[j] = static_cast<uint8_t>(byte);
      });
    }
    uint8_t* const scale = to + bytes() - format.scale_bytes();
    if (format.scale_bytes() == 1) {
      *scale = 0xff;
    } else {
      put_float(scale, bits_float(0x7fc00000u));
    }
  }
  template <typename Lanes>
  GW_HD bool is_mask(const Lanes& lanes, const uint8_t* from) const {
    const uint8_t* const scale = from + bytes() - format.scale_bytes();
    return format.scale_bytes() == 1 ? *scale == 0xff : !is_finite(get_float(lanes, scale));
  }
};

// The ops of each block format.
namespace reference {
template <typename F>
void reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a);
template <typename F>
void decode(const BlockCoder<F>& coder, const Decode& a);
}  // namespace reference
namespace host {
template <typename F>
void reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a);
template <typename F>
void decode(const BlockCoder<F>& coder, const Decode& a);
}  // namespace host
namespace cuda {
template <typename F>
void reduce_encode(CudaStream stream, const BlockCoder<F>& coder, const ReduceEncode& a);
template <typename F>
void decode(CudaStream stream, const BlockCoder<F>& coder, const Decode& a);
}  // namespace cuda

}  // namespace gradwire
