// Scalar references of the formulas in this folder's headers, with every sum in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/simd/vector.h"
#include "kernels/vit/vit.h"

namespace gradwire::reference {
namespace {

template <typename S>
S rounded(double x) {
  return narrow<S>(static_cast<float>(x));
}

void store_sum(float* out, double sum, bool accumulate) {
  *out = static_cast<float>((accumulate ? static_cast<double>(*out) : 0.0) + sum);
}

// Calls move(element of the rows, its column, element of its part).
template <typename S, typename Move>
void each_element(const Heads<S>& a, const Move& move) {
  const int64_t width = a.heads * a.head_dim;
  for (int64_t row = 0; row < a.batch * a.tokens; ++row) {
    for (int64_t i = 0; i < a.width(); ++i) {
      const int64_t b = row / a.tokens, t = row % a.tokens, h = i % width / a.head_dim;
      move(a.rows[row * a.width() + i], i,
           a.parts[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + i % a.head_dim]);
    }
  }
}

constexpr double kPi = 3.14159265358979323846;

double phi_cdf(double x, Gelu form) {
  // The tanh form is (1 + tanh(u)) / 2, computed without cancellation.
  const double u = std::sqrt(2.0 / kPi) * (x + 0.044715 * x * x * x);
  if (form == Gelu::tanh) return 1.0 / (1.0 + std::exp(-2.0 * u));
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double phi_density(double x, Gelu form) {
  if (form == Gelu::tanh) {
    const double slope = std::sqrt(2.0 / kPi) * (1.0 + 3.0 * 0.044715 * x * x);
    return 2.0 * slope * phi_cdf(x, form) * phi_cdf(-x, form);
  }
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * kPi);
}

// One head of one image; parts 0, 1 and 2 are Q, K and V.
template <typename Args>
struct Head {
  const Args& a;
  int64_t image, head;

  int64_t width() const { return a.heads * a.head_dim; }
  int64_t of_qkv(int64_t token, int64_t part, int64_t d) const {
    return ((image * a.tokens + token) * 3 + part) * width() + head * a.head_dim + d;
  }
  int64_t of_merged(int64_t token, int64_t d) const {
    return (image * a.tokens + token) * width() + head * a.head_dim + d;
  }
  float* statistics(float* all, int64_t token) const {
    return all + 2 * ((image * a.heads + head) * a.tokens + token);
  }
  // Returns the softmax of the scaled scores of a token's query with all keys; sets `greatest` to the largest
  // score and `sum` to the sum of the exponentials.
  std::vector<double> weights(int64_t token, double& greatest, double& sum) const {
    std::vector<double> out(static_cast<size_t>(a.tokens));
    for (int64_t key = 0; key < a.tokens; ++key) {
      double dot = 0.0;
      for (int64_t d = 0; d < a.head_dim; ++d)
        dot += static_cast<double>(widen(a.qkv[of_qkv(token, 0, d)])) * widen(a.qkv[of_qkv(key, 1, d)]);
      out[static_cast<size_t>(key)] = dot / std::sqrt(static_cast<double>(a.head_dim));
    }
    greatest = *std::max_element(out.begin(), out.end());
    sum = 0.0;
    for (double& x : out) sum += x = std::exp(x - greatest);
    for (double& x : out) x /= sum;
    return out;
  }
};

template <typename Args, typename Call>
void for_heads(const Args& a, const Call& call) {
  for (int64_t image = 0; image < a.batch; ++image) {
    for (int64_t head = 0; head < a.heads; ++head) call(Head<Args>{a, image, head});
  }
}

}  // namespace

template <typename S>
void split_heads(const Heads<S>& a) {
  each_element(
      a, [&](S in, int64_t i, S& out) { out = a.bias != nullptr ? narrow<S>(widen(in) + a.bias[i]) : in; });
}

template <typename S>
void merge_heads(const Heads<S>& a) {
  each_element(a, [](S& out, int64_t, S in) { out = in; });
}

template <typename S>
void column_sum(const ColumnSum<S>& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) sum += widen(a.x[r * a.width + c]);
    store_sum(&a.sum[c], sum, a.accumulate);
  }
}

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

template <typename S>
void bias_gelu(const BiasGelu<S>& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
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
        a.sum[r * stride + c] = x[c] + (widen(a.branch[r * stride + c]) + a.branch_bias[c]);
      }
      x = a.sum + r * stride;
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
  std::vector<double> d_gamma(static_cast<size_t>(a.width)), d_beta(static_cast<size_t>(a.width)),
      dx_sum(static_cast<size_t>(a.width));
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
      dx_sum[static_cast<size_t>(c)] += dx[c];
      if (a.dx_rounded != nullptr) a.dx_rounded[r * stride + c] = narrow<S>(dx[c]);
    }
  }
  for (int64_t c = 0; c < a.width; ++c) {
    store_sum(&a.d_gamma[c], d_gamma[static_cast<size_t>(c)], a.accumulate);
    store_sum(&a.d_beta[c], d_beta[static_cast<size_t>(c)], a.accumulate);
    if (a.dx_sum != nullptr) store_sum(&a.dx_sum[c], dx_sum[static_cast<size_t>(c)], a.accumulate);
  }
}

