// The ViT's elementwise and reduction ops, scalar and with every sum in double: what the formulas in vit.h
// say.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/vit.h"

namespace gradwire::reference {

namespace {

double phi_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}
double phi_density(double x) {
  return std::exp(-0.5 * x * x) / std::sqrt(2.0 * 3.14159265358979323846);
}

void store_sum(float* out, double sum, bool accumulate) {
  *out = static_cast<float>((accumulate ? static_cast<double>(*out) : 0.0) + sum);
}

}  // namespace

void patchify(const Patchify& a) {
  if (a.patch <= 0) return;
  const int64_t p = a.patch, grid = a.image / p;
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t i = 0; i < grid * grid; ++i) {
      for (int64_t ch = 0; ch < a.channels; ++ch) {
        for (int64_t y = 0; y < p; ++y) {
          for (int64_t x = 0; x < p; ++x) {
            a.patches[(b * grid * grid + i) * a.channels * p * p + ch * p * p + y * p + x] =
                a.images[((b * a.channels + ch) * a.image + (i / grid) * p + y) * a.image + (i % grid) * p +
                         x];
          }
        }
      }
    }
  }
}

void assemble_tokens(const AssembleTokens& a) {
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t c = 0; c < a.width; ++c) {
        double v =
            t == 0 ? static_cast<double>(a.class_token[c])
                   : static_cast<double>(a.projected[(b * (a.tokens - 1) + t - 1) * a.width + c]) + a.bias[c];
        a.x[(b * a.tokens + t) * a.width + c] = static_cast<float>(v + a.position[t * a.width + c]);
      }
    }
  }
}

void assemble_tokens_backward(const AssembleTokensBackward& a) {
  if (a.tokens == 0) return;
  auto dx = [&](int64_t b, int64_t t, int64_t c) { return a.dx[(b * a.tokens + t) * a.width + c]; };
  for (int64_t c = 0; c < a.width; ++c) {
    double d_bias = 0.0;
    for (int64_t t = 0; t < a.tokens; ++t) {
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b) {
        sum += dx(b, t, c);
        if (t > 0) a.d_projected[(b * (a.tokens - 1) + t - 1) * a.width + c] = dx(b, t, c);
      }
      store_sum(&a.d_position[t * a.width + c], sum, a.accumulate);
      if (t == 0) store_sum(&a.d_class_token[c], sum, a.accumulate);
      if (t > 0) d_bias += sum;
    }
    store_sum(&a.d_bias[c], d_bias, a.accumulate);
  }
}

void layer_norm(const LayerNorm& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.x + r * stride;
    if (a.branch != nullptr) {
      for (int64_t c = 0; c < a.width; ++c) {
        a.sum[r * a.width + c] = x[c] + (a.branch[r * a.width + c] + a.branch_bias[c]);
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
      a.y[r * a.width + c] = static_cast<float>((x[c] - mean) * rstd * a.gamma[c] + a.beta[c]);
    }
    a.mean[r] = static_cast<float>(mean);
    a.rstd[r] = static_cast<float>(rstd);
  }
}

void layer_norm_backward(const LayerNormBackward& a) {
  const int64_t stride = a.x_stride != 0 ? a.x_stride : a.width;
  std::vector<double> d_gamma(static_cast<size_t>(a.width)), d_beta(static_cast<size_t>(a.width));
  for (int64_t r = 0; r < a.rows; ++r) {
    const float *x = a.x + r * stride, *dy = a.dy + r * a.width;
    float* dx = a.dx + r * stride;
    double mean = a.mean[r], rstd = a.rstd[r], sum = 0.0, sum_normalized = 0.0;
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(dy[c]) * a.gamma[c];
      sum += g;
      sum_normalized += g * normalized;
      d_gamma[static_cast<size_t>(c)] += dy[c] * normalized;
      d_beta[static_cast<size_t>(c)] += dy[c];
    }
    sum /= static_cast<double>(a.width);
    sum_normalized /= static_cast<double>(a.width);
    for (int64_t c = 0; c < a.width; ++c) {
      double normalized = (x[c] - mean) * rstd, g = static_cast<double>(dy[c]) * a.gamma[c];
      store_sum(&dx[c], rstd * (g - sum - normalized * sum_normalized), a.accumulate_dx);
    }
  }
  for (int64_t c = 0; c < a.width; ++c) {
    store_sum(&a.d_gamma[c], d_gamma[static_cast<size_t>(c)], a.accumulate);
    store_sum(&a.d_beta[c], d_beta[static_cast<size_t>(c)], a.accumulate);
  }
}

