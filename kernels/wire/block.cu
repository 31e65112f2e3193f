// Formats in blocks (kernels/wire/block.h) on CUDA: a warp for each block. Wires are moved in tiles of whole
// blocks through shared memory, so that blocks of any length move in 16-byte pieces.
//
// Bytes per element: as kernels/wire/format.h says. Limit: memory bandwidth. Alignment: any for floats, 16
// bytes fast. Deterministic: a value depends on its own block only.
#include <numeric>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/random.h"
#include "kernels/wire/block.h"
#include "kernels/wire/block_formats.h"
#include "kernels/wire/reduce_encode.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct WarpLanes {
  int lane;

  template <typename Body>
  __device__ __forceinline__ void each(int n, const Body& body) const {
    for (int i = lane; i < n; i += 32) body(i);
    __syncwarp();
  }
  template <typename Value>
  __device__ __forceinline__ uint32_t max(int n, const Value& value) const {
    uint32_t largest = 0;
    for (int i = lane; i < n; i += 32) {
      const uint32_t x = value(i);
      largest = x > largest ? x : largest;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, distance);
      largest = other > largest ? other : largest;
    }
    return largest;
  }
  template <typename Value>
  __device__ __forceinline__ float sum(int n, const Value& value) const {
    static_assert(kSumLanes == 32);
    float sum = 0.0f;
    for (int i = lane; i < n; i += 32) sum += value(i);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
  }
};

// A thread block's work at a time: as few blocks as fill its warps and whole 16-byte pieces.
template <typename F>
struct Tile {
  static constexpr int kBlocks = std::lcm(kWarps, 16 / std::gcd(16, F::kBytes));
  static constexpr int kBytes = kBlocks * F::kBytes;
  static constexpr int kValues = kBlocks * F::kBlock;
  static_assert(F::kBlock % 4 == 0 && kBytes % 16 == 0);

  float sums[kValues];
  float values[kWarps][F::kBlock];  // what a warp has just decoded
  uint16_t random[kWarps][F::kBlock];
  alignas(16) uint8_t bytes[kBytes];
};

template <typename F>
struct Worker {
  Tile<F>& tile;
  int64_t count;        // values of the whole call
  int64_t first_block;  // of the tile
  int blocks;           // in it
  bool wide;            // floats are 16-byte aligned
  WarpLanes lanes{static_cast<int>(threadIdx.x) % 32};
  int warp = static_cast<int>(threadIdx.x) / 32;

  __device__ __forceinline__ int values_of(int block) const {
    const int64_t left = count - (first_block + block) * F::kBlock;
    return left < F::kBlock ? static_cast<int>(left) : F::kBlock;
  }
  // Calls body(i, W) so that a lane has W neighbors of the block's values at a time. Both ways in a loop of
  // their own; side by side, the compiler merges them into scalar stores.
  template <typename Body>
  __device__ __forceinline__ void for_values(int block, const Body& body) const {
    const int valid = values_of(block);
    if (wide && valid == F::kBlock) {
      for (int i = 4 * lanes.lane; i < F::kBlock; i += 128) body.template at<4>(block, i);
    } else {
      for (int i = lanes.lane; i < valid; i += 32) body.template at<1>(block, i);
    }
    __syncwarp();
  }

  // The tile's part of a wire into shared memory or back, for all threads of the block.
  __device__ __forceinline__ void fetch(const void* wire) const {
    const auto* from = static_cast<const uint8_t*>(wire) + first_block * F::kBytes;
    const int all = blocks * F::kBytes, whole = all / 16;
    __syncthreads();  // nobody reads the bytes of before
    for (int i = static_cast<int>(threadIdx.x); i < whole; i += kThreads) {
      reinterpret_cast<uint4*>(tile.bytes)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    for (int i = 16 * whole + static_cast<int>(threadIdx.x); i < all; i += kThreads) tile.bytes[i] = from[i];
    __syncthreads();
  }
  __device__ __forceinline__ void put(void* wire) const {
    auto* to = static_cast<uint8_t*>(wire) + first_block * F::kBytes;
    const int all = blocks * F::kBytes, whole = all / 16;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < whole; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(tile.bytes)[i];
    }
    for (int i = 16 * whole + static_cast<int>(threadIdx.x); i < all; i += kThreads) to[i] = tile.bytes[i];
    __syncthreads();
  }

