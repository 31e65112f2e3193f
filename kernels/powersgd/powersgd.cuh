// Shared by the three PowerSGD kernels: finding a block's matrix, and four-column accesses.
//
// A thread owns four columns of a row. In an aligned matrix the four columns are adjacent and take one
// 16-byte access. Otherwise they are `spread` columns apart, so that each of a warp's four 4-byte accesses is
// contiguous.
#pragma once

#include <algorithm>
#include <cfloat>

#include "kernels/math/small_float.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

struct Matrices {
  const MatrixDescriptor* descriptors;
  const MatrixBlocks* starts;  // count + 1
  int count;
};

inline Matrices matrices_of(const MatrixTable& table) {
  return {table.device(), table.blocks(), table.count()};
}

// Returns the matrix of `block`. All threads of the block call it; `found` is shared; ends with a barrier.
__device__ __forceinline__ int find_matrix(const Matrices& matrices, int32_t MatrixBlocks::*first,
                                           int32_t block, int* found) {
  for (int m = static_cast<int>(threadIdx.x); m < matrices.count; m += static_cast<int>(blockDim.x)) {
    if (matrices.starts[m].*first <= block && block < matrices.starts[m + 1].*first) *found = m;
  }
  __syncthreads();
  return *found;
}

__device__ __forceinline__ bool aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

// A thread's columns within a strip of 4 * spread columns.
template <bool kVector>
struct Quad {
  int spread, index;  // index in 0 .. spread - 1
  __device__ __forceinline__ int column(int c) const { return kVector ? 4 * index + c : index + c * spread; }

  // Loads the strip's columns at `row`; columns from `limit` on are 0. With kVector, limit is a multiple of
  // 4.
  __device__ __forceinline__ void load(const float* row, int limit, float (&x)[4]) const {
    if constexpr (kVector) {
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (4 * index < limit) v = *reinterpret_cast<const float4*>(row + 4 * index);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = column(c) < limit ? row[column(c)] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(float* row, int limit, const float (&x)[4]) const {
    if constexpr (kVector) {
      if (4 * index < limit)
        *reinterpret_cast<float4*>(row + 4 * index) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column(c) < limit) row[column(c)] = x[c];
      }
    }
  }
};

__device__ __forceinline__ bool is_pending(const PendingFactors& pending, int matrix) {
  return pending.p != nullptr && (pending.flags == nullptr || pending.flags[matrix] == 0);
}

// Replaces E in `m` by M. `keep` is the value for the residual: E where the gradient is not finite, the
// largest float where only the sum is not finite.
__device__ __forceinline__ void add_gradient(const float (&gradient)[4], float (&m)[4], float (&keep)[4]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float e = m[c], sum = gradient[c] + e;
    keep[c] = is_finite(gradient[c]) ? fminf(fmaxf(sum, -FLT_MAX), FLT_MAX) : e;
    m[c] = sum;
  }
}

}  // namespace gradwire::cuda
