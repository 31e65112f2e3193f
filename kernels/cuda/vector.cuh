// Element-wise kernels over arrays of any alignment: a body of 16-byte accesses with a scalar head and tail,
// in one launch. When no head aligns all arrays at once, every element is handled as a scalar.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/math/column_chunks.h"
#include "kernels/math/small_float.h"
#include "runtime/device/launch.cuh"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#endif

namespace gradwire::cuda {

// Elements [0, head) and [head + vectors * width, count) are scalar, the rest are vectors of `width`.
struct VectorSplit {
  int64_t count = 0, head = 0, vectors = 0;
};

// A vector of eight is two runs of four elements, kApart elements apart. A warp has 256 elements, and each of
// its accesses covers 128 adjacent elements. With eight floats in a row, each store would fill half of every
// 32-byte sector.
inline constexpr int kApart = 128;

// Returns element k of a vector of W that begins at 0.
template <int W>
__device__ __forceinline__ int element_of(int k) {
  return W == 8 && k >= 4 ? kApart + k - 4 : k;
}

// Finds the head that aligns all arrays. Floats need an alignment of 16 bytes; so do 16-bit elements when
// `width` is 8. Four BF16 operands next to four floats need 8 bytes.
class Alignment {
 public:
  explicit Alignment(int width) : width_(width), possible_((1u << width) - 1) {}
  // Adds an array; ignores null.
  template <typename T>
  GW_HD Alignment& with(const T* data) {
    if (data == nullptr) return *this;
    const uintptr_t bytes = std::is_same_v<T, Bf16> && width_ == 4 ? 8 : 16;
    for (int head = 0; head < width_; ++head) {
      uintptr_t at = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(head) * sizeof(T);
      if (at % bytes != 0) possible_ &= ~(1u << head);
    }
    return *this;
  }
  VectorSplit split(int64_t count) const {
    for (int head = 0; head < width_; ++head) {
      if ((possible_ >> head & 1u) == 0 || head >= count) continue;
      const int64_t vectors = (count - head) / width_;
      return {count, head, width_ == 8 ? vectors - vectors % 32 : vectors};  // runs apart: whole warps
    }
    return {count, 0, 0};
  }

 private:
  int width_;
  unsigned possible_;
};

// Returns whether all pointers allow 16-byte accesses; a null pointer does.
template <typename... Pointers>
bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Calls body(width, i) for all vectors of W elements, then for single elements; i is the first element, and
// width a std::integral_constant<int>.
template <int W, typename Body>
__device__ __forceinline__ void for_each_vector(const VectorSplit& split, const Body& body) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t v = first; v < split.vectors; v += stride) {
    const int64_t begin = W == 8 ? (v & ~int64_t{31}) * 8 + (v & 31) * 4 : v * W;
    body(std::integral_constant<int, W>(), split.head + begin);
  }
  int64_t single = split.count - split.vectors * W;
  for (int64_t s = first; s < single; s += stride) {
    body(std::integral_constant<int, 1>(), s < split.head ? s : s + split.vectors * W);
  }
}

inline constexpr int kVectorThreads = 256;

// Launches `kernel`, which takes args and the split and runs for_each_vector<W>().
template <int W, typename... Params, typename... Args>
void launch_vectors(const char* name, void (*kernel)(Params...), CudaStream stream, const VectorSplit& split,
                    const Args&... args) {
  const int64_t single = split.count - split.vectors * W;
  const unsigned blocks =
      grid_for(kernel, split.vectors > single ? split.vectors : single, kVectorThreads, kVectorThreads);
  launch(name, kernel, {.grid = dim3(blocks), .block = dim3(kVectorThreads), .stream = stream}, args...,
         split);
}

template <int W>
__device__ __forceinline__ void load(const float* from, float (&to)[W]) {
  if constexpr (W == 1) {
    to[0] = *from;
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      float4 x = *reinterpret_cast<const float4*>(from + i);
      to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
    }
  }
}

template <int W>
__device__ __forceinline__ void store(float* to, const float (&from)[W]) {
  if constexpr (W == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
    }
  }
}

// Stores W floats to global memory with st.wb, so that the compiler does not merge the paths for widths 4 and
// 1 of a kernel into four 4-byte stores.
template <int W>
__device__ __forceinline__ void store_wide(float* to, const float (&from)[W]) {
  static_assert(W == 1 || W % 4 == 0);
  if constexpr (W == 1) {
    *to = from[0];
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4)
      __stwb(reinterpret_cast<float4*>(to + i), make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]));
  }
}

