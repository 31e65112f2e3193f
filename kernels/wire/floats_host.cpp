// The FP32 wire format on the host: eight elements at a time, in one pass, on all cores.
#include <bit>
#include <utility>

#include "kernels/math/small_float.h"
#include "kernels/simd/vector.h"
#include "kernels/wire/block_host.h"
#include "kernels/wire/floats.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;

GW_SIMD void reduce_piece(const Reduce& a, int64_t begin, int64_t end) {
  const auto reduce = [&](int64_t i, int64_t count) GW_HD_LAMBDA {
    F32x8 s = -F32x8{};  // -0: the additive identity, also for -0
    for (int k = 0; k < a.own_position; ++k) s += a.input_scale(k) * load_some<F32x8>(a.inputs[k] + i, count);
    s += a.own_scale * load_some<F32x8>(a.own + i, count);
    for (int k = a.own_position; k < a.num_inputs; ++k)
      s += a.input_scale(k) * load_some<F32x8>(a.inputs[k] + i, count);
    store_some(a.out + i, a.scale * s, count);
  };
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) reduce(i, kWidth);
  if (i < end) reduce(i, end - i);
}

constexpr int kRun = 128;  // elements per batch of random bits
// Distance of software prefetching: the hardware prefetcher falls behind when two streams are read and two
// are written.
constexpr int64_t kPrefetchFloats = 512;

GW_INLINE F32x8 decode(const void* wire, int64_t i) {
  return widen_bf16<F32x8>(load<U16x8>(static_cast<const uint16_t*>(wire) + i));
}

// Writes `wire`, `residual` and `out` for eight sums. `add` is added to the lower half before truncation.
GW_INLINE void finish(const F32x8& s, const U32x8& add, uint16_t* wire, float* residual, float unit,
                      float* out, float scale, bool stream_wire) {
  U32x8 x = words_of(s), top = (x + add) >> 16;
  top = (top & 0x7f80u) == 0x7f80u ? top - 1 : top;  // saturates finite values
  U32x8 kept = (x >> 16) | ((x & 0x007fffffu) != 0 ? U32x8{} + 0x0040u : U32x8{});
  const U32x8 bits = (x & 0x7f800000u) == 0x7f800000u ? kept : top;
  const F32x8 sent = std::bit_cast<F32x8>(bits << 16);
  stream_wire ? stream_store(wire, __builtin_convertvector(bits, U16x8))
              : store(wire, __builtin_convertvector(bits, U16x8));
  if (residual != nullptr) {
    const F32x8 rest = unit * (s - sent);
    store(residual, blend(finite_lanes(rest), rest, F32x8{}));
  }
  if (out != nullptr) store(out, scale * sent);
}

// Encodes the elements of `a`, a multiple of eight, as in format.h, with s = sum(i). `sum` is inlined into
// the caller's instruction set.
template <typename Sum>
GW_INLINE void encode_sums(const ReduceEncode& a, const Sum& sum, float* residual, bool stream_wire) {
  auto at = [](float* p, int64_t i) { return p != nullptr ? p + i : nullptr; };
  auto* wire = static_cast<uint16_t*>(a.wire);
  float* const out = a.out;
  const float scale = a.out_scale, unit = residual_unit(a);
  const int64_t count = a.count;
  if (wire == nullptr) {
    for (int64_t i = 0; i < count; i += kWidth) {
      store(out + i, scale * sum(i));
      if (residual != nullptr) store(residual + i, F32x8{});
    }
    return;
  }
  if (a.rounding.mode == Rounding::nearest) {
    for (int64_t i = 0; i < count; i += kWidth) {
      F32x8 s = sum(i);
      const U32x8 half_way = ((words_of(s) >> 16) & 1u) + 0x7fffu;
      finish(s, half_way, wire + i, at(residual, i), unit, at(out, i), scale, stream_wire);
    }
    return;
  }
  const uint64_t seed = a.rounding.seed, step = step_of(a.rounding);
  const auto first = static_cast<uint64_t>(a.rounding.first_element);
  uint16_t buffer[random_buffer(kRun)];
  for (int64_t run = 0; run < count; run += kRun) {
    const uint16_t* random = random_bits(seed, step, first + static_cast<uint64_t>(run), kRun, buffer);
    for (int64_t i = run; i < std::min(count, run + kRun); i += kWidth) {
      U32x8 add = __builtin_convertvector(load<U16x8>(random + (i - run)), U32x8);
      finish(sum(i), add, wire + i, at(residual, i), unit, at(out, i), scale, stream_wire);
    }
  }
}

// Encodes this rank's part without inputs or scales.
GW_SIMD void encode_piece(const ReduceEncode& a, bool stream_wire) {
  const float *own = a.own, *residual = a.residual;
  if (residual != nullptr) {
    auto sum = [=](int64_t i) __attribute__((always_inline)) {
      __builtin_prefetch(own + i + kPrefetchFloats);
      __builtin_prefetch(residual + i + kPrefetchFloats, 1);
      return load<F32x8>(own + i) + load<F32x8>(residual + i);
    };
    encode_sums(a, sum, a.residual, stream_wire);
  } else {
    auto sum = [=](int64_t i) __attribute__((always_inline)) {
      return load<F32x8>(own + i);
    };
    encode_sums(a, sum, nullptr, stream_wire);
  }
  if (stream_wire) stream_fence();
}