  // The warp's own room for what it decodes of block `block`.
  __device__ __forceinline__ const float* decode(int block) const {
    F::decode(lanes, tile.bytes + block * F::kBytes, values_of(block), tile.values[warp]);
    __syncwarp();
    return tile.values[warp];
  }
};

template <int W>
__device__ __forceinline__ void store_wide(float* to, const float (&x)[W]) {
  if constexpr (W == 4) {
    __stwb(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
  } else {
    *to = x[0];
  }
}

template <typename F>
struct AddOwn {
  const Worker<F>& w;
  const ReduceEncode& a;
  template <int W>
  __device__ __forceinline__ void at(int block, int i) const {
    float own[W];
    const int64_t element = (w.first_block + block) * F::kBlock + i;
    load<W>(a.own + element, own);
    if (a.residual != nullptr) {
      float kept[W];
      load<W>(a.residual + element, kept);
      add<W>(kept, own);
    }
    float s[W];
    load<W>(w.tile.sums + block * F::kBlock + i, s);
    add<W>(own, s);
    store<W>(w.tile.sums + block * F::kBlock + i, s);
  }
};

// Residual and result of a block whose wire decodes to `sent`.
template <typename F, Coding kCoding>
struct Finish {
  const Worker<F>& w;
  const ReduceEncode& a;
  const float* sent;
  template <int W>
  __device__ __forceinline__ void at(int block, int i) const {
    float s[W], x[W];
    const int64_t element = (w.first_block + block) * F::kBlock + i;
    load<W>(w.tile.sums + block * F::kBlock + i, s);
    load<W>(kCoding == Coding::none ? w.tile.sums + block * F::kBlock + i : sent + i, x);
    if (a.residual != nullptr) {
      float left[W];
#pragma unroll
      for (int k = 0; k < W; ++k) {
        left[k] = kCoding != Coding::none && is_finite(s[k]) ? s[k] - x[k] : 0.0f;
      }
      store_wide<W>(a.residual + element, left);
    }
    if (a.out != nullptr) {
#pragma unroll
      for (int k = 0; k < W; ++k) x[k] *= a.out_scale;
      store_wide<W>(a.out + element, x);
    }
  }
};

template <typename F>
struct PutValues {
  const Worker<F>& w;
  const Decode& a;
  const float* values;
  template <int W>
  __device__ __forceinline__ void at(int block, int i) const {
    float x[W];
    load<W>(values + i, x);
#pragma unroll
    for (int k = 0; k < W; ++k) x[k] *= a.scale;
    store_wide<W>(a.out + (w.first_block + block) * F::kBlock + i, x);
  }
};

// 16 random bits for each value of a block, which begins at `element`.
template <typename F>
__device__ __forceinline__ const uint16_t* draw_random(const Worker<F>& w, const ReduceEncode& a,
                                                       uint64_t step, int block) {
  const auto first = static_cast<uint64_t>(a.rounding.first_element + (w.first_block + block) * F::kBlock);
  const int shift = static_cast<int>(first & 7);  // a draw serves eight elements
  uint16_t* const random = w.tile.random[w.warp];
  w.lanes.each((F::kBlock + shift + 7) / 8, [&](int draw) {
    const Random4 bits = philox(a.rounding.seed, step, (first >> 3) + static_cast<uint64_t>(draw));
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int i = 8 * draw + k - shift;
      if (i >= 0 && i < F::kBlock) random[i] = static_cast<uint16_t>(random16_of(bits, k));
    }
  });
  return random;
}

