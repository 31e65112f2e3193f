// bias_gelu and bias_gelu_backward by kernels/math/gelu.h: exact GELU in about 45 FP32 operations per
// element, or 20 where the result is rounded to BF16; the tanh form in 30, or 15.
//
// Forward: reads 4 B, writes 8 B per element, or without a bias 4; backward: reads 8 B, writes 4 B, and
// computes the bias gradient in the same pass; BF16 operands move half of these bytes. Limit: memory
// bandwidth (arithmetic takes about two thirds of the time).
#include <type_traits>

#include "kernels/cuda/vector.cuh"
#include "kernels/math/gelu.h"
#include "kernels/vit/bias.h"
#include "kernels/vit/gelu.h"

namespace gradwire::cuda {
namespace {

template <int W>
struct GeluBias {
  float value[W];
};

// Results that are rounded to BF16 need fewer instructions.
template <typename S>
constexpr bool kCoarse = std::is_same_v<S, Bf16>;

template <typename S, Gelu kForm>
struct Forward {
  S* x;
  const float* bias;  // null: no bias
  S* y;
  int64_t width;

  template <int W>
  __device__ __forceinline__ GeluBias<W> column(int64_t c) const {
    GeluBias<W> b{};
    if (bias != nullptr) load<W>(bias + c, b.value);
    return b;
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, const GeluBias<W>& b) const {
    const int64_t i = row * width + c;
    float pre[W], out[W];
    load<W>(x + i, pre);
    if (bias != nullptr) {
#pragma unroll
      // pre is rounded to the value that the backward pass will read
      for (int k = 0; k < W; ++k) pre[k] = widen(narrow<S>(pre[k] + b.value[k]));
      store<W>(x + i, pre);
    }
#pragma unroll
    for (int k = 0; k < W; ++k) out[k] = gelu_of(pre[k], normal_in_form<kForm, kCoarse<S>>(pre[k]));
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
};

// State per column for for_columns() in a backward pass without sums: no value depends on the column alone.
struct Nothing {};
template <typename S, Gelu kForm>
struct BackwardAlone : Backward<S, kForm> {
  template <int W>
  __device__ __forceinline__ Nothing column(int64_t) const {
    return {};
  }
  template <int W>
  __device__ __forceinline__ void at(int64_t row, int64_t c, Nothing) const {
    float unused[W];
    Backward<S, kForm>::template at<W>(row, c, unused);
  }
};

template <Gelu kForm, typename S>
void forward(CudaStream stream, const BiasGelu<S>& a) {
  for_columns<S>("bias_gelu", stream, takes_vectors<S>(a.width, a.x, a.bias, a.y),
                 Forward<S, kForm>{a.x, a.bias, a.y, a.width}, a.rows, a.width);
}

template <Gelu kForm, typename S>
void backward(CudaStream stream, const BiasGeluBackward<S>& a) {
  const bool vectors = takes_vectors<S>(a.width, a.pre, a.dy, a.d_pre, a.workspace);
  const Backward<S, kForm> op{a.pre, a.dy, a.d_pre, a.width};
  if (a.workspace == nullptr) {
    for_columns<S>("bias_gelu_backward", stream, vectors, BackwardAlone<S, kForm>{op}, a.rows, a.width);
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

GW_INSTANTIATE_CUDA_OP(bias_gelu, BiasGelu)
GW_INSTANTIATE_CUDA_OP(bias_gelu_backward, BiasGeluBackward)

}  // namespace gradwire::cuda
