// Scalar reference of the formulas in elementwise.h, with every sum in double.
#include <cmath>

#include "kernels/vit/elementwise.h"
#include "kernels/vit/reference.h"

namespace gradwire::reference {

template <typename S>
void split_heads(const SplitHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  S* outputs[3] = {a.q, a.k, a.v};
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t i = 0; i < 3 * width; ++i) {
        int64_t c = i % width, h = c / a.head_dim, d = c % a.head_dim;
        outputs[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + d] = narrow<S>(
            widen(a.qkv[(b * a.tokens + t) * 3 * width + i]) + (a.bias != nullptr ? a.bias[i] : 0.0f));
      }
    }
  }
}

template <typename S>
void split_heads_backward(const SplitHeadsBackward<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  const S* inputs[3] = {a.dq, a.dk, a.dv};
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t i = 0; i < 3 * width; ++i) {
        int64_t c = i % width, h = c / a.head_dim, d = c % a.head_dim;
        a.d_qkv[(b * a.tokens + t) * 3 * width + i] =
            inputs[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + d];
      }
    }
  }
}

template <typename S>
void merge_heads(const MergeHeads<S>& a) {
  const int64_t width = a.heads * a.head_dim;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        int64_t split = ((b * a.heads + c / a.head_dim) * a.tokens + t) * a.head_dim + c % a.head_dim;
        int64_t merged = (b * a.tokens + t) * width + c;
        if (a.inverse) {
          a.out[split] = a.in[merged];
        } else {
          a.out[merged] = a.in[split];
        }
      }
    }
  }
}

GW_INSTANTIATE_OP(split_heads, SplitHeads)
GW_INSTANTIATE_OP(split_heads_backward, SplitHeadsBackward)
GW_INSTANTIATE_OP(merge_heads, MergeHeads)

// Scalar reference of the formulas in elementwise.h, with every sum in double.

template <typename S>
void bias_residual(const BiasResidual<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    double old = a.residual != nullptr ? a.residual[i] : 0.0;
    a.x[i] = static_cast<float>(old + widen(a.y[i]) + a.bias[i % a.width]);
  }
}

template <typename S>
void column_sum(const ColumnSum<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) sum += widen(a.x[r * a.width + c]);
    store_sum(&a.sum[c], sum, a.accumulate);
  }
}

GW_INSTANTIATE_OP(bias_residual, BiasResidual)
void combine_sums(const CombineSums& a) {
  for (const PartialSums& of : a.of) {
    for (size_t i = 0; i < of.sums.size(); ++i) {
      if (of.sums[i] == nullptr) continue;
      for (int64_t c = 0; c < of.width; ++c) {
        double sum = 0.0;
        for (int64_t row = 0; row < of.count; ++row) {
          const int64_t at = row * of.pitch + static_cast<int64_t>(i) * of.width + c;
          sum += of.partial_bf16 != nullptr ? widen(of.partial_bf16[at]) : of.partial[at];
        }
        store_sum(of.sums[i] + c, sum, of.accumulate);
      }
    }
  }
}

GW_INSTANTIATE_OP(column_sum, ColumnSum)

// Scalar reference of the formulas in gelu.h, with every sum in double.

namespace {

constexpr double kPi = 3.14159265358979323846;

// Returns the argument of the tanh form: Phi is (1 + tanh(u)) / 2, computed without cancellation.
double tanh_argument(double x) {
  return std::sqrt(2.0 / kPi) * (x + 0.044715 * x * x * x);
}
double phi_cdf(double x, Gelu form) {
  if (form == Gelu::tanh) return 1.0 / (1.0 + std::exp(-2.0 * tanh_argument(x)));
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double phi_density(double x, Gelu form) {
  if (form == Gelu::tanh) {
    const double slope = std::sqrt(2.0 / kPi) * (1.0 + 3.0 * 0.044715 * x * x);
    return 2.0 * slope * phi_cdf(x, form) * phi_cdf(-x, form);
  }
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * kPi);
}

}  // namespace

template <typename S>
void bias_gelu(const BiasGelu<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    if (a.bias != nullptr) a.x[i] = narrow<S>(widen(a.x[i]) + a.bias[i % a.width]);
    const float pre = widen(a.x[i]);
    a.y[i] = rounded<S>(pre * phi_cdf(pre, a.form));
  }
}

template <typename S>
void bias_gelu_backward(const BiasGeluBackward<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) {
      const int64_t at = r * a.width + c;
      const double pre = widen(a.pre[at]);
      const double dx = widen(a.dy[at]) * (phi_cdf(pre, a.form) + pre * phi_density(pre, a.form));
      sum += dx;
      a.d_pre[at] = rounded<S>(dx);
    }
    if (a.d_bias != nullptr) store_sum(&a.d_bias[c], sum, a.accumulate);
  }
}

GW_INSTANTIATE_OP(bias_gelu, BiasGelu)
GW_INSTANTIATE_OP(bias_gelu_backward, BiasGeluBackward)

// Scalar reference of the formulas in elementwise.h, with every sum in double.

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
