// split_heads and merge_heads: permutations of runs of head_dim elements.
//
// A thread keeps its column of the rows (B * T, parts * C), so the column is divided into part, head and dim
// only once. The rows are read or written in whole lines, the parts in runs of head_dim elements. Limit:
// memory bandwidth.
#include "kernels/vit/elementwise.h"

#include <tuple>
#include <type_traits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"

namespace gradwire::cuda {
namespace {

template <typename S, int W>
struct HeadColumn {
  S* part;        // the column's element of image 0, token 0
  float bias[W];  // 0 without a bias
};

template <bool kSplit, typename S>
struct MoveHeads {
  Heads<S> a;
  int64_t width;
  Divider by_tokens;

  template <int W>
  __device__ __forceinline__ HeadColumn<S, W> column(int64_t c) const {
    const int64_t of_part = a.heads * a.head_dim, part = c / of_part, within = c - part * of_part;
    const int64_t head = within / a.head_dim;
    S* const first = part == 0 ? a.parts[0] : part == 1 ? a.parts[1] : a.parts[2];
    HeadColumn<S, W> out{first + head * a.tokens * a.head_dim + (within - head * a.head_dim), {}};
    if (kSplit && a.bias != nullptr) load<W>(a.bias + c, out.bias);
    return out;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const HeadColumn<S, W>& column) const {
    int64_t token = row;
    const int64_t image = by_tokens.divide(token);
    S* const in_rows = a.rows + row * width + c;
    S* const in_part = column.part + (image * a.heads * a.tokens + token) * a.head_dim;
    float x[W];
    load<W>(kSplit ? in_rows : in_part, x);
    if (kSplit) add<W>(column.bias, x);
    store<W>(kSplit ? in_part : in_rows, x);
  }
};

template <bool kSplit, typename S>
void move_heads(const char* name, CudaStream stream, const Heads<S>& a) {
  for_columns<S>(name, stream,
                 takes_vectors<S>(a.head_dim, a.rows, a.bias, a.parts[0], a.parts[1], a.parts[2]),
                 MoveHeads<kSplit, S>{a, a.width(), Divider(a.tokens)}, a.batch * a.tokens, a.width());
}

}  // namespace

template <typename S>
void split_heads(CudaStream stream, const Heads<S>& a) {
  move_heads<true>("split_heads", stream, a);
}

template <typename S>
void merge_heads(CudaStream stream, const Heads<S>& a) {
  move_heads<false>("merge_heads", stream, a);
}

// column_sum reads each element once (FP32 4 B, BF16 2 B), in 16-byte accesses. The partial sums are at most
// a sixteenth of these bytes. Limit: memory bandwidth. Deterministic: sums in fixed order.

namespace {

// Sums partial rows threadIdx.y, threadIdx.y + 8, ... of a column.
template <typename T>
__device__ __forceinline__ float sum_of_lane(const T* column, int64_t count, int64_t pitch) {
  float total = 0.0f;
#pragma unroll 4
  for (int64_t i = threadIdx.y; i < count; i += 8) total += widen(column[i * pitch]);
  return total;
}

// Adds partial sums. Each sum has a row of blocks (y), each block 32 columns by 8 lanes. Lane y adds partial
// rows y, y + 8, ...; then the 8 lanes are added in order.
__global__ void __launch_bounds__(256) combine_partial_sums_kernel(const __grid_constant__ CombineSums a) {
  wait_for_earlier_kernels();
  __shared__ float shared[8][32];
  constexpr unsigned kSums = std::tuple_size_v<decltype(PartialSums::sums)>;
  const PartialSums& of = a.of[blockIdx.y / kSums];
  const unsigned which = blockIdx.y % kSums;
  float* sum = of.sums[which];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  if (sum == nullptr || static_cast<int64_t>(blockIdx.x) * 32 >= of.width) return;
  float total = 0.0f;
  if (c < of.width) {
    const int64_t column = which * of.width + c;
    total = of.partial_bf16 != nullptr ? sum_of_lane(of.partial_bf16 + column, of.count, of.pitch)
                                       : sum_of_lane(of.partial + column, of.count, of.pitch);
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || c >= of.width) return;
  for (int y = 1; y < 8; ++y) total += shared[y][threadIdx.x];
  sum[c] = of.accumulate ? sum[c] + total : total;
}

template <typename S>
struct Load {
  const S* x;
  int64_t width, stride;
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, float (&out)[W]) const {
    load<W>(x + blockIdx.z * stride + row * width + c, out);
  }
};

}  // namespace

