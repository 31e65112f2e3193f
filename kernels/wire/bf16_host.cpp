// The BF16 and FP32 wire formats on the host: sixteen elements at a time, in one pass, on all cores.
//
// Bytes per element as in the headers; a small result's lines are read before they are written, a large one's
// (and the wire of a large gradient) are written past the caches. Limit: memory; with stochastic rounding,
// the random generator. Alignment: any. Deterministic: each element is computed from its own inputs, and to
// the bit as in the scalar reference, which also does the last few elements of a piece.
#include "kernels/wire/bf16.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "kernels/simd/simd.h"
#include "kernels/wire/fp32.h"
#include "runtime/thread_pool.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;
constexpr int kLanes = 16;
constexpr int64_t kPrefetchFloats =
    512;  // ahead of two streams read and two written, the hardware falls behind
typedef float Vec __attribute__((vector_size(64)));
typedef uint32_t VecBits __attribute__((vector_size(64)));
typedef uint16_t VecWire __attribute__((vector_size(32)));

template <typename V, typename T>
GW_INLINE V load(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <typename V, typename T>
GW_INLINE void store(T* p, const V& v) {
  memcpy(p, &v, sizeof v);
}
GW_INLINE Vec decode(const uint16_t* wire) {
  return std::bit_cast<Vec>(__builtin_convertvector(load<VecWire>(wire), VecBits) << 16);
}

// Random half-words of elements, in runs of 128: sixteen counters of the generator, whose rounds run side by
// side.
constexpr int64_t kRun = 8 * kLanes;
GW_INLINE void random_run(uint64_t seed, uint64_t stream, uint64_t first_counter, uint16_t* out) {
  uint32_t words[4 * kLanes];
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) {
    Random4 draw = philox(seed, stream, first_counter + static_cast<uint64_t>(lane));
    for (int w = 0; w < 4; ++w) words[4 * lane + w] = draw.v[w];
  }
  for (int64_t i = 0; i < kRun; ++i) out[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
}

struct Rounder {
  Rounding mode;
  uint64_t seed, step, first;
};

Rounder rounder_of(const Bf16Rounding& r) {
  return {r.mode, r.seed, r.step != nullptr ? *r.step : 0, static_cast<uint64_t>(r.first_element)};
}

// The wire of sixteen sums, as words; `add` is what goes to the discarded half before it is cut off.
GW_INLINE VecBits round_bits(const Vec& s, const VecBits& add) {
  VecBits x = std::bit_cast<VecBits>(s), top = (x + add) >> 16;
  top = (top & 0x7f80u) == 0x7f80u ? top - 1 : top;  // a finite value saturates
  VecBits kept = (x >> 16) | ((x & 0x007fffffu) != 0 ? VecBits{} + 0x0040u : VecBits{});
  return (x & 0x7f800000u) == 0x7f800000u ? kept : top;
}

// Writes wire, residual and out of sixteen sums.
GW_INLINE void finish(const Vec& s, const VecBits& add, uint16_t* wire, float* residual, float* out,
                      float scale, bool stream_wire) {
  VecBits bits = round_bits(s, add);
  Vec sent = std::bit_cast<Vec>(bits << 16);
  if (stream_wire) {
    stream_store(wire, __builtin_convertvector(bits, VecWire));
  } else {
    store(wire, __builtin_convertvector(bits, VecWire));
  }
  if (residual != nullptr) {
    store(residual, (std::bit_cast<VecBits>(s) & 0x7f800000u) != 0x7f800000u ? s - sent : Vec{});
  }
  if (out != nullptr) store(out, scale * sent);
}

GW_INLINE VecBits half_way(const Vec& s) {
  return ((std::bit_cast<VecBits>(s) >> 16) & 1u) + 0x7fffu;
}

// Elements [0, count) in sixteens: s = sum(i), then finish(). `sum` is inlined into the caller's instruction
// set.
template <typename Sum>
GW_INLINE void encode_sums(int64_t count, const Rounder& r, const Sum& sum, uint16_t* wire, float* residual,
                           float* out, float scale, bool stream_wire) {
  auto at = [](float* p, int64_t i) { return p != nullptr ? p + i : nullptr; };
  if (r.mode == Rounding::nearest) {
    for (int64_t i = 0; i < count; i += kLanes) {
      Vec s = sum(i);
      finish(s, half_way(s), wire + i, at(residual, i), at(out, i), scale, stream_wire);
    }
    return;
  }
  uint16_t random[2 * kRun];  // of elements from a multiple of eight on
  uint64_t shift = r.first & 7;
  for (int64_t run = 0; run < count; run += kRun) {
    uint64_t counter = (r.first + static_cast<uint64_t>(run)) >> 3;
    random_run(r.seed, r.step, counter, random);
    if (shift != 0) random_run(r.seed, r.step, counter + kLanes, random + kRun);
    for (int64_t i = run; i < std::min(count, run + kRun); i += kLanes) {
      VecBits add = __builtin_convertvector(load<VecWire>(random + shift + (i - run)), VecBits);
      finish(sum(i), add, wire + i, at(residual, i), at(out, i), scale, stream_wire);
    }
  }
}

GW_SIMD void encode_piece(const Bf16Encode& a, const Rounder& r, int64_t count, bool stream_wire) {
  if (a.residual != nullptr) {
    auto sum = [&](int64_t i) __attribute__((always_inline)) {
      __builtin_prefetch(a.grad + i + kPrefetchFloats);
      __builtin_prefetch(a.residual + i + kPrefetchFloats, 1);
      return load<Vec>(a.grad + i) + load<Vec>(a.residual + i);
    };
    encode_sums(count, r, sum, a.wire, a.residual, a.out, a.out_scale, stream_wire);
  } else {
    auto sum = [&](int64_t i) __attribute__((always_inline)) {
      return load<Vec>(a.grad + i);
    };
    encode_sums(count, r, sum, a.wire, nullptr, a.out, a.out_scale, stream_wire);
  }
  if (stream_wire) stream_fence();
}

GW_SIMD void decode_piece(const uint16_t* wire, float* out, float scale, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = scale * bf16_to_float(wire[i]);
}

// `count` is a multiple of the lanes, `out` 16-byte aligned.
GW_SIMD void decode_piece_past_caches(const uint16_t* wire, float* out, float scale, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) stream_store(out + i, scale * decode(wire + i));
  stream_fence();
}