GW_SIMD void reduce_encode_piece(const ReduceEncode& a) {
  auto sum = [&](int64_t i) __attribute__((always_inline)) {
    F32x8 own = load<F32x8>(a.own + i);
    if (a.residual != nullptr) own += a.residual_scale * load<F32x8>(a.residual + i);
    F32x8 s = -F32x8{};  // -0: the additive identity, also for -0
    for (int k = 0; k < a.own_position; ++k) s += a.input_scale(k) * decode(a.inputs[k], i);
    s += a.own_scale * own;
    for (int k = a.own_position; k < a.num_inputs; ++k) s += a.input_scale(k) * decode(a.inputs[k], i);
    return s;
  };
  encode_sums(a, sum, a.residual, false);
}

// Encodes a piece; a.count is a multiple of eight.
void piece(const ReduceEncode& a, bool stream_wire) {
  if (a.num_inputs == 0 && a.own_scale * a.residual_scale == 1.0f) {
    encode_piece(a, stream_wire);
  } else {
    reduce_encode_piece(a);
  }
}

// Decodes a piece, past the caches if `stream`: then `out` is 16-byte aligned.
GW_SIMD void decode_piece(const uint16_t* wire, float* out, float scale, int64_t count, bool stream) {
  int64_t done = 0;
  if (stream) {
    for (; done + kWidth <= count; done += kWidth) stream_store(out + done, scale * decode(wire, done));
    stream_fence();
  }
#pragma omp simd
  for (int64_t i = done; i < count; ++i) out[i] = scale * bf16_to_float(wire[i]);
}

// Does the same as forget_not_finite() of block_host.h, but tests the encoding, because it stays in a cache
// and the result may not.
GW_SIMD void forget_not_finite_in(const uint16_t* wire, float* kept, int64_t count) {
  uint32_t any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t i = 0; i < count; ++i) any |= (wire[i] & 0x7f80u) == 0x7f80u ? 1u : 0u;
  if (any == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    if ((wire[i] & 0x7f80u) == 0x7f80u) kept[i] = 0.0f;
  }
}

// Returns the call for elements [begin, end) of `a`.
ReduceEncode part_of(ReduceEncode a, int64_t begin, int64_t end) {
  for (int k = 0; k < a.num_inputs; ++k) a.inputs[k] = static_cast<const uint16_t*>(a.inputs[k]) + begin;
  advance(a.own, begin);
  advance(a.residual, begin);
  if (a.wire != nullptr) a.wire = static_cast<uint16_t*>(a.wire) + begin;
  advance(a.out, begin);
  a.rounding.first_element += begin;
  a.count = end - begin;
  return a;
}

// Encodes fewer than eight elements, in padded copies.
void short_piece(const ReduceEncode& a) {
  const auto count = static_cast<size_t>(a.count);
  float own[kWidth] = {}, residual[kWidth] = {}, out[kWidth];
  uint16_t wire[kWidth], inputs[kMaxInputs][kWidth];
  ReduceEncode padded = a;
  padded.count = kWidth;
  memcpy(own, a.own, count * sizeof *own);
  padded.own = own;
  if (a.residual != nullptr)
    memcpy(residual, a.residual, count * sizeof *residual), padded.residual = residual;
  for (int k = 0; k < a.num_inputs; ++k) {
    memset(inputs[k], 0, sizeof inputs[k]);
    memcpy(inputs[k], a.inputs[k], count * sizeof *inputs[k]);
    padded.inputs[k] = inputs[k];
  }
  if (a.wire != nullptr) padded.wire = wire;
  if (a.out != nullptr) padded.out = out;
  piece(padded, false);
  if (a.residual != nullptr) memcpy(a.residual, residual, count * sizeof *residual);
  if (a.wire != nullptr) memcpy(a.wire, wire, count * sizeof *wire);
  if (a.out != nullptr) memcpy(a.out, out, count * sizeof *out);
}

}  // namespace

void fp32_reduce(const Reduce& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) { reduce_piece(a, begin, end); });
}

// The BF16 wire format on the host: eight elements at a time, in one pass, on all cores.
//
// Bytes per element: as in the header. The lines of a small result are prefetched before they are written. A
// large result, and the encoding of a large gradient, are written past the caches. Limit: memory; with
// stochastic rounding, the random generator. Alignment: any. Deterministic: each element depends on its
// inputs only. The bits equal the scalar reference's bits.

void bf16_reduce_encode(const ReduceEncode& a) {
  const bool stream_wire = a.wire != nullptr && streams(a.wire, a.count * int64_t{sizeof(uint16_t)});
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t whole = begin + (end - begin) / kWidth * kWidth;
    piece(part_of(a, begin, whole), stream_wire);
    if (whole < end) short_piece(part_of(a, whole, end));
  });
}

void bf16_decode(const Decode& a) {
  const auto* wire = static_cast<const uint16_t*>(a.wire);
  const bool stream = streams(a.out, a.count * int64_t{sizeof(float)});
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    if (a.residual != nullptr) forget_not_finite_in(wire + begin, a.residual + begin, end - begin);
    decode_piece(wire + begin, a.out + begin, a.scale, end - begin, stream);
  });
}

}  // namespace gradwire::host