void combine_sums(CudaStream stream, const CombineSums& a) {
  int64_t width = 0;
  unsigned rows = 0, row = 0;  // number of sums up to the last sum that is not null
  for (const PartialSums& of : a.of) {
    for (const float* sum : of.sums) {
      ++row;
      if (sum == nullptr) continue;
      width = width > of.width ? width : of.width;
      rows = row;
    }
  }
  launch(
      "combine_sums", combine_partial_sums_kernel,
      {.grid = dim3(static_cast<unsigned>((width + 31) / 32), rows), .block = dim3(32, 8), .stream = stream},
      a);
}

template <typename S>
void column_sum(CudaStream stream, const ColumnSum<S>& a) {
  // The other arrays of the batch are aligned like the first array only if `stride` is a whole number of
  // vectors.
  const bool vectors = takes_vectors<S>(a.width, a.x, a.workspace) && a.stride % kVector<S> == 0;
  partial_sums_over_rows<S>("column_sum", stream, vectors, Load<S>{a.x, a.width, a.stride}, a.rows, a.width,
                            a.workspace, a.width, a.batch);
  if (!a.partial_only) combine_sums(stream, {{a.sums()}});
}

// bias_gelu and bias_gelu_backward by kernels/math/gelu.h: exact GELU in about 45 FP32 operations per
// element, or 20 where the result is rounded to BF16; the tanh form in 30, or 15.
//
// Forward: reads 4 B, writes 4 B per element; backward: reads 8 B, writes 4 B, and computes the bias gradient
// in the same pass; BF16 operands move half of these bytes. Limit: memory bandwidth (arithmetic takes about
// two thirds of the time).

namespace {

// Results that are rounded to BF16 need fewer instructions.
template <typename S>
constexpr bool kCoarse = std::is_same_v<S, Bf16>;

template <typename S, Gelu kForm>
struct Forward {
  const S* x;
  S* y;
  int64_t width;

  template <int W>
  __device__ __forceinline__ int column(int64_t) const {
    return 0;  // no value depends on the column alone
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, int) const {
    const int64_t i = row * width + c;
    float out[W];
    load<W>(x + i, out);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = gelu_of(out[k], normal_in_form<kForm, kCoarse<S>>(out[k]));
    store<W>(y + i, out);
  }
};

template <typename S, Gelu kForm>
struct Backward {
  const S *pre, *dy;
  S* d_pre;
  int64_t width;

  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, float (&out)[W]) const {
    const int64_t i = row * width + c;
    float p[W];
    load<W>(pre + i, p);
    load<W>(dy + i, out);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= gelu_derivative_of(p[k], normal_in_form<kForm, kCoarse<S>>(p[k]));
    store<W>(d_pre + i, out);
  }
  // The pass without sums.
  template <int W>
  __device__ __forceinline__ int column(int64_t) const {
    return 0;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, int) const {
    float unused[W];
    at<W>(row, c, unused);
  }
};

template <Gelu kForm, typename S>
void forward(CudaStream stream, const BiasGelu<S>& a) {
  for_columns<S>("bias_gelu", stream, takes_vectors<S>(a.width, a.x, a.y),
                 Forward<S, kForm>{a.x, a.y, a.width}, a.rows, a.width);
}

