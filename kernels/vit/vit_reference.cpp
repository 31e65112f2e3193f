// The ViT's elementwise and reduction ops, scalar and with every sum in double: what the formulas in vit.h
// say.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/vit/vit.h"

namespace gradwire::reference {

namespace {

double phi_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double phi_density(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * 3.14159265358979323846);
}

template <typename S>
S rounded(double x) {
  return narrow<S>(static_cast<float>(x));
}

void store_sum(float* out, double sum, bool accumulate) {
  *out = static_cast<float>((accumulate ? static_cast<double>(*out) : 0.0) + sum);
}

}  // namespace

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

template <typename S>
void layer_norm(const LayerNorm<S>& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * stride;
    if (a.branch != nullptr) {
      for (int64_t c = 0; c < a.width; ++c) {
        a.sum[r * a.width + c] = x[c] + (widen(a.branch[r * a.width + c]) + a.branch_bias[c]);
      }
      x = a.sum + r * a.width;
    }
    double mean = 0.0, variance = 0.0;
    for (int64_t c = 0; c < a.width; ++c) mean += x[c];
    mean /= static_cast<double>(a.width);
    for (int64_t c = 0; c < a.width; ++c) variance += (x[c] - mean) * (x[c] - mean);
    variance /= static_cast<double>(a.width);
    double rstd = 1.0 / std::sqrt(variance + a.eps);
    for (int64_t c = 0; c < a.width; ++c) {
      a.y[r * a.width + c] = rounded<S>((x[c] - mean) * rstd * a.gamma[c] + a.beta[c]);
    }
    a.mean[r] = static_cast<float>(mean);
    a.rstd[r] = static_cast<float>(rstd);
  }
}

template <typename S>
void layer_norm_backward(const LayerNormBackward<S>& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  std::vector<double> d_gamma(static_cast<size_t>(a.width)), d_beta(static_cast<size_t>(a.width));
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * stride;
    const S* dy = a.dy + r * a.width;
    float* dx = a.dx + r * stride;
    double mean = a.mean[r], rstd = a.rstd[r], sum = 0.0, sum_normalized = 0.0;
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(widen(dy[c])) * a.gamma[c];
      sum += g;
      sum_normalized += g * normalized;
      d_gamma[static_cast<size_t>(c)] += widen(dy[c]) * normalized;
      d_beta[static_cast<size_t>(c)] += widen(dy[c]);
    }
    sum /= static_cast<double>(a.width);
    sum_normalized /= static_cast<double>(a.width);
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(widen(dy[c])) * a.gamma[c];
      store_sum(&dx[c], rstd * (g - sum - normalized * sum_normalized), a.accumulate_dx);
      if (a.dx_rounded != nullptr) a.dx_rounded[r * stride + c] = narrow<S>(dx[c]);
    }
  }
  for (int64_t c = 0; c < a.width; ++c) {
    store_sum(&a.d_gamma[c], d_gamma[static_cast<size_t>(c)], a.accumulate);
    store_sum(&a.d_beta[c], d_beta[static_cast<size_t>(c)], a.accumulate);
  }
}

template <typename S>
void softmax(const Softmax<S>& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * a.ld;
    S* y = a.y + r * a.ld;
    const double scale = a.scale;
    double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int64_t c = 0; c < a.width; ++c) highest = std::max(highest, scale * x[c]);
    for (int64_t c = 0; c < a.width; ++c) sum += std::exp(scale * x[c] - highest);
    for (int64_t c = 0; c < a.width; ++c) y[c] = rounded<S>(std::exp(scale * x[c] - highest) / sum);
    for (int64_t c = a.width; c < a.ld; ++c) y[c] = narrow<S>(0.0f);
  }
}

template <typename S>
void softmax_backward(const SoftmaxBackward<S>& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const S* y = a.y + r * a.ld;
    S* dy = a.dy + r * a.ld;
    double dot = 0.0;
    for (int64_t c = 0; c < a.width; ++c) dot += static_cast<double>(widen(y[c])) * widen(dy[c]);
    for (int64_t c = 0; c < a.width; ++c) dy[c] = rounded<S>(a.scale * widen(y[c]) * (widen(dy[c]) - dot));
    for (int64_t c = a.width; c < a.ld; ++c) dy[c] = narrow<S>(0.0f);
  }
}

template <typename S>
void bias_gelu(const BiasGelu<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    if (a.bias != nullptr) a.x[i] = narrow<S>(widen(a.x[i]) + a.bias[i % a.width]);
    const float pre = widen(a.x[i]);
    a.y[i] = rounded<S>(pre * phi_cdf(pre));
  }
}

template <typename S>
void bias_gelu_backward(const BiasGeluBackward<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) {
      double pre = widen(a.pre[r * a.width + c]);
      S& d = a.dy[r * a.width + c];
      double dx = widen(d) * (phi_cdf(pre) + pre * phi_density(pre));
      sum += dx;
      d = rounded<S>(dx);
    }
    store_sum(&a.d_bias[c], sum, a.accumulate);
  }
}

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

template <typename S>
void cross_entropy(const CrossEntropy<S>& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.logits + r * a.classes;
    const int64_t label = a.labels[r];
    if (label < 0 || label >= a.classes) {
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      a.totals[0] += kNan;
      if (a.d_logits != nullptr) std::fill_n(a.d_logits + r * a.classes, a.classes, narrow<S>(kNan));
      continue;
    }
    double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int64_t c = 0; c < a.classes; ++c) highest = std::max<double>(highest, x[c]);
    for (int64_t c = 0; c < a.classes; ++c) sum += std::exp(x[c] - highest);
    bool right = !std::isnan(sum);
    for (int64_t c = 0; c < a.classes; ++c) {
      if (c != label && (c < label ? x[c] >= x[label] : x[c] > x[label])) right = false;
    }
    a.totals[0] += std::log(sum) + highest - x[label];
    a.totals[1] += right ? 1.0 : 0.0;
    if (a.d_logits == nullptr) continue;
    for (int64_t c = 0; c < a.classes; ++c) {
      double p = std::exp(x[c] - highest) / sum;
      a.d_logits[r * a.classes + c] = rounded<S>(a.grad_scale * (p - (c == label ? 1.0 : 0.0)));
    }
  }
}

GW_INSTANTIATE_OP(patchify, Patchify)
GW_INSTANTIATE_OP(assemble_tokens, AssembleTokens)
GW_INSTANTIATE_OP(assemble_tokens_backward, AssembleTokensBackward)
GW_INSTANTIATE_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_OP(layer_norm_backward, LayerNormBackward)
GW_INSTANTIATE_OP(softmax, Softmax)
GW_INSTANTIATE_OP(softmax_backward, SoftmaxBackward)
GW_INSTANTIATE_OP(bias_gelu, BiasGelu)
GW_INSTANTIATE_OP(bias_gelu_backward, BiasGeluBackward)
GW_INSTANTIATE_OP(bias_residual, BiasResidual)
GW_INSTANTIATE_OP(column_sum, ColumnSum)
GW_INSTANTIATE_OP(split_heads, SplitHeads)
GW_INSTANTIATE_OP(split_heads_backward, SplitHeadsBackward)
GW_INSTANTIATE_OP(merge_heads, MergeHeads)
GW_INSTANTIATE_OP(cross_entropy, CrossEntropy)

}  // namespace gradwire::reference
