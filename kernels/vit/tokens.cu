// patchify, assemble_tokens and assemble_tokens_backward.
//
// patchify moves each pixel once (8 B in FP32, 6 B in BF16); a thread keeps its column of the patch matrix,
// so channel, line and pixel are computed only once. assemble_tokens reads 4 or 2 B and writes 4 B per
// element (positions and bias come from cache). The backward op reads dx once: block x owns a slice of
// columns and walks over all tokens and images of these columns in order, so one pass gives the copy,
// d_position, d_class_token and d_bias, deterministically and without a workspace. It moves 8 or 6 B per
// element. Limit: memory bandwidth, once width / 16 blocks fill the device.
#include "kernels/cuda/vector.cuh"
#include "kernels/vit/tokens.h"

namespace gradwire::cuda {
namespace {

struct PixelPlace {
  int64_t offset = 0;  // offset of the pixel from the corner of its patch in channel 0
};

template <typename S>
struct MovePixels {
  const float* images;
  S* patches;
  int64_t channels, image, patch, grid;

  template <int W>
  __device__ __forceinline__ PixelPlace column(int64_t c) const {
    const int64_t ch = c / (patch * patch), rest = c - ch * patch * patch;
    const int64_t y = rest / patch, x = rest - y * patch;
    return {(ch * image + y) * image + x};
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const PixelPlace& p) const {
    const int64_t b = row / (grid * grid), i = row - b * grid * grid;
    const int64_t gy = i / grid, gx = i - gy * grid;
    float x[W];
    load<W>(images + (b * channels * image + gy * patch) * image + gx * patch + p.offset, x);
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
  int64_t tokens, width;

  template <int W>
  __device__ __forceinline__ TokenColumn<W> column(int64_t c) const {
    TokenColumn<W> out;
    load<W>(bias + c, out.bias);
    load<W>(class_token + c, out.class_token);
    return out;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const TokenColumn<W>& column) const {
    const int64_t b = row / tokens, t = row - b * tokens;
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

constexpr int kSliceX = 4, kSliceY = 64;

template <int W>
__device__ __forceinline__ void store_rows(float* to, const float (&from)[W]) {
  store_wide<W>(to, from);
}
// Does with eight BF16 values what store_wide() does with floats.
template <int W>
__device__ __forceinline__ void store_rows(Bf16* to, const float (&from)[W]) {
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

template <int W, typename S>
__global__ void __launch_bounds__(kSliceX* kSliceY)
    assemble_tokens_backward_kernel(AssembleTokensBackward<S> a) {
  __shared__ __align__(16) float shared[kSliceY * kSliceX * W];
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kSliceX + threadIdx.x) * W;
  const bool live = c < a.width;
  float d_bias[W] = {};
  for (int64_t t = threadIdx.y; live && t < a.tokens; t += kSliceY) {
    float sum[W] = {};
#pragma unroll 4
    for (int64_t b = 0; b < a.batch; ++b) {
      float x[W];
      load<W>(a.dx + (b * a.tokens + t) * a.width + c, x);
      if (t > 0) store_rows<W>(a.d_projected + (b * (a.tokens - 1) + t - 1) * a.width + c, x);
      add<W>(x, sum);
    }
    put<W>(a.d_position + t * a.width + c, sum, a.accumulate);
    if (t == 0) {
      put<W>(a.d_class_token + c, sum, a.accumulate);
    } else {
      add<W>(sum, d_bias);
    }
  }
  float* mine = shared + (threadIdx.y * kSliceX + threadIdx.x) * W;
  store<W>(mine, d_bias);
  __syncthreads();
  if (threadIdx.y != 0 || !live) return;
  for (int y = 1; y < kSliceY; ++y) {
    float x[W];
    load<W>(mine + y * kSliceX * W, x);
    add<W>(x, d_bias);
  }
  put<W>(a.d_bias + c, d_bias, a.accumulate);
}

}  // namespace

template <typename S>
void patchify(CudaStream stream, const Patchify<S>& a) {
  if (a.patch <= 0 || a.image < a.patch) return;
  const int64_t grid = a.image / a.patch;
  const bool vectors = a.image % 4 == 0 && takes_vectors<S>(a.patch, a.images, a.patches);
  for_columns<S>("patchify", stream, vectors,
                 MovePixels<S>{a.images, a.patches, a.channels, a.image, a.patch, grid},
                 a.batch * grid * grid, static_cast<int64_t>(a.channels) * a.patch * a.patch);
}

template <typename S>
void assemble_tokens(CudaStream stream, const AssembleTokens<S>& a) {
  for_columns<S>("assemble_tokens", stream,
                 takes_vectors<S>(a.width, a.projected, a.bias, a.class_token, a.position, a.x),
                 Assemble<S>{a.projected, a.bias, a.class_token, a.position, a.x, a.tokens, a.width},
                 a.batch * a.tokens, a.width);
}

template <typename S>
void assemble_tokens_backward(CudaStream stream, const AssembleTokensBackward<S>& a) {
  if (a.width <= 0 || a.tokens <= 0) return;
  const bool vectors =
      takes_vectors<S>(a.width, a.dx, a.d_projected, a.d_bias, a.d_class_token, a.d_position);
  const int64_t accesses = vectors ? a.width / kVector<S> : a.width;
  const LaunchConfig config{.grid = dim3(static_cast<unsigned>((accesses + kSliceX - 1) / kSliceX)),
                            .block = dim3(kSliceX, kSliceY),
                            .stream = stream};
  launch("assemble_tokens_backward",
         vectors ? assemble_tokens_backward_kernel<kVector<S>, S> : assemble_tokens_backward_kernel<1, S>,
         config, a);
}

GW_INSTANTIATE_CUDA_OP(patchify, Patchify)
GW_INSTANTIATE_CUDA_OP(assemble_tokens, AssembleTokens)
GW_INSTANTIATE_CUDA_OP(assemble_tokens_backward, AssembleTokensBackward)

}  // namespace gradwire::cuda
