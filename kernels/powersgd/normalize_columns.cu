// Normalizes 32 columns of a matrix per block; eight groups of threads sum rows at a fixed stride.
#include "kernels/powersgd/normalize_columns.h"
#include "kernels/powersgd/powersgd.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kGroups = 8;

__global__ void __launch_bounds__(kColumns* kGroups)
    normalize_columns_kernel(const MatrixDescriptor* matrices, float* q_array, float* basis_array,
                             const int32_t* flags, bool orthonormal) {
  __shared__ double squares[kGroups * kColumns];
  if (flags[blockIdx.y] != 0) return;
  const MatrixDescriptor d = matrices[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % kColumns, group = static_cast<int>(threadIdx.x) / kColumns;
  const int k = static_cast<int>(blockIdx.x) * kColumns + lane;
  float *q = q_array + d.q_offset + k, *basis = basis_array + d.q_offset + k;
  double sum = 0.0;
  for (int64_t row = group; k < d.rank && row < d.cols; row += kGroups) {
    const double x = q[row * d.rank];
    sum = fma(x, x, sum);
  }
  squares[group * kColumns + lane] = sum;
  __syncthreads();
  sum = 0.0;
  for (int g = 0; g < kGroups; ++g) sum += squares[g * kColumns + lane];
  // Of R or, with `orthonormal`, of Q.
  const float scale = !orthonormal ? column_scale(sum) : sum > 0 ? 1.0f : 0.0f;
  const float shape = shape_scale(d.rows, d.cols);
  for (int64_t row = group; k < d.rank && row < d.cols; row += kGroups) {
    const float x = (orthonormal ? basis : q)[row * d.rank] * scale;
    if (!orthonormal) basis[row * d.rank] = x;
    q[row * d.rank] = shape * x;
  }
}

}  // namespace

void normalize_columns(CudaStream stream, const NormalizeColumns& a) {
  const auto blocks = static_cast<unsigned>((a.table->max_rank() + kColumns - 1) / kColumns);
  launch("normalize_columns", normalize_columns_kernel,
         {.grid = dim3(blocks, static_cast<unsigned>(a.table->count())),
          .block = dim3(kColumns * kGroups),
          .stream = stream},
         a.table->device(), a.q, a.basis, a.flags, a.orthonormal);
}

}  // namespace gradwire::cuda
