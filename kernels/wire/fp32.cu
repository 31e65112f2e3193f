// FP32 wire format on CUDA: a sum of many arrays in a fixed order, in one pass.
//
// Bytes per element: 8 + 4 per input. Limit: memory bandwidth. Alignment: any; 16-byte accesses when the
// arrays share a head (kernels/cuda/vector.cuh). Deterministic: the additions are in the contract's order.
#include "kernels/wire/fp32.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/wire/fused.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kWidth = 4;

// Reads the vectors of a call, directly or ahead (read_ahead.cuh).
struct Reads {
  static constexpr int kSlots = kFp32ReadsAhead + 1, kPieces = 1;
  static constexpr bool kResidual = false;
  __device__ __forceinline__ static void begin_floats(const Pieces& to, const float* from, int64_t vector) {
    begin_copy<16>(to.at(0), from + vector_begin<kWidth>(vector));
  }
  __device__ __forceinline__ static void begin_wire(const Pieces& to, const void* from, int64_t,
                                                    int64_t vector) {
    begin_floats(to, static_cast<const float*>(from), vector);
  }

  // Reads the vector at element i from global memory.
  struct Direct {
    int64_t i;
    template <int W>
    __device__ __forceinline__ void floats(const void* from, float (&x)[W]) {
      load<W>(static_cast<const float*>(from) + i, x);
    }
  };

  // Reads the vectors from the queue's copies in shared memory.
  template <typename Queue>
  struct Queued {
    Queue& queue;
    template <int W>
    __device__ __forceinline__ void floats(const void*, float (&x)[W]) {
      load<W>(reinterpret_cast<const float*>(queue.next().at(0)), x);
    }
  };
};

// Sets s to the sum of all parts; reads `own` and `inputs` in the order of PartReads.
template <int W, typename Args, typename From>
__device__ __forceinline__ void sum_all(const Args& a, From from, float (&s)[W]) {
  float own[W];
  from.template floats<W>(a.own, own);
#pragma unroll
  for (int k = 0; k < W; ++k) s[k] = -0.0f;  // the additive identity, also for -0
  for (int input = 0; input < a.num_inputs; ++input) {
    float x[W];
    from.template floats<W>(a.input(input), x);
    if (input == a.own_position) add<W>(a.own_scale, own, s);
    add<W>(a.input_scale(input), x, s);
  }
  if (a.own_position == a.num_inputs) add<W>(a.own_scale, own, s);
}

struct ReduceBody {
  const Reduce& a;

  template <int W>
  __device__ __forceinline__ void at(int64_t i) const {
    float s[W];
    sum_all<W>(a, Reads::Direct{i}, s);
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] *= a.scale;
    store<W>(a.out + i, s);
  }
};

// Body of an allreduce over peer access: writes the scaled sum to `out` and to peer memory.
struct FusedBody {
  const FusedPart& a;

  template <int W, typename From>
  __device__ __forceinline__ void at(int64_t i, From from) const {
    float s[W];
    sum_all<W>(a, from, s);
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] *= a.out_scale;
    if (a.out != nullptr) store<W>(a.out + i, s);
    if (a.wire != nullptr) store<W>(static_cast<float*>(a.wire) + i, s);
  }
};

struct CopyBody {
  const Decode& a;
  template <int W, typename From>
  __device__ __forceinline__ void at(int64_t i, From from) const {
    float x[W];
    from.template floats<W>(a.wire, x);
    store_wide<W>(a.out + i, x);
  }
};

struct Fp32Tiles : TilesAhead<Reads> {
  static constexpr bool kExact = true;
  __device__ __forceinline__ Fp32Tiles(const Form& form, const FusedAllreduce&) : TilesAhead(form) {}
  __device__ __forceinline__ static int64_t tile() { return kThreads * kWidth; }
  __device__ __forceinline__ void reduce_encode(const FusedPart& a) const {
    for_each_in_tiles<kWidth>(wide, a.count, FusedBody{a}, PartReads<Reads>(a), shared_bytes);
  }
  __device__ __forceinline__ void decode(const Decode& a) const {
    for_each_in_tiles<kWidth>(wide, a.count, CopyBody{a}, WireReads<Reads>(a), shared_bytes);
  }
};

__global__ void __launch_bounds__(kVectorThreads)
    fp32_reduce_kernel(const __grid_constant__ Reduce a, const __grid_constant__ VectorSplit split) {
  for_each_vector<kWidth>(split, ReduceBody{a});
}

}  // namespace

void fp32_reduce(CudaStream stream, const Reduce& a) {
  auto alignment = Alignment(kWidth).with(a.own).with(a.out);
  for (int k = 0; k < a.num_inputs; ++k) alignment.with(a.inputs[k]);
  auto split = alignment.split(a.count);
  launch_vectors<kWidth>("fp32_reduce", fp32_reduce_kernel, stream, split, a);
}

void fp32_fused_allreduce(CudaStream stream, const FusedAllreduce& a) {
  launch_fused<Fp32Tiles>("fp32_fused_allreduce", stream, a, {aligned(a.in, a.out)}, kVectorThreads * kWidth);
}

}  // namespace gradwire::cuda