// Load and store floats and 16-bit elements of a vector of for_each_vector().
template <int W>
__device__ __forceinline__ void load_vector(const float* from, float (&to)[W]) {
  if constexpr (W == 8) {
    const float4 x = *reinterpret_cast<const float4*>(from),
                 y = *reinterpret_cast<const float4*>(from + kApart);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    to[4] = y.x, to[5] = y.y, to[6] = y.z, to[7] = y.w;
  } else {
    load<W>(from, to);
  }
}

template <int W>
__device__ __forceinline__ void store_vector(float* to, const float (&from)[W]) {
  if constexpr (W == 8) {
    *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
    *reinterpret_cast<float4*>(to + kApart) = make_float4(from[4], from[5], from[6], from[7]);
  } else {
    store<W>(to, from);
  }
}

template <int W>
__device__ __forceinline__ void load_vector(const uint16_t* from, uint16_t (&to)[W]) {
  static_assert(W == 1 || W == 8);
  if constexpr (W == 1) {
    to[0] = *from;
  } else {
    const uint2 x = *reinterpret_cast<const uint2*>(from), y = *reinterpret_cast<const uint2*>(from + kApart);
    const uint32_t words[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
  }
}

template <int W>
__device__ __forceinline__ void store_vector(uint16_t* to, const uint16_t (&from)[W]) {
  static_assert(W == 1 || W == 8);
  if constexpr (W == 1) {
    *to = from[0];
  } else {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    *reinterpret_cast<uint2*>(to + kApart) = make_uint2(words[2], words[3]);
  }
}

// Pack, load and store BF16 operands, which are widened when loaded and rounded when stored
// (kernels/math/small_float.h).
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);  // one instruction rounds both values
  uint32_t word;
  memcpy(&word, &both, sizeof word);
  return word;
#else
  return narrow<Bf16>(low).bits | static_cast<uint32_t>(narrow<Bf16>(high).bits) << 16;
#endif
}

template <int W>
__device__ __forceinline__ void load(const Bf16* from, float (&to)[W]) {
  static_assert(W == 1 || W == 4 || W == 8);
  if constexpr (W == 1) {
    to[0] = widen(*from);
  } else {
    uint32_t words[W / 2];
    const auto x = *reinterpret_cast<const std::conditional_t<W == 8, uint4, uint2>*>(from);
    memcpy(words, &x, sizeof x);
#pragma unroll
    for (int i = 0; i < W / 2; ++i) {
      to[2 * i] = bits_float(words[i] << 16);
      to[2 * i + 1] = bits_float(words[i] & 0xffff0000u);
    }
  }
}

template <int W>
__device__ __forceinline__ void store(Bf16* to, const float (&from)[W]) {
  static_assert(W == 1 || W == 4 || W == 8);
  if constexpr (W == 1) {
    *to = narrow<Bf16>(from[0]);
  } else if constexpr (W == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]));
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]),
                                               pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7]));
  }
}

// A vector of one array of an element-wise op (kernels/passes/passes.h).
template <int W, typename Array>
struct ElementVector {
  const Array array;
  typename Array::Value v[W] = {};

  __device__ __forceinline__ ElementVector(const Array& from, int64_t i) : array(from) {
    if constexpr (Array::kReads) {
      if (array.present()) load_vector<W>(array.data + i, v);
    }
  }
  __device__ __forceinline__ void store_to(int64_t i) const {
    if constexpr (Array::kWrites) {
      if (!array.present()) return;
      if constexpr (W == 4 && std::is_same_v<decltype(array.data), float*>) {
        store_wide<W>(array.data + i, v);
      } else if constexpr (W == 8 || std::is_same_v<decltype(array.data), uint16_t*>) {
        store_vector<W>(array.data + i, v);
      } else {
        store<W>(array.data + i, v);
      }
    }
  }
};

// Runs an element-wise op in vectors of kWidest elements.
template <int kWidest>
struct VectorLoop {
  const VectorSplit& split;

