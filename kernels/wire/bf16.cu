// BF16 wire format on CUDA: two element-wise kernels, eight elements per thread and step.
//
// Bytes per element: as in kernels/wire/format.h, with w = 2. Limit: memory bandwidth. Alignment: any;
// 16-byte accesses to floats when the arrays share a head (kernels/cuda/vector.cuh). Deterministic: one
// thread computes each element, from that element's inputs only.
#include "kernels/wire/bf16.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/math/bf16.h"
#include "kernels/math/random.h"
#include "kernels/wire/fused.cuh"
#include "kernels/wire/reduce_encode.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 8;

// Stores round(s[k]) in wire[k] for the vector at element i of the call.
template <Coding kCoding, int W>
__device__ __forceinline__ void round_all(const WireRounding& rounding, uint64_t step, int64_t i,
                                          const float (&s)[W], uint16_t (&wire)[W]) {
  if constexpr (kCoding == Coding::nearest) {
#pragma unroll
    for (int k = 0; k < W; ++k) wire[k] = float_to_bf16_nearest(s[k]);
  } else {
    const auto first = static_cast<uint64_t>(rounding.first_element + i);
    const RoundingBits random(rounding.seed, step, first);
#pragma unroll
    for (int k = 0; k < W; ++k) wire[k] = float_to_bf16_stochastic(s[k], random(first + element_of<W>(k)));
  }
}

// Reads the vectors of a call, directly or ahead (read_ahead.cuh).
struct Reads {
  static constexpr int kSlots = kBf16ReadsAhead + 1, kPieces = 2;
  static constexpr bool kResidual = true;
  __device__ __forceinline__ static void begin_floats(const Pieces& to, const float* from, int64_t vector) {
    const int64_t i = vector_begin<kWidth>(vector);
    begin_copy<16>(to.at(0), from + i);
    begin_copy<16>(to.at(1), from + i + kApart);
  }
  __device__ __forceinline__ static void begin_wire(const Pieces& to, const void* from, int64_t,
                                                    int64_t vector) {
    const uint16_t* const wire = static_cast<const uint16_t*>(from) + vector_begin<kWidth>(vector);
    begin_copy<8>(to.at(0), wire);
    begin_copy<8>(to.at(0) + 8, wire + kApart);
  }

  // Reads the vector at element i from global memory.
  struct Direct {
    int64_t i;
    template <int W>
    __device__ __forceinline__ void floats(const float* from, float (&x)[W]) {
      load_vector<W>(from + i, x);
    }
    template <int W>
    __device__ __forceinline__ void wire(const void* from, float (&x)[W]) {
      uint16_t bits[W];
      load_vector<W>(static_cast<const uint16_t*>(from) + i, bits);
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = bf16_to_float(bits[k]);
    }
  };

  // Reads the vectors from the queue's copies in shared memory.
  template <typename Queue>
  struct Queued {
    Queue& queue;
    template <int W>
    __device__ __forceinline__ void floats(const float*, float (&x)[W]) {
      const Pieces item = queue.next();
      const float4 low = *reinterpret_cast<const float4*>(item.at(0)),
                   high = *reinterpret_cast<const float4*>(item.at(1));
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    template <int W>
    __device__ __forceinline__ void wire(const void*, float (&x)[W]) {
      const uint4 bits = *reinterpret_cast<const uint4*>(queue.next().at(0));
      const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = bf16_to_float(static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2))));
    }
  };
};

// Encodes a vector of the call. kSum: S has inputs, or the scale of S is not 1.
template <Coding kCoding, bool kSum, typename Args = ReduceEncode>
struct ReduceEncodeBody {
  const Args& a;
  uint64_t step;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    at<W>(i, Reads::Direct{i});
  }
  // Reads `own`, `residual` and `inputs` in the order of PartReads.
  template <int W, typename From>
  __device__ __forceinline__ void at(int64_t i, From from) const {
    float s[W];
    from.template floats<W>(a.own, s);
    if (a.residual != nullptr) {
      float kept[W];
      from.template floats<W>(a.residual, kept);
      add<W>(kSum ? a.residual_scale : 1.0f, kept, s);
    }
    if (kSum) sum_all<W>(from, s);
    finish<W>(i, s);
  }

 private:
  // Replaces s, this rank's part, with the sum of all parts.
  template <int W, typename From>
  __device__ __forceinline__ void sum_all(From& from, float (&s)[W]) const {
    float own[W];
#pragma unroll
    for (int k = 0; k < W; ++k) {
      own[k] = s[k];
      s[k] = -0.0f;  // the additive identity, also for -0
    }
    // Loads the next input while adding this one. Unrolling further spills the sums.
    float next[W];
    if (a.num_inputs > 0) from.template wire<W>(a.input(0), next);
#pragma unroll 1
    for (int input = 0; input < a.num_inputs; ++input) {
      float x[W];
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] = next[k];
      if (input + 1 < a.num_inputs) from.template wire<W>(a.input(input + 1), next);
      if (input == a.own_position) add<W>(a.own_scale, own, s);
      add<W>(a.input_scale(input), x, s);
    }
    if (a.own_position == a.num_inputs) add<W>(a.own_scale, own, s);
  }

  // Writes `wire`, `residual` and `out`.
  template <int W>
  __device__ __forceinline__ void finish(int64_t i, const float (&s)[W]) const {
    float sent[W], left[W];
    if constexpr (kCoding == Coding::none) {
#pragma unroll
      for (int k = 0; k < W; ++k) sent[k] = s[k], left[k] = 0.0f;
    } else {
      uint16_t wire[W];
      round_all<kCoding, W>(a.rounding, step, i, s, wire);
      store_vector<W>(static_cast<uint16_t*>(a.wire) + i, wire);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        sent[k] = bf16_to_float(wire[k]);
        left[k] = to_residual(s[k] - sent[k], kSum ? residual_unit(a) : 1.0f);
      }
    }
    if (a.residual != nullptr) store_vector<W>(a.residual + i, left);
    if (a.out != nullptr) {
#pragma unroll
      for (int k = 0; k < W; ++k) sent[k] *= a.out_scale;
      store_vector<W>(a.out + i, sent);
    }
  }
};