template <Gelu kForm, typename S>
void backward(CudaStream stream, const BiasGeluBackward<S>& a) {
  const bool vectors = takes_vectors<S>(a.width, a.pre, a.dy, a.d_pre, a.workspace);
  const Backward<S, kForm> op{a.pre, a.dy, a.d_pre, a.width};
  if (a.workspace == nullptr) {
    for_columns<S>("bias_gelu_backward", stream, vectors, op, a.rows, a.width);
  } else {
    partial_sums_over_rows<S>("bias_gelu_backward", stream, vectors, op, a.rows, a.width, a.workspace,
                              a.width);
  }
}

}  // namespace

template <typename S>
void bias_gelu(CudaStream stream, const BiasGelu<S>& a) {
  a.form == Gelu::tanh ? forward<Gelu::tanh>(stream, a) : forward<Gelu::exact>(stream, a);
}

template <typename S>
void bias_gelu_backward(CudaStream stream, const BiasGeluBackward<S>& a) {
  a.form == Gelu::tanh ? backward<Gelu::tanh>(stream, a) : backward<Gelu::exact>(stream, a);
  if (!a.partial_only && a.workspace != nullptr) combine_sums(stream, {{a.sums()}});
}

// patchify, assemble_tokens and assemble_tokens_backward.
//
// patchify moves each pixel once (8 B in FP32, 6 B in BF16); a thread keeps its column of the patch matrix,
// so channel, line and pixel are computed only once. assemble_tokens reads 4 or 2 B and writes 4 B per
// element (positions and bias come from cache). The backward op reads dx once: a block owns a token and a
// slice of columns, and its lanes share the images, so one pass gives the copy, d_position and d_class_token,
// and a row of partial sums of d_bias, which combine_sums() adds. It moves 8 or 6 B per element. Limit:
// memory bandwidth. Deterministic: sums in fixed order.

namespace {

template <typename S>
struct MovePixels {
  const float* images;
  S* patches;
  int64_t channels, image, patch;
  Divider by_grid;

  // Returns the offset of the pixel from the corner of its patch in channel 0.
  template <int W>
  __device__ __forceinline__ int64_t column(int64_t c) const {
    const int64_t ch = c / (patch * patch), rest = c - ch * patch * patch;
    const int64_t y = rest / patch, x = rest - y * patch;
    return (ch * image + y) * image + x;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, int64_t offset) const {
    int64_t gx = row;
    int64_t gy = by_grid.divide(gx);  // rows of patches of all images, then of this image
    const int64_t b = by_grid.divide(gy);
    float x[W];
    load<W>(images + (b * channels * image + gy * patch) * image + gx * patch + offset, x);
    store<W>(patches + row * channels * patch * patch + c, x);
  }
};

template <int W>
struct TokenColumn {
  float bias[W], class_token[W];
};

template <typename S>
struct Assemble {
  const S* projected;
  const float *bias, *class_token, *position;
  float* x;
  int64_t width;
  Divider by_tokens;

  template <int W>
  __device__ __forceinline__ TokenColumn<W> column(int64_t c) const {
    TokenColumn<W> out;
    load<W>(bias + c, out.bias);
    load<W>(class_token + c, out.class_token);
    return out;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const TokenColumn<W>& column) const {
    int64_t t = row;
    const int64_t b = by_tokens.divide(t);
    float at_position[W], out[W];
    load<W>(position + t * width + c, at_position);
    if (t == 0) {
#pragma unroll
      for (int k = 0; k < W; ++k) out[k] = column.class_token[k];
    } else {
      load<W>(projected + (row - b - 1) * width + c, out);
      add<W>(column.bias, out);
    }
    add<W>(at_position, out);
    store<W>(x + row * width + c, out);
  }
};

constexpr int kSliceX = 32, kSliceY = 8;

using cuda::store_wide;
// Does with eight BF16 values what store_wide() of floats does.
template <int W>
__device__ __forceinline__ void store_wide(Bf16* to, const float (&from)[W]) {
  if constexpr (W == 1) {
    store<W>(to, from);
  } else {
    __stwb(reinterpret_cast<uint4*>(to),
           make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                      pack_bf16(from[6], from[7])));
  }
}

