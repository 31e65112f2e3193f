// Scalar reference of the formulas in tokens.h, with every sum in double.
#include "kernels/vit/reference.h"
#include "kernels/vit/tokens.h"

namespace gradwire::reference {

template <typename S>
void patchify(const Patchify<S>& a) {
  if (a.patch <= 0) return;
  const int64_t p = a.patch, grid = a.image / p;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t i = 0; i < grid * grid; ++i) {
      for (int64_t ch = 0; ch < a.channels; ++ch) {
        for (int64_t y = 0; y < p; ++y) {
          for (int64_t x = 0; x < p; ++x) {
            a.patches[(b * grid * grid + i) * a.channels * p * p + ch * p * p + y * p + x] =
                narrow<S>(a.images[((b * a.channels + ch) * a.image + (i / grid) * p + y) * a.image +
                                   (i % grid) * p + x]);
          }
        }
      }
    }
  }
}

template <typename S>
void assemble_tokens(const AssembleTokens<S>& a) {
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t c = 0; c < a.width; ++c) {
        double v = t == 0
                       ? static_cast<double>(a.class_token[c])
                       : static_cast<double>(widen(a.projected[(b * (a.tokens - 1) + t - 1) * a.width + c])) +
                             a.bias[c];
        a.x[(b * a.tokens + t) * a.width + c] = static_cast<float>(v + a.position[t * a.width + c]);
      }
    }
  }
}

template <typename S>
void assemble_tokens_backward(const AssembleTokensBackward<S>& a) {
  if (a.tokens == 0) return;
  auto dx = [&](int64_t b, int64_t t, int64_t c) { return a.dx[(b * a.tokens + t) * a.width + c]; };
  for (int64_t c = 0; c < a.width; ++c) {
    double d_bias = 0.0;
    for (int64_t t = 0; t < a.tokens; ++t) {
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b) {
        sum += dx(b, t, c);
        if (t > 0) a.d_projected[(b * (a.tokens - 1) + t - 1) * a.width + c] = narrow<S>(dx(b, t, c));
      }
      store_sum(&a.d_position[t * a.width + c], sum, a.accumulate);
      if (t == 0) store_sum(&a.d_class_token[c], sum, a.accumulate);
      if (t > 0) d_bias += sum;
    }
    store_sum(&a.d_bias[c], d_bias, a.accumulate);
  }
}

GW_INSTANTIATE_OP(patchify, Patchify)
GW_INSTANTIATE_OP(assemble_tokens, AssembleTokens)
GW_INSTANTIATE_OP(assemble_tokens_backward, AssembleTokensBackward)

}  // namespace gradwire::reference