GW_SIMD void decode_add_piece(const uint16_t* wire, float* acc, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) acc[i] += bf16_to_float(wire[i]);
}

GW_SIMD void hop_piece(const Bf16DecodeAddEncode& a, const Rounder& r, int64_t count) {
  auto sum = [&](int64_t i) __attribute__((always_inline)) {
    Vec own = load<Vec>(a.grad + i);
    if (a.residual != nullptr) own += load<Vec>(a.residual + i);
    Vec s = -Vec{};  // -0: adding to it changes nothing, not even a zero's sign
    for (int k = 0; k < a.own_position; ++k) s += decode(a.inputs[k] + i);
    s += own;
    for (int k = a.own_position; k < a.num_inputs; ++k) s += decode(a.inputs[k] + i);
    return s;
  };
  encode_sums(count, r, sum, a.wire, a.residual, a.out, a.out_scale, false);
}

GW_SIMD void reduce_piece(const Fp32Reduce& a, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec s = -Vec{};
    for (int k = 0; k < a.own_position; ++k) s += load<Vec>(a.inputs[k] + i);
    s += load<Vec>(a.acc + i);
    for (int k = a.own_position; k < a.num_inputs; ++k) s += load<Vec>(a.inputs[k] + i);
    store(a.acc + i, a.scale * s);
  }
}

template <typename T>
void advance(T*& p, int64_t n) {
  if (p != nullptr) p += n;
}

// The part of an op's arrays from element `begin` to `end`.
Bf16Encode part_of(Bf16Encode a, int64_t begin, int64_t end) {
  advance(a.grad, begin);
  advance(a.residual, begin);
  advance(a.wire, begin);
  advance(a.out, begin);
  a.rounding.first_element += begin;
  a.count = end - begin;
  return a;
}

Bf16DecodeAddEncode part_of(Bf16DecodeAddEncode a, int64_t begin, int64_t end) {
  for (int k = 0; k < a.num_inputs; ++k) advance(a.inputs[k], begin);
  advance(a.grad, begin);
  advance(a.residual, begin);
  advance(a.wire, begin);
  advance(a.out, begin);
  a.rounding.first_element += begin;
  a.count = end - begin;
  return a;
}

Fp32Reduce part_of(Fp32Reduce a, int64_t begin, int64_t end) {
  for (int k = 0; k < a.num_inputs; ++k) advance(a.inputs[k], begin);
  advance(a.acc, begin);
  a.count = end - begin;
  return a;
}

}  // namespace

void bf16_encode(const Bf16Encode& a) {
  const bool stream_wire = streams(a.wire, a.count * int64_t{sizeof(uint16_t)});
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Bf16Encode part = part_of(a, begin, end);
    int64_t whole = part.count / kLanes * kLanes;
    encode_piece(part, rounder_of(part.rounding), whole, stream_wire);
    reference::bf16_encode(part_of(part, whole, part.count));
  });
}

void bf16_decode(const Bf16Decode& a) {
  const bool stream = streams(a.out, a.count * int64_t{sizeof(float)});
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    if (stream) {
      int64_t whole = (end - begin) / kLanes * kLanes;
      decode_piece_past_caches(a.wire + begin, a.out + begin, a.scale, whole);
      begin += whole;
    }
    decode_piece(a.wire + begin, a.out + begin, a.scale, end - begin);
  });
}

void bf16_decode_add(const Bf16DecodeAdd& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    decode_add_piece(a.wire + begin, a.acc + begin, end - begin);
  });
}

void bf16_decode_add_encode(const Bf16DecodeAddEncode& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Bf16DecodeAddEncode part = part_of(a, begin, end);
    int64_t whole = part.count / kLanes * kLanes;
    hop_piece(part, rounder_of(part.rounding), whole);
    reference::bf16_decode_add_encode(part_of(part, whole, part.count));
  });
}

void fp32_reduce(const Fp32Reduce& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Fp32Reduce part = part_of(a, begin, end);
    int64_t whole = part.count / kLanes * kLanes;
    reduce_piece(part, whole);
    reference::fp32_reduce(part_of(part, whole, part.count));
  });
}

}  // namespace gradwire::host
