// Host bias_gelu and bias_gelu_backward.
#include "kernels/math/gelu.h"
#include "kernels/simd/vector.h"
#include "kernels/vit/gelu.h"

GW_ALLOW_FMA

namespace gradwire::host {
namespace {

template <Gelu kForm>
GW_INLINE float gelu(float x) {
  return gelu_of(x, normal_in_form<kForm>(x));
}
template <Gelu kForm>
GW_INLINE float gelu_derivative(float x) {
  return gelu_derivative_of(x, normal_in_form<kForm>(x));
}

template <Gelu kForm, typename S>
GW_INLINE void forward_rows_of(const BiasGelu<S>& a, int64_t begin, int64_t end) {
  const float* bias = a.bias;
  for (int64_t r = begin; r < end; ++r) {
    S *x = a.x + r * a.width, *y = a.y + r * a.width;
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < a.width; ++c) y[c] = narrow<S>(gelu<kForm>(widen(x[c])));
      continue;
    }
#pragma omp simd
    for (int64_t c = 0; c < a.width; ++c) {
      const S pre = narrow<S>(widen(x[c]) + bias[c]);
      x[c] = pre;
      y[c] = narrow<S>(gelu<kForm>(widen(pre)));
    }
  }
}

template <Gelu kForm, typename S>
GW_INLINE void backward_rows_of(const BiasGeluBackward<S>& a, int64_t begin, int64_t end, float* d_bias) {
  for (int64_t r = begin; r < end; ++r) {
    const S *pre = a.pre + r * a.width, *dy = a.dy + r * a.width;
    S* d_pre = a.d_pre + r * a.width;
    if (d_bias == nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < a.width; ++c)
        d_pre[c] = narrow<S>(widen(dy[c]) * gelu_derivative<kForm>(widen(pre[c])));
      continue;
    }
#pragma omp simd
    for (int64_t c = 0; c < a.width; ++c) {
      float d = widen(dy[c]) * gelu_derivative<kForm>(widen(pre[c]));
      d_pre[c] = narrow<S>(d);
      d_bias[c] += d;
    }
  }
}

// Computes either form of GELU, so that the code is compiled once per instruction set.
template <typename S>
GW_INLINE void forward_rows_in_form(const BiasGelu<S>& a, int64_t begin, int64_t end) {
  if (a.form == Gelu::tanh) return forward_rows_of<Gelu::tanh>(a, begin, end);
  forward_rows_of<Gelu::exact>(a, begin, end);
}
template <typename S>
GW_INLINE void backward_rows_in_form(const BiasGeluBackward<S>& a, int64_t begin, int64_t end,
                                     float* d_bias) {
  if (a.form == Gelu::tanh) return backward_rows_of<Gelu::tanh>(a, begin, end, d_bias);
  backward_rows_of<Gelu::exact>(a, begin, end, d_bias);
}

GW_SIMD void forward_rows(const BiasGelu<float>& a, int64_t begin, int64_t end) {
  forward_rows_in_form(a, begin, end);
}
GW_SIMD void forward_rows(const BiasGelu<Bf16>& a, int64_t begin, int64_t end) {
  forward_rows_in_form(a, begin, end);
}
GW_SIMD void backward_rows(const BiasGeluBackward<float>& a, int64_t begin, int64_t end, float* d_bias) {
  backward_rows_in_form(a, begin, end, d_bias);
}
GW_SIMD void backward_rows(const BiasGeluBackward<Bf16>& a, int64_t begin, int64_t end, float* d_bias) {
  backward_rows_in_form(a, begin, end, d_bias);
}

}  // namespace

template <typename S>
void bias_gelu(const BiasGelu<S>& a) {
  for_rows(a.rows, a.width, [&](int64_t begin, int64_t end) { forward_rows(a, begin, end); });
}

template <typename S>
void bias_gelu_backward(const BiasGeluBackward<S>& a) {
  if (a.workspace == nullptr) {
    return for_rows(a.rows, a.width,
                    [&](int64_t begin, int64_t end) { backward_rows(a, begin, end, nullptr); });
  }
  sum_chunks(a.rows, a.width, a.workspace,
             [&](int64_t begin, int64_t end, float* d_bias) { backward_rows(a, begin, end, d_bias); });
  if (!a.partial_only) combine_partial_sums(a.sums());
}

GW_INSTANTIATE_OP(bias_gelu, BiasGelu)
GW_INSTANTIATE_OP(bias_gelu_backward, BiasGeluBackward)

}  // namespace gradwire::host
