// Scalar references of the wire formats: one element after the other, or one block, as format.h says it.
#include <algorithm>

#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "kernels/wire/bf16.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/fp32.h"
#include "kernels/wire/fp8.h"

namespace gradwire::reference {
namespace {

// S of element i; value(input, i) is what an input decodes to there.
template <typename Value>
float sum_at(const ReduceEncode& a, int64_t i, const Value& value) {
  const float own = a.residual != nullptr ? a.own[i] + a.residual[i] : a.own[i];
  float s = 0.0f;
  for (int term = 0; term <= a.num_inputs; ++term) {
    const float x =
        term == a.own_position ? own : value(a.inputs[term < a.own_position ? term : term - 1], i);
    s = term == 0 ? x : s + x;
  }
  return s;
}

// Residual and result of element i, whose sum is s and of which the wire carries `sent`.
void keep_rest(const ReduceEncode& a, int64_t i, float s, float sent) {
  if (a.wire == nullptr) sent = s;
  if (a.residual != nullptr) a.residual[i] = a.wire != nullptr && is_finite(s) ? s - sent : 0.0f;
  if (a.out != nullptr) a.out[i] = a.out_scale * sent;
}

uint32_t random_of(const WireRounding& rounding, int64_t i) {
  const uint64_t step = rounding.step != nullptr ? *rounding.step : 0;
  return random16(rounding.seed, step, static_cast<uint64_t>(rounding.first_element + i));
}

float bf16_value(const void* wire, int64_t i) {
  return bf16_to_float(static_cast<const uint16_t*>(wire)[i]);
}

float fp8_value(const void* wire, int64_t count, int64_t i) {
  const auto* bytes = static_cast<const uint8_t*>(wire);
  return e4m3_to_float(bytes[i]) * fp8_scale(bytes[fp8_scales_offset(count) + i / kFp8Block]);
}

struct ScalarLanes {
  template <typename Body>
  void each(int n, const Body& body) const {
    for (int i = 0; i < n; ++i) body(i);
  }
  template <typename Value>
  uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, value(i));
    return largest;
  }
  template <typename Value>
  float sum(int n, const Value& value) const {
    float sums[kSumLanes] = {};
    for (int i = 0; i < n; ++i) sums[i % kSumLanes] += value(i);
    for (int half = kSumLanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
    }
    return sums[0];
  }
};

template <typename F>
void decode_block(const void* wire, int64_t block, int count, float* values) {
  F::decode(ScalarLanes{}, static_cast<const uint8_t*>(wire) + block * F::kBytes, count, values);
}

template <typename F>
void reduce_encode_blocks(const ReduceEncode& a) {
  for (int64_t begin = 0; begin < a.count; begin += F::kBlock) {
    const int64_t block = begin / F::kBlock;
    const int count = static_cast<int>(std::min<int64_t>(F::kBlock, a.count - begin));
    auto value = [&](const void* wire, int64_t i) {
      float values[F::kBlock];
      decode_block<F>(wire, block, count, values);
      return values[i - begin];
    };
    float s[F::kBlock] = {}, sent[F::kBlock] = {};
    uint16_t random[F::kBlock];
    for (int i = 0; i < count; ++i) s[i] = sum_at(a, begin + i, value);
    if (a.wire != nullptr) {
      for (int i = 0; i < F::kBlock; ++i) random[i] = static_cast<uint16_t>(random_of(a.rounding, begin + i));
      F::encode(ScalarLanes{}, s, count, a.rounding.mode == Rounding::nearest ? nullptr : random,
                static_cast<uint8_t*>(a.wire) + block * F::kBytes);
      decode_block<F>(a.wire, block, count, sent);
    }
    for (int i = 0; i < count; ++i) keep_rest(a, begin + i, s[i], sent[i]);
  }
}

template <typename F>
void decode_blocks(const Decode& a) {
  for (int64_t begin = 0; begin < a.count; begin += F::kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(F::kBlock, a.count - begin));
    float values[F::kBlock];
    decode_block<F>(a.wire, begin / F::kBlock, count, values);
    for (int i = 0; i < count; ++i) a.out[begin + i] = a.scale * values[i];
  }
}

}  // namespace

void fp32_reduce(const Reduce& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    float s = 0.0f;
    for (int term = 0; term <= a.num_inputs; ++term) {
      float x = term == a.own_position ? a.own[i] : a.inputs[term < a.own_position ? term : term - 1][i];
      s = term == 0 ? x : s + x;
    }
    a.out[i] = a.scale * s;
  }
}

void bf16_reduce_encode(const ReduceEncode& a) {
  auto* wire = static_cast<uint16_t*>(a.wire);
  for (int64_t i = 0; i < a.count; ++i) {
    const float s = sum_at(a, i, bf16_value);
    if (wire != nullptr) {
      wire[i] = a.rounding.mode == Rounding::nearest ? float_to_bf16_nearest(s)
                                                     : float_to_bf16_stochastic(s, random_of(a.rounding, i));
    }
    keep_rest(a, i, s, wire != nullptr ? bf16_to_float(wire[i]) : 0.0f);
  }
}

void bf16_decode(const Decode& a) {
  for (int64_t i = 0; i < a.count; ++i) a.out[i] = a.scale * bf16_value(a.wire, i);
}

void fp8_reduce_encode(const ReduceEncode& a) {
  auto* wire = static_cast<uint8_t*>(a.wire);
  auto value = [&](const void* input, int64_t i) { return fp8_value(input, a.count, i); };
  for (int64_t begin = 0; begin < a.count; begin += kFp8Block) {
    const int64_t end = std::min<int64_t>(a.count, begin + kFp8Block);
    float sums[kFp8Block];
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      sums[i - begin] = sum_at(a, i, value);
      largest = std::max(largest, finite_magnitude_bits(sums[i - begin]));
    }
    const uint8_t scale = fp8_scale_byte(largest);
    if (wire != nullptr) wire[fp8_scales_offset(a.count) + begin / kFp8Block] = scale;
    for (int64_t i = begin; i < end; ++i) {
      const float s = sums[i - begin], scaled = s * fp8_inverse_scale(scale);
      const uint8_t code = a.rounding.mode == Rounding::nearest
                               ? float_to_e4m3_nearest(scaled)
                               : float_to_e4m3_stochastic(scaled, random_of(a.rounding, i));
      if (wire != nullptr) wire[i] = code;
      keep_rest(a, i, s, e4m3_to_float(code) * fp8_scale(scale));
    }
  }
}

void fp8_decode(const Decode& a) {
  for (int64_t i = 0; i < a.count; ++i) a.out[i] = a.scale * fp8_value(a.wire, a.count, i);
}

#define GW_DEFINE(F, NAME)                           \
  void NAME##_reduce_encode(const ReduceEncode& a) { \
    reduce_encode_blocks<F>(a);                      \
  }                                                  \
  void NAME##_decode(const Decode& a) {              \
    decode_blocks<F>(a);                             \
  }
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::reference