template <int W>
__device__ __forceinline__ void put(float* to, const float (&x)[W], bool accumulate) {
  float out[W] = {};
  if (accumulate) load<W>(to, out);
  add<W>(x, out);
  store_wide<W>(to, out);
}

// Block (t, x) owns a slice of columns of token t. Lane y adds images y, y + 8, ...; then the lanes' sums are
// added in order.
template <int W, typename S>
__global__ void __launch_bounds__(kSliceX* kSliceY)
    assemble_tokens_backward_kernel(AssembleTokensBackward<S> a) {
  wait_for_earlier_kernels();
  __shared__ __align__(16) float shared[kSliceY * kSliceX * W];
  const int64_t c = (static_cast<int64_t>(blockIdx.y) * kSliceX + threadIdx.x) * W, t = blockIdx.x;
  const bool live = c < a.width;
  float sum[W] = {};
#pragma unroll 4
  for (int64_t b = threadIdx.y; live && b < a.batch; b += kSliceY) {
    float x[W];
    load<W>(a.dx + (b * a.tokens + t) * a.width + c, x);
    if (t > 0) store_wide<W>(a.d_projected + (b * (a.tokens - 1) + t - 1) * a.width + c, x);
    add<W>(x, sum);
  }
  float* mine = shared + (threadIdx.y * kSliceX + threadIdx.x) * W;
  store<W>(mine, sum);
  __syncthreads();
  if (threadIdx.y != 0 || !live) return;
  for (int y = 1; y < kSliceY; ++y) {
    float x[W];
    load<W>(mine + y * kSliceX * W, x);
    add<W>(x, sum);
  }
  put<W>(a.d_position + t * a.width + c, sum, a.accumulate);
  if (t == 0) {
    put<W>(a.d_class_token + c, sum, a.accumulate);
  } else {
    store_wide<W>(a.workspace + (t - 1) * a.width + c, sum);
  }
}

}  // namespace

template <typename S>
void patchify(CudaStream stream, const Patchify<S>& a) {
  if (a.patch <= 0 || a.image < a.patch) return;
  const int64_t grid = a.image / a.patch;
  const bool vectors = a.image % 4 == 0 && takes_vectors<S>(a.patch, a.images, a.patches);
  for_columns<S>("patchify", stream, vectors,
                 MovePixels<S>{a.images, a.patches, a.channels, a.image, a.patch, Divider(grid)},
                 a.batch * grid * grid, static_cast<int64_t>(a.channels) * a.patch * a.patch);
}

template <typename S>
void assemble_tokens(CudaStream stream, const AssembleTokens<S>& a) {
  for_columns<S>("assemble_tokens", stream,
                 takes_vectors<S>(a.width, a.projected, a.bias, a.class_token, a.position, a.x),
                 Assemble<S>{a.projected, a.bias, a.class_token, a.position, a.x, a.width, Divider(a.tokens)},
                 a.batch * a.tokens, a.width);
}

template <typename S>
void assemble_tokens_backward(CudaStream stream, const AssembleTokensBackward<S>& a) {
  if (a.width <= 0 || a.tokens <= 0) return;
  const bool vectors =
      takes_vectors<S>(a.width, a.dx, a.d_projected, a.d_class_token, a.d_position, a.workspace);
  const int64_t accesses = vectors ? a.width / kVector<S> : a.width;
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>(a.tokens),
                                         static_cast<unsigned>((accesses + kSliceX - 1) / kSliceX)),
                            .block = dim3(kSliceX, kSliceY),
                            .stream = stream};
  launch("assemble_tokens_backward",
         vectors ? assemble_tokens_backward_kernel<kVector<S>, S> : assemble_tokens_backward_kernel<1, S>,
         config, a);
  combine_sums(stream, {{{a.workspace, a.tokens - 1, a.width, a.width, {a.d_bias}, a.accumulate}}});
}

GW_ELEMENTWISE_OPS(GW_INSTANTIATE_CUDA_OP)

}  // namespace gradwire::cuda
