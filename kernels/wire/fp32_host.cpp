// The FP32 wire format on the host: eight elements at a time, in one pass, on all cores.
#include "kernels/wire/fp32.h"

#include <utility>

#include "kernels/wire/host.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;

// Reduces a piece; `count` is a multiple of the vector's width.
GW_SIMD void reduce_piece(const Reduce& a, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) {
    F32x8 s = -F32x8{};  // -0: the additive identity, also for -0
    for (int k = 0; k < a.own_position; ++k) s += a.input_scale(k) * load<F32x8>(a.inputs[k] + i);
    s += a.own_scale * load<F32x8>(a.own + i);
    for (int k = a.own_position; k < a.num_inputs; ++k) s += a.input_scale(k) * load<F32x8>(a.inputs[k] + i);
    store(a.out + i, a.scale * s);
  }
}

// Returns the call for elements [begin, end) of `a`.
Reduce part_of(Reduce a, int64_t begin, int64_t end) {
  for (int k = 0; k < a.num_inputs; ++k) advance(a.inputs[k], begin);
  advance(a.own, begin);
  advance(a.out, begin);
  a.count = end - begin;
  return a;
}

// Reduces fewer elements than a vector holds, in padded copies.
void reduce_short(Reduce a) {
  const auto bytes = static_cast<size_t>(a.count) * sizeof(float);
  float padded[kMaxInputs + 1][kWidth] = {};
  auto copied = [&](const float* from, float* to) {
    memcpy(to, from, bytes);
    return to;
  };
  for (int k = 0; k < a.num_inputs; ++k) a.inputs[k] = copied(a.inputs[k], padded[k]);
  a.own = copied(a.own, padded[kMaxInputs]);
  float result[kWidth];
  float* out = std::exchange(a.out, result);
  reduce_piece(a, kWidth);
  memcpy(out, result, bytes);
}

}  // namespace

void fp32_reduce(const Reduce& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t whole = begin + (end - begin) / kWidth * kWidth;
    reduce_piece(part_of(a, begin, whole), whole - begin);
    if (whole < end) reduce_short(part_of(a, whole, end));
  });
}

}  // namespace gradwire::host