  template <typename T>
  __device__ __forceinline__ T once(const T* scalar) const {
    return *scalar;
  }
  template <typename Element, typename... Arrays>
  __device__ __forceinline__ void operator()(const Element& element, const Arrays&... arrays) const {
    for_each_vector<kWidest>(split, [&](auto width, int64_t i) {
      constexpr int W = decltype(width)::value;
      [&](auto... x) {
#pragma unroll
        for (int k = 0; k < W; ++k) element(x.v[k]...);
        (x.store_to(i), ...);
      }(ElementVector<W, Arrays>(arrays, i)...);
    });
  }
};

// Collects the alignment of an element-wise op's arrays.
struct ElementAlignment {
  Alignment& all;
  template <typename T>
  GW_HD T once(const T*) const {  // device memory
    return {};
  }
  template <typename Element, typename... Arrays>
  GW_HD void operator()(const Element&, const Arrays&... arrays) const {
    (all.with(arrays.data), ...);
  }
};

template <typename Op>
constexpr int element_width() {
  if constexpr (requires { Op::kWidth; }) return Op::kWidth;
  return 4;
}

template <typename Op>
__global__ void __launch_bounds__(kVectorThreads)
    elements_kernel(const __grid_constant__ Op op, const __grid_constant__ VectorSplit split) {
  wait_for_earlier_kernels();
  op.each(VectorLoop<element_width<Op>()>{split});
}

template <typename Op>
void for_each_element(const char* name, CudaStream stream, const Op& op) {
  Alignment alignment(element_width<Op>());
  op.each(ElementAlignment{alignment});
  launch_vectors<element_width<Op>()>(name, elements_kernel<Op>, stream, alignment.split(op.count), op);
}

// The number of elements of S in a 16-byte access.
template <typename S>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(S));

// Sets `kept` to 0 where the vector x is not finite. Such vectors are rare; the test costs an instruction per
// value.
template <int W>
__device__ __forceinline__ void forget_not_finite(const float (&x)[W], float* kept) {
  float none = 0.0f;
#pragma unroll
  for (int k = 0; k < W; ++k) none = fmaf(x[k], 0.0f, none);
  if (none == 0.0f || kept == nullptr) return;
  for (int k = 0; k < W; ++k) {
    if (!is_finite(x[k])) kept[element_of<W>(k)] = 0.0f;
  }
}

// Adds x to `to`.
template <int W>
__device__ __forceinline__ void add(const float (&x)[W], float (&to)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] += x[k];
}

// Adds scale * x to `to`, rounded once.
template <int W>
__device__ __forceinline__ void add(float scale, const float (&x)[W], float (&to)[W]) {
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] = fmaf(scale, x[k], to[k]);
}

// Divides numbers from 0 to 2^63 - 1 by a divisor known before the launch: a product with its reciprocal, too
// large by at most 2^-63, and a shift (Granlund and Montgomery, 1994). CUDA's division is a long subroutine.
class Divider {
 public:
  explicit Divider(int64_t divisor) : divisor_(divisor) {
    while (int64_t{1} << shift_ < divisor) ++shift_;
    reciprocal_ =
        static_cast<uint64_t>((Wide{1} << (63 + shift_)) / static_cast<uint64_t>(divisor)) + uint64_t{1};
  }
  // Returns n / divisor, and leaves n % divisor in `n`.
  __device__ __forceinline__ int64_t divide(int64_t& n) const {
    const uint64_t twice = static_cast<uint64_t>(n) * 2;
#ifdef __CUDA_ARCH__
    const uint64_t high = __umul64hi(twice, reciprocal_);
#else
    const auto high = static_cast<uint64_t>((Wide{twice} * reciprocal_) >> 64);
#endif
    const auto quotient = static_cast<int64_t>(high >> shift_);
    n -= quotient * divisor_;
    return quotient;
  }

 private:
  __extension__ typedef unsigned __int128 Wide;
  uint64_t reciprocal_ = 0;
  int64_t divisor_;
  int shift_ = 0;
};

// Two shapes of kernel over a (rows, width) array, with W elements per access, 16 bytes of S (the storage
// type of operands; kVector<S> of them) or 1:
//
//   for_columns       element-wise. A thread keeps its columns and walks down the rows, so values that depend
//                     on the column alone (a bias, a divided index) are computed once. Consecutive threads
//                     access consecutive memory.
//   partial_sums_over_rows  the first of two stages of per-column sums of Op's results, in fixed order
//                     (kernels/math/column_chunks.h); the second is combine_sums (kernels/vit/elementwise.h).
//
// Op is a small struct of pointers passed by value:
//   for_columns:    template <int W> struct Column;  template <int W> Column<W> column(int64_t c) const;
//                   template <int W> void at(int64_t row, int64_t c, const Column<W>&) const;
//   partial_sums_over_rows:  template <int W> void at(int64_t row, int64_t c, float (&out)[W]) const;

