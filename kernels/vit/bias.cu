// column_sum and bias_residual.
//
// column_sum reads each element once (FP32 4 B, BF16 2 B), in 16-byte accesses. The partial sums are at most
// a sixteenth of these bytes. bias_residual reads 8 B (FP32) or 6 B (BF16) and writes 4 B per element. Limit:
// memory bandwidth. Deterministic: sums in fixed order.
#include <tuple>

#include "kernels/cuda/vector.cuh"
#include "kernels/vit/bias.h"

namespace gradwire::cuda {
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

template <int W>
struct Bias {
  float value[W];
};

template <typename S>
struct AddBiasResidual {
  const S* y;
  const float *bias, *residual;
  float* x;
  int64_t width;

  template <int W>
  __device__ __forceinline__ Bias<W> column(int64_t c) const {
    Bias<W> b;
    load<W>(bias + c, b.value);
    return b;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const Bias<W>& b) const {
    const int64_t i = row * width + c;
    float out[W];
    load<W>(y + i, out);
    add<W>(b.value, out);
    if (residual != nullptr) {
      float old[W];
      load<W>(residual + i, old);
      add<W>(old, out);
    }
    store<W>(x + i, out);
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

template <typename S>
void bias_residual(CudaStream stream, const BiasResidual<S>& a) {
  for_columns<S>("bias_residual", stream, takes_vectors<S>(a.width, a.y, a.bias, a.residual, a.x),
                 AddBiasResidual<S>{a.y, a.bias, a.residual, a.x, a.width}, a.rows, a.width);
}

GW_INSTANTIATE_CUDA_OP(column_sum, ColumnSum)
GW_INSTANTIATE_CUDA_OP(bias_residual, BiasResidual)

}  // namespace gradwire::cuda
