// Scalar reference of the formulas in attention.h, with every sum in double.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/vit/attention.h"
#include "kernels/vit/reference.h"

namespace gradwire::reference {
namespace {

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
  // Returns the scaled scores of a token's query with all keys.
  std::vector<double> scores(int64_t token) const {
    std::vector<double> out(static_cast<size_t>(a.tokens));
    for (int64_t key = 0; key < a.tokens; ++key) {
      double dot = 0.0;
      for (int64_t d = 0; d < a.head_dim; ++d)
        dot += static_cast<double>(widen(a.qkv[of_qkv(token, 0, d)])) * widen(a.qkv[of_qkv(key, 1, d)]);
      out[static_cast<size_t>(key)] = dot / std::sqrt(static_cast<double>(a.head_dim));
    }
    return out;
  }
  // Returns the softmax of the scores; sets `greatest` to the largest score and `sum` to the sum of the
  // exponentials.
  std::vector<double> weights(int64_t token, double& greatest, double& sum) const {
    std::vector<double> out = scores(token);
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

}  // namespace gradwire::reference