// Returns whether rows of `width` elements at all of the pointers, to S and floats, allow 16-byte accesses.
template <typename S, typename... Pointers>
bool takes_vectors(int64_t width, Pointers... pointers) {
  return width % kVector<S> == 0 && aligned(pointers...);
}

// Returns the block's shape: (x, y) threads, of which x are adjacent in a row.
inline dim3 column_block(int64_t accesses_per_row) {
  unsigned x = 1;
  while (x < 32 && x < accesses_per_row) x *= 2;
  unsigned y = 256 / x;
  return dim3(x, y < 32 ? y : 32);
}

template <int W, typename Op>
__global__ void __launch_bounds__(256) for_columns_kernel(Op op, int64_t rows, int64_t width) {
  wait_for_earlier_kernels();
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  if (c >= width) return;
  const auto column = op.template column<W>(c);
  const int64_t stride = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    op.template at<W>(row, c, column);
  }
}

template <typename S, typename Op>
void for_columns(const char* name, CudaStream stream, bool vectors, const Op& op, int64_t rows,
                 int64_t width) {
  if (rows <= 0 || width <= 0) return;
  const int64_t accesses = vectors ? width / kVector<S> : width;
  const dim3 block = column_block(accesses);
  const auto across = static_cast<unsigned>((accesses + block.x - 1) / block.x);
  const auto run = [&](auto* kernel) {
    int64_t down = (rows + block.y - 1) / block.y;
    const int64_t threads = int64_t{block.x} * block.y;
    const int64_t fill = (device_blocks(kernel, static_cast<int>(threads)) + across - 1) / across;
    down = down < fill ? down : fill;
    down = down < 65535 ? down : 65535;
    launch(name, kernel,
           {.grid = dim3(across, static_cast<unsigned>(down)), .block = block, .stream = stream}, op, rows,
           width);
  };
  if (vectors) {
    run(for_columns_kernel<kVector<S>, Op>);
  } else {
    run(for_columns_kernel<1, Op>);
  }
}

// Runs the first stage: block (x, chunk) writes partial(chunk, c) = sum of op over the chunk's rows; pitch
// floats between chunks. In a batch, block z processes array z, which op finds by blockIdx.z; its partial
// sums follow array z - 1's.
template <int W, typename Op>
__global__ void __launch_bounds__(256)
    column_partials_kernel(Op op, int64_t rows, int64_t width, int64_t rows_per_chunk, float* partial,
                           int64_t pitch) {
  wait_for_earlier_kernels();
  __shared__ __align__(16) float shared[256 * W];
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * rows_per_chunk;
  const int64_t end = begin + rows_per_chunk < rows ? begin + rows_per_chunk : rows;
  float sum[W] = {};
  if (c < width) {
    for (int64_t row = begin + threadIdx.y; row < end; row += blockDim.y) {
      float x[W];
      op.template at<W>(row, c, x);
      add<W>(x, sum);
    }
  }
  float* mine = shared + (threadIdx.y * blockDim.x + threadIdx.x) * W;
  store<W>(mine, sum);
  __syncthreads();
  if (threadIdx.y != 0 || c >= width) return;
  for (unsigned y = 1; y < blockDim.y; ++y) {
    float x[W];
    load<W>(mine + y * blockDim.x * W, x);
    add<W>(x, sum);
  }
  store<W>(partial + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * pitch + c, sum);
}

template <typename S, typename Op>
void partial_sums_over_rows(const char* name, CudaStream stream, bool vectors, const Op& op, int64_t rows,
                            int64_t width, float* partial, int64_t pitch, int64_t batch = 1) {
  if (width <= 0) return;
  const auto chunks = column_chunks(rows);
  const int64_t accesses = vectors ? width / kVector<S> : width;
  const dim3 block = column_block(accesses);
  const dim3 grid(static_cast<unsigned>((accesses + block.x - 1) / block.x),
                  static_cast<unsigned>(chunks.count), static_cast<unsigned>(batch));
  const LaunchConfig config{.grid = grid, .block = block, .stream = stream};
  if (vectors) {
    launch(name, column_partials_kernel<kVector<S>, Op>, config, op, rows, width, chunks.rows, partial,
           pitch);
  } else {
    launch(name, column_partials_kernel<1, Op>, config, op, rows, width, chunks.rows, partial, pitch);
  }
}

