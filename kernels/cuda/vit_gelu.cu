// bias_gelu and bias_gelu_backward: exact GELU by kernels/math/gelu.h, about 45 FP32 operations per element.
//
// Forward: reads 4 B, writes 8 B per element; backward: reads 8 B, writes 4 B, and takes the bias gradient on
// the way. Limit: memory bandwidth (arithmetic is about two thirds of what the device could do in that time).
#include "kernels/cuda/columns.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit.h"

namespace gradwire::cuda {
namespace {

template <int W>
struct Bias {
  float value[W];
};

struct Forward {
  float* x;
  const float* bias;
  float* y;
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
    float pre[W], out[W];
    load<W>(x + i, pre);
    add<W>(b.value, pre);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = gelu(pre[k]);
    store<W>(x + i, pre);
    store<W>(y + i, out);
  }
};

struct Backward {
  const float* pre;
  float* dy;
  int64_t width;

  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, float (&out)[W]) const {
    const int64_t i = row * width + c;
    float p[W];
    load<W>(pre + i, p);
    load<W>(dy + i, out);
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] *= gelu_derivative(p[k]);
    store<W>(dy + i, out);
  }
};

}  // namespace

void bias_gelu(CudaStream stream, const BiasGelu& a) {
  for_columns("bias_gelu", stream, takes_float4(a.width, a.x, a.bias, a.y),
              Forward{a.x, a.bias, a.y, a.width}, a.rows, a.width);
}

void bias_gelu_backward(CudaStream stream, const BiasGeluBackward& a) {
  sum_over_rows("bias_gelu_backward", stream, takes_float4(a.width, a.pre, a.dy, a.workspace),
                Backward{a.pre, a.dy, a.width}, a.rows, a.width, a.workspace, a.accumulate, a.d_bias);
}

}  // namespace gradwire::cuda
