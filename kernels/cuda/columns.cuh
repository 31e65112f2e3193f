// Two shapes of kernel over a (rows, width) array, with W elements per access, 16 bytes of S (the storage
// type of operands; kVector<S> of them) or 1:
//
//   for_columns       element-wise. A thread keeps its columns and walks down the rows, so values that depend
//                     on the column alone (a bias, a divided index) are computed once. Consecutive threads
//                     access consecutive memory.
//   partial_sums_over_rows  the first of two stages of per-column sums of Op's results, in fixed order
//                     (kernels/math/column_chunks.h); the second is combine_sums (kernels/vit/bias.h).
//
// Op is a small struct of pointers passed by value:
//   for_columns:    template <int W> struct Column;  template <int W> Column<W> column(int64_t c) const;
//                   template <int W> void at(int64_t row, int64_t c, const Column<W>&) const;
//   partial_sums_over_rows:  template <int W> void at(int64_t row, int64_t c, float (&out)[W]) const;
#pragma once

#include "kernels/cuda/vector.cuh"
#include "kernels/math/column_chunks.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

// Returns whether rows of `width` elements at all of the pointers, to S and floats, allow 16-byte accesses.
template <typename S, typename... Pointers>
bool takes_vectors(int64_t width, Pointers... pointers) {
  return width % kVector<S> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
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

}  // namespace gradwire::cuda