struct DecodeBody {
  const Decode& a;
  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    at<W>(i, Reads::Direct{i});
  }
  template <int W, typename From>
  __device__ __forceinline__ void at(int64_t i, From from) const {
    float out[W];
    from.template wire<W>(a.wire, out);
    forget_not_finite<W>(out, a.residual == nullptr ? nullptr : a.residual + i);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= a.scale;
    store_vector<W>(a.out + i, out);
  }
};

template <Coding kCoding>
struct Bf16Tiles : TilesAhead<Reads> {
  static constexpr bool kExact = false;
  uint64_t step;
  __device__ __forceinline__ Bf16Tiles(const Form& form, const FusedAllreduce& call)
      : TilesAhead(form), step(step_of(call.rounding)) {}
  __device__ __forceinline__ static int64_t tile() { return kThreads * kWidth; }
  __device__ __forceinline__ void reduce_encode(const FusedPart& a) const {
    for_each_in_tiles<kWidth>(wide, a.count, ReduceEncodeBody<kCoding, true, FusedPart>{a, step},
                              PartReads<Reads>(a), shared_bytes);
  }
  __device__ __forceinline__ void decode(const Decode& a) const {
    for_each_in_tiles<kWidth>(wide, a.count, DecodeBody{a}, WireReads<Reads>(a), shared_bytes);
  }
};

// Encodes all vectors of the call. With inputs, four blocks share a multiprocessor, which hides the latency
// of consecutive inputs.
template <Coding kCoding, bool kSum>
__global__ void __launch_bounds__(kVectorThreads, kSum ? 4 : 1)
    bf16_reduce_encode_kernel(const __grid_constant__ ReduceEncode a,
                              const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, ReduceEncodeBody<kCoding, kSum>{a, step_of(a.rounding)});
}

__global__ void __launch_bounds__(kVectorThreads)
    bf16_decode_kernel(const __grid_constant__ Decode a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, DecodeBody{a});
}

template <bool kSum>
auto* kernel_for(Coding coding) {
  return coding == Coding::none      ? bf16_reduce_encode_kernel<Coding::none, kSum>
         : coding == Coding::nearest ? bf16_reduce_encode_kernel<Coding::nearest, kSum>
                                     : bf16_reduce_encode_kernel<Coding::stochastic, kSum>;
}

const uint16_t* wire_of(const void* data) {
  return static_cast<const uint16_t*>(data);
}

}  // namespace

void bf16_reduce_encode(CudaStream stream, const ReduceEncode& a) {
  auto alignment = Alignment(kWidth).with(a.own).with(a.residual).with(wire_of(a.wire)).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(wire_of(a.inputs[k]));
  auto split = alignment.split(a.count);
  const bool sum = a.num_inputs > 0 || a.own_scale * a.residual_scale != 1.0f;
  auto* kernel = sum ? kernel_for<true>(coding_of(a)) : kernel_for<false>(coding_of(a));
  launch_vectors<kWidth>("bf16_reduce_encode", kernel, stream, split, a);
}

void bf16_decode(CudaStream stream, const Decode& a) {
  auto split = Alignment(kWidth).with(wire_of(a.wire)).with(a.out).split(a.count);
  launch_vectors<kWidth>("bf16_decode", bf16_decode_kernel, stream, split, a);
}

void bf16_fused_allreduce(CudaStream stream, const FusedAllreduce& a) {
  const bool wide = aligned(a.in, a.out, a.residual);
  if (a.rounding.mode == Rounding::nearest) {
    launch_fused<Bf16Tiles<Coding::nearest>>("bf16_fused_allreduce", stream, a, {wide},
                                             kVectorThreads * kWidth);
  } else {
    launch_fused<Bf16Tiles<Coding::stochastic>>("bf16_fused_allreduce", stream, a, {wide},
                                                kVectorThreads * kWidth);
  }
}

}  // namespace gradwire::cuda
