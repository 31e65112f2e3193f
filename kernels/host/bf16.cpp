#include "kernels/bf16.h"

#include "kernels/fp32.h"
#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "kernels/thread_pool.h"

namespace gradwire::host {
namespace {

constexpr int64_t kGrain = 64 * 1024;

}  // namespace

void bf16_encode(const Bf16Encode& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Bf16Encode part = a;
    part.grad += begin;
    if (part.residual != nullptr) part.residual += begin;
    part.wire += begin;
    if (part.out != nullptr) part.out += begin;
    part.count = end - begin;
    part.rounding.first_element += begin;
    reference::bf16_encode(part);
  });
}

void bf16_decode(const Bf16Decode& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a.out[i] = a.scale * bf16_to_float(a.wire[i]);
  });
}

void bf16_decode_add(const Bf16DecodeAdd& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) a.acc[i] += bf16_to_float(a.wire[i]);
  });
}

void bf16_decode_add_encode(const Bf16DecodeAddEncode& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Bf16DecodeAddEncode part = a;
    for (int k = 0; k < part.num_inputs; ++k) part.inputs[k] += begin;
    part.grad += begin;
    if (part.residual != nullptr) part.residual += begin;
    part.wire += begin;
    if (part.out != nullptr) part.out += begin;
    part.count = end - begin;
    part.rounding.first_element += begin;
    reference::bf16_decode_add_encode(part);
  });
}

void fp32_reduce(const Fp32Reduce& a) {
  parallel_for(a.count, kGrain, [&](int64_t begin, int64_t end) {
    Fp32Reduce part = a;
    for (int k = 0; k < part.num_inputs; ++k) part.inputs[k] += begin;
    part.acc += begin;
    part.count = end - begin;
    reference::fp32_reduce(part);
  });
}

}  // namespace gradwire::host