GW_INSTANTIATE_OP(layer_norm, LayerNorm)
GW_INSTANTIATE_OP(layer_norm_backward, LayerNormBackward)

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

GW_INSTANTIATE_OP(softmax, Softmax)
GW_INSTANTIATE_OP(softmax_backward, SoftmaxBackward)

template <typename S>
void cross_entropy(const CrossEntropy<S>& a) {
  if (!a.accumulate) a.totals[0] = a.totals[1] = 0.0;
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

GW_INSTANTIATE_OP(cross_entropy, CrossEntropy)

template <typename S>
void attention(const Attention<S>& a) {
  for_heads(a, [&](const Head<Attention<S>>& at) {
    for (int64_t query = 0; query < a.tokens; ++query) {
      double greatest = 0.0, sum = 0.0;
      const std::vector<double> weights = at.weights(query, greatest, sum);
      for (int64_t d = 0; d < a.head_dim; ++d) {
        double out = 0.0;
        for (int64_t key = 0; key < a.tokens; ++key)
          out += weights[static_cast<size_t>(key)] * widen(a.qkv[at.of_qkv(key, 2, d)]);
        a.merged[at.of_merged(query, d)] = rounded<S>(out);
      }
      if (a.statistics == nullptr) continue;
      at.statistics(a.statistics, query)[0] = static_cast<float>(greatest);
      at.statistics(a.statistics, query)[1] = static_cast<float>(1.0 / sum);
    }
  });
}

template <typename S>
void attention_backward(const AttentionBackward<S>& a) {
  const int64_t width = a.heads * a.head_dim, rows = a.batch * a.tokens;
  std::vector<double> d_qkv(static_cast<size_t>(rows * 3 * width));
  for_heads(a, [&](const Head<AttentionBackward<S>>& at) {
    auto gradient = [&](int64_t token, int64_t part, int64_t d) -> double& {
      return d_qkv[static_cast<size_t>(at.of_qkv(token, part, d))];
    };
    const double scale = 1.0 / std::sqrt(static_cast<double>(a.head_dim));
    for (int64_t query = 0; query < a.tokens; ++query) {
      double greatest = 0.0, sum = 0.0, dot = 0.0;
      const std::vector<double> weights = at.weights(query, greatest, sum);
      std::vector<double> d_weights(weights.size());
      for (int64_t key = 0; key < a.tokens; ++key) {
        const auto k = static_cast<size_t>(key);
        for (int64_t d = 0; d < a.head_dim; ++d) {
          const double d_out = widen(a.d_merged[at.of_merged(query, d)]);
          d_weights[k] += d_out * widen(a.qkv[at.of_qkv(key, 2, d)]);
          gradient(key, 2, d) += weights[k] * d_out;
        }
        dot += weights[k] * d_weights[k];
      }
      for (int64_t key = 0; key < a.tokens; ++key) {
        const auto k = static_cast<size_t>(key);
        const double d_score = scale * weights[k] * (d_weights[k] - dot);
        for (int64_t d = 0; d < a.head_dim; ++d) {
          gradient(query, 0, d) += d_score * widen(a.qkv[at.of_qkv(key, 1, d)]);
          gradient(key, 1, d) += d_score * widen(a.qkv[at.of_qkv(query, 0, d)]);
        }
      }
    }
  });
  for (int64_t c = 0; c < 3 * width; ++c) {
    double sum = 0.0;
    for (int64_t row = 0; row < rows; ++row) sum += d_qkv[static_cast<size_t>(row * 3 * width + c)];
    store_sum(a.d_bias + c, sum, a.accumulate);
  }
  for (size_t i = 0; i < d_qkv.size(); ++i) a.d_qkv[i] = rounded<S>(d_qkv[i]);
}

GW_INSTANTIATE_OP(attention, Attention)
GW_INSTANTIATE_OP(attention_backward, AttentionBackward)

GW_ELEMENTWISE_OPS(GW_INSTANTIATE_OP)

}  // namespace gradwire::reference

// Attention on the host, for tests: models use products and softmax there, which are faster.
namespace gradwire::host {

template <typename S>
void attention(const Attention<S>& a) {
  reference::attention(a);
}

template <typename S>
void attention_backward(const AttentionBackward<S>& a) {
  AttentionBackward<S> whole = a;  // its sums are the first row of partial sums, and the other rows zero
  std::fill_n(a.workspace, attention_backward_workspace(a.batch, a.tokens, a.heads * a.head_dim), 0.0f);
  whole.d_bias = a.workspace, whole.accumulate = false;
  if (a.batch > 0) reference::attention_backward(whole);
  if (!a.partial_only) combine_partial_sums(a.sums());
}

GW_INSTANTIATE_OP(attention, Attention)
GW_INSTANTIATE_OP(attention_backward, AttentionBackward)

}  // namespace gradwire::host