void softmax(const Softmax& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    float* x = a.x + r * a.ld;
    const double scale = a.scale;
    double highest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (int64_t c = 0; c < a.width; ++c) highest = std::max(highest, scale * x[c]);
    for (int64_t c = 0; c < a.width; ++c) sum += std::exp(scale * x[c] - highest);
    for (int64_t c = 0; c < a.width; ++c) x[c] = static_cast<float>(std::exp(scale * x[c] - highest) / sum);
    for (int64_t c = a.width; c < a.ld; ++c) x[c] = 0.0f;
  }
}

void softmax_backward(const SoftmaxBackward& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* y = a.y + r * a.ld;
    float* dy = a.dy + r * a.ld;
    double dot = 0.0;
    for (int64_t c = 0; c < a.width; ++c) dot += static_cast<double>(y[c]) * dy[c];
    for (int64_t c = 0; c < a.width; ++c) dy[c] = static_cast<float>(a.scale * y[c] * (dy[c] - dot));
    for (int64_t c = a.width; c < a.ld; ++c) dy[c] = 0.0f;
  }
}

void bias_gelu(const BiasGelu& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    float pre = a.x[i] + a.bias[i % a.width];
    a.x[i] = pre;
    a.y[i] = static_cast<float>(pre * phi_cdf(pre));
  }
}

void bias_gelu_backward(const BiasGeluBackward& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) {
      double pre = a.pre[r * a.width + c];
      float& d = a.dy[r * a.width + c];
      double dx = d * (phi_cdf(pre) + pre * phi_density(pre));
      sum += dx;
      d = static_cast<float>(dx);
    }
    store_sum(&a.d_bias[c], sum, a.accumulate);
  }
}

void bias_residual(const BiasResidual& a) {
  for (int64_t i = 0; i < a.rows * a.width; ++i) {
    double old = a.residual != nullptr ? a.residual[i] : 0.0;
    a.x[i] = static_cast<float>(old + a.y[i] + a.bias[i % a.width]);
  }
}

void column_sum(const ColumnSum& a) {
  for (int64_t c = 0; c < a.width; ++c) {
    double sum = 0.0;
    for (int64_t r = 0; r < a.rows; ++r) sum += a.x[r * a.width + c];
    store_sum(&a.sum[c], sum, a.accumulate);
  }
}

void split_heads(const SplitHeads& a) {
  const int64_t width = a.heads * a.head_dim;
  float* outputs[3] = {a.q, a.k, a.v};
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t i = 0; i < 3 * width; ++i) {
        int64_t c = i % width, h = c / a.head_dim, d = c % a.head_dim;
        outputs[i / width][((b * a.heads + h) * a.tokens + t) * a.head_dim + d] =
            a.qkv[(b * a.tokens + t) * 3 * width + i] + (a.bias != nullptr ? a.bias[i] : 0.0f);
      }
    }
  }
}

void split_heads_backward(const SplitHeadsBackward& a) {
  const int64_t width = a.heads * a.head_dim;
  const float* inputs[3] = {a.dq, a.dk, a.dv};
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

void merge_heads(const MergeHeads& a) {
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

void cross_entropy(const CrossEntropy& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* x = a.logits + r * a.classes;
    const int64_t label = a.labels[r];
    if (label < 0 || label >= a.classes) {
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      a.totals[0] += kNan;
      if (a.d_logits != nullptr) std::fill_n(a.d_logits + r * a.classes, a.classes, kNan);
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
      a.d_logits[r * a.classes + c] = static_cast<float>(a.grad_scale * (p - (c == label ? 1.0 : 0.0)));
    }
  }
}

}  // namespace gradwire::reference
