// Scalar references of the wire formats: one element or block at a time, as in format.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/math/random.h"
#include "kernels/math/small_float.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/floats.h"

namespace gradwire::reference {
namespace {

// Returns the sum of `own` and value(k), the value of input k, in the order of `a`.
template <typename Args, typename Value>
float sum_of(const Args& a, float own, const Value& value) {
  float s = 0.0f;
  for (int term = 0; term <= a.num_inputs; ++term) {
    const int input = term < a.own_position ? term : term - 1;
    const float x = term == a.own_position ? own : value(input);
    const float scale = term == a.own_position ? a.own_scale : a.input_scale(input);
    s = term == 0 ? scale * x : std::fma(scale, x, s);
  }
  return s;
}

// Returns S of element i; value(k) is the decoded value of input k.
template <typename Value>
float sum_at(const ReduceEncode& a, int64_t i, const Value& value) {
  const float own = a.residual != nullptr ? std::fma(a.residual_scale, a.residual[i], a.own[i]) : a.own[i];
  return sum_of(a, own, value);
}

// Sets residual and result of element i, which has the sum s and is sent as `sent`. `rest` is the difference
// s - sent.
void keep_rest(const ReduceEncode& a, int64_t i, float s, float sent, float rest) {
  if (a.wire == nullptr) sent = s;
  if (a.residual != nullptr) a.residual[i] = a.wire != nullptr ? rest : 0.0f;
  if (a.out != nullptr) a.out[i] = a.out_scale * sent;
}

void put_decoded(const Decode& a, int64_t i, float value) {
  a.out[i] = a.scale * value;
  if (a.residual != nullptr && !is_finite(value)) a.residual[i] = 0.0f;
}

uint32_t random_of(const WireRounding& rounding, int64_t i) {
  return random16(rounding.seed, step_of(rounding), static_cast<uint64_t>(rounding.first_element + i));
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
  template <typename Test>
  int count(int n, const Test& test) const {
    int all = 0;
    for (int i = 0; i < n; ++i) all += test(i) ? 1 : 0;
    return all;
  }
  template <typename Test, typename Take>
  void pick(int n, const Test& test, const Take& take) const {
    for (int i = 0, k = 0; i < n; ++i) {
      if (test(i)) take(k++, i);
    }
  }
  void hadamard(float* x, int n) const {
    for (int h = n / 2; h > 0; h /= 2) {
      for (int i = 0; i < n; ++i) {
        if (i & h) continue;
        const float a = x[i], b = x[i + h];
        x[i] = a + b;
        x[i + h] = a - b;
      }
    }
  }
};

template <typename F>
std::vector<float> decoded_block(const BlockCoder<F>& coder, const void* wire, int64_t count, int64_t block,
                                 int valid) {
  std::vector<float> values(static_cast<size_t>(coder.block()));
  coder.decode(ScalarLanes{}, coder.place(static_cast<const uint8_t*>(wire), count, block), valid,
               values.data());
  return values;
}

}  // namespace

template <typename F>
void reduce_encode(const BlockCoder<F>& coder, const ReduceEncode& a) {
  const int n = coder.block();
  for (int64_t block = 0; block < coder.blocks(a.count); ++block) {
    const int64_t begin = block * n;
    const int count = static_cast<int>(std::min<int64_t>(n, a.count - begin));
    std::vector<std::vector<float>> inputs;
    for (int k = 0; k < a.num_inputs; ++k) {
      inputs.push_back(decoded_block(coder, a.inputs[k], a.count, block, count));
    }
    std::vector<float> s(static_cast<size_t>(n)), sent(s), scratch(s);
    for (int i = 0; i < count; ++i) {
      s[static_cast<size_t>(i)] =
          sum_at(a, begin + i, [&](int k) { return inputs[k][static_cast<size_t>(i)]; });
    }
    if (a.wire != nullptr) {
      std::vector<uint16_t> random;
      for (int i = 0; i < n; ++i) random.push_back(static_cast<uint16_t>(random_of(a.rounding, begin + i)));
      coder.encode(ScalarLanes{}, s.data(), count,
                   a.rounding.mode == Rounding::nearest ? nullptr : random.data(),
                   coder.place(static_cast<uint8_t*>(a.wire), a.count, block), scratch.data());
      sent = decoded_block(coder, a.wire, a.count, block, count);
    }
    for (int i = 0; i < count; ++i) {
      const float sum = s[static_cast<size_t>(i)], part = sent[static_cast<size_t>(i)],
                  unit = residual_unit(a);
      keep_rest(a, begin + i, sum, part,
                coder.far() ? rest_of<true>(sum, part, unit) : rest_of<false>(sum, part, unit));
    }
  }
}

template <typename F>
void decode(const BlockCoder<F>& coder, const Decode& a) {
  const int n = coder.block();
  for (int64_t block = 0; block < coder.blocks(a.count); ++block) {
    const int count = static_cast<int>(std::min<int64_t>(n, a.count - block * n));
    const auto values = decoded_block(coder, a.wire, a.count, block, count);
    for (int i = 0; i < count; ++i) put_decoded(a, block * n + i, values[static_cast<size_t>(i)]);
  }
}

void fp32_reduce(const Reduce& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    a.out[i] = a.scale * sum_of(a, a.own[i], [&](int k) { return a.inputs[k][i]; });
  }
}

void bf16_reduce_encode(const ReduceEncode& a) {
  auto* wire = static_cast<uint16_t*>(a.wire);
  for (int64_t i = 0; i < a.count; ++i) {
    const float s =
        sum_at(a, i, [&](int k) { return bf16_to_float(static_cast<const uint16_t*>(a.inputs[k])[i]); });
    if (wire != nullptr) {
      wire[i] = a.rounding.mode == Rounding::nearest ? float_to_bf16_nearest(s)
                                                     : float_to_bf16_stochastic(s, random_of(a.rounding, i));
    }
    const float sent = wire != nullptr ? bf16_to_float(wire[i]) : 0.0f;
    keep_rest(a, i, s, sent, rest_of<false>(s, sent, residual_unit(a)));
  }
}

void bf16_decode(const Decode& a) {
  const auto* wire = static_cast<const uint16_t*>(a.wire);
  for (int64_t i = 0; i < a.count; ++i) put_decoded(a, i, bf16_to_float(wire[i]));
}

#define GW_DEFINE(F, NAME)                                                \
  template void reduce_encode(const BlockCoder<F>&, const ReduceEncode&); \
  template void decode(const BlockCoder<F>&, const Decode&);
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::reference