// Reductions over a group of lanes, a warp or a block. All participants get the result with the same bits:
// the butterfly adds the same pairs on every lane, and the order is fixed.

inline constexpr unsigned kFullWarp = 0xffffffffu;

struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  static constexpr float kIdentity = -std::numeric_limits<float>::infinity();
  __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};

// Reduces over aligned groups of G lanes (a power of two). All lanes of the warp must call it.
template <int G, typename Combine>
__device__ __forceinline__ float group_reduce(float x, Combine combine) {
#pragma unroll
  for (int distance = G / 2; distance > 0; distance /= 2) {
    x = combine(x, __shfl_xor_sync(kFullWarp, x, distance));
  }
  return x;
}

// Reduces over a block of at most 32 whole warps. `shared` (32) may be reused right after the call.
template <typename Combine>
__device__ __forceinline__ float block_reduce(float x, float* shared, Combine combine) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  x = group_reduce<32>(x, combine);
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = group_reduce<32>(lane < warps ? shared[lane] : Combine::kIdentity, combine);
  __syncthreads();
  return x;
}

// A row of up to 1024 elements held as floats in the registers of a group of G lanes, V at a time (16 bytes
// of the storage type: 4 of FP32, 8 of BF16): read once, used in as many passes as the op needs, written
// once. Short rows share a warp (G = 8 or 16), so that lanes are not idle. Blocks of slices are small: a
// model's 1600 rows in blocks of 8 would load half of the multiprocessors twice as much as the others.
inline constexpr int kRowThreads = 256, kSliceThreads = 64;
inline constexpr int64_t kLongestSlicedRow = 1024;

template <int G, int Items, int V>
struct RowSlice {
  static constexpr int kRowsPerBlock = kSliceThreads / G;
  static constexpr int kWidth = G * Items * V;
  float v[Items][V];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % G; }
  // Returns the group's number within its block.
  static __device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / G; }
  // Returns the first of the V columns of item j.
  static __device__ __forceinline__ int column(int j) { return (j * G + lane()) * V; }

  // Reads the slice; 0 beyond the width, and everywhere if the row is not live. `width` is a multiple of V
  // and the row is 16-byte aligned.
  template <typename T>
  __device__ __forceinline__ void read(const T* row, int width, bool live) {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) {
        load<V>(row + column(j), v[j]);
      } else {
#pragma unroll
        for (int k = 0; k < V; ++k) v[j][k] = 0.0f;
      }
    }
  }
  template <typename T>
  __device__ __forceinline__ void write(T* row, int width, bool live) const {
#pragma unroll
    for (int j = 0; j < Items; ++j) {
      if (live && column(j) < width) store<V>(row + column(j), v[j]);
    }
  }
};

// Calls run.template operator()<G, Items>() with the smallest slice for `width` (at most 1024) elements.
template <int V, typename Run>
void with_row_slice(int64_t width, const Run& run) {
  if (width <= 8 * V) return run.template operator()<8, 1>();
  if (width <= 16 * V) return run.template operator()<16, 1>();
  if (width <= 32 * V) return run.template operator()<32, 1>();
  if (width <= 64 * V) return run.template operator()<32, 2>();
  if constexpr (V == 4) {
    if (width <= 128 * V) return run.template operator()<32, 4>();
    return run.template operator()<32, 8>();
  } else {
    return run.template operator()<32, 4>();
  }
}

// Returns the launch of a block per row of `width` elements: whole warps, at most 256 threads.
inline LaunchConfig row_launch(CudaStream stream, int64_t rows, int64_t width) {
  const int64_t warps = width <= 32 ? 1 : width > 224 ? 8 : (width + 31) / 32;
  return {.grid = dim3(static_cast<unsigned>(rows)),
          .block = dim3(static_cast<unsigned>(32 * warps)),
          .stream = stream};
}

template <int G>
LaunchConfig row_slice_launch(CudaStream stream, int64_t rows) {
  constexpr int64_t kRows = kSliceThreads / G;
  return {.grid = dim3(static_cast<unsigned>((rows + kRows - 1) / kRows)),
          .block = dim3(kSliceThreads),
          .stream = stream};
}

}  // namespace gradwire::cuda