template <typename F, Coding kCoding>
__device__ __forceinline__ void reduce_encode_tile(const Worker<F>& w, const ReduceEncode& a, uint64_t step) {
  for (int block = w.warp; block < w.blocks; block += kWarps) {
    const int valid = w.values_of(block);
    float* const sums = w.tile.sums + block * F::kBlock;
    // Adding to -0 changes nothing, not even a zero's sign. Where the array ends, encode sees 0.
    w.lanes.each(F::kBlock, [=](int i) { sums[i] = i < valid ? -0.0f : 0.0f; });
  }
  for (int term = 0; term <= a.num_inputs; ++term) {
    if (term == a.own_position) {
      for (int block = w.warp; block < w.blocks; block += kWarps) w.for_values(block, AddOwn<F>{w, a});
      continue;
    }
    w.fetch(a.inputs[term < a.own_position ? term : term - 1]);
    for (int block = w.warp; block < w.blocks; block += kWarps) {
      const float* const x = w.decode(block);
      float* const sums = w.tile.sums + block * F::kBlock;
      w.lanes.each(w.values_of(block), [=](int i) { sums[i] += x[i]; });
    }
  }
  for (int block = w.warp; block < w.blocks; block += kWarps) {
    const float* sent = nullptr;
    if constexpr (kCoding != Coding::none) {
      const uint16_t* random = nullptr;
      if constexpr (kCoding == Coding::stochastic) random = draw_random(w, a, step, block);
      F::encode(w.lanes, w.tile.sums + block * F::kBlock, w.values_of(block), random,
                w.tile.bytes + block * F::kBytes);
      __syncwarp();
      sent = w.decode(block);
    }
    w.for_values(block, Finish<F, kCoding>{w, a, sent});
  }
  if constexpr (kCoding != Coding::none) w.put(a.wire);
}

template <typename F>
__device__ __forceinline__ int blocks_in(int64_t first, int64_t all) {
  return all - first < Tile<F>::kBlocks ? static_cast<int>(all - first) : Tile<F>::kBlocks;
}

template <typename F, Coding kCoding>
__global__ void __launch_bounds__(kThreads)
    block_reduce_encode_kernel(const __grid_constant__ ReduceEncode a, bool wide) {
  GW_DYNAMIC_SHARED(Tile<F>, tile);
  const int64_t all = (a.count + F::kBlock - 1) / F::kBlock, stride = int64_t{gridDim.x} * Tile<F>::kBlocks;
  for (int64_t first = int64_t{blockIdx.x} * Tile<F>::kBlocks; first < all; first += stride) {
    reduce_encode_tile<F, kCoding>(Worker<F>{*tile, a.count, first, blocks_in<F>(first, all), wide}, a,
                                   step_of(a.rounding));
  }
}

template <typename F>
__global__ void __launch_bounds__(kThreads) block_decode_kernel(const __grid_constant__ Decode a, bool wide) {
  GW_DYNAMIC_SHARED(Tile<F>, tile);
  const int64_t all = (a.count + F::kBlock - 1) / F::kBlock, stride = int64_t{gridDim.x} * Tile<F>::kBlocks;
  for (int64_t first = int64_t{blockIdx.x} * Tile<F>::kBlocks; first < all; first += stride) {
    const Worker<F> w{*tile, a.count, first, blocks_in<F>(first, all), wide};
    w.fetch(a.wire);
    for (int block = w.warp; block < w.blocks; block += kWarps) {
      w.for_values(block, PutValues<F>{w, a, w.decode(block)});
    }
  }
}

template <typename F>
LaunchConfig config_for(int64_t count, CudaStream stream) {
  return {.grid = dim3(grid_for(count, Tile<F>::kValues)),
          .block = dim3(kThreads),
          .shared_bytes = sizeof(Tile<F>),
          .stream = stream};
}

template <typename F>
void reduce_encode(const char* name, CudaStream stream, const ReduceEncode& a) {
  const Coding coding = coding_of(a);
  auto* kernel = coding == Coding::none      ? block_reduce_encode_kernel<F, Coding::none>
                 : coding == Coding::nearest ? block_reduce_encode_kernel<F, Coding::nearest>
                                             : block_reduce_encode_kernel<F, Coding::stochastic>;
  launch(name, kernel, config_for<F>(a.count, stream), a, aligned(a.own, a.residual, a.out));
}

}  // namespace

#define GW_DEFINE(F, NAME)                                                                              \
  void NAME##_reduce_encode(CudaStream stream, const ReduceEncode& a) {                                 \
    reduce_encode<F>(#NAME "_reduce_encode", stream, a);                                                \
  }                                                                                                     \
  void NAME##_decode(CudaStream stream, const Decode& a) {                                              \
    launch(#NAME "_decode", block_decode_kernel<F>, config_for<F>(a.count, stream), a, aligned(a.out)); \
  }
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::cuda
