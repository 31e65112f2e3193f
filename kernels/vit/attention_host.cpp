// Host attention and attention_backward: a task per image and head, whose rows are first widened. Models on
// the host use products and softmax instead, which are faster on the host.
#include <algorithm>
#include <vector>

#include "kernels/math/gelu.h"
#include "kernels/simd/vector.h"
#include "kernels/vit/attention.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::host {
namespace {

GW_SIMD float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Adds factor * x to `to`.
GW_SIMD void add_scaled(const float* x, float factor, int64_t n, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) to[i] += factor * x[i];
}

// A head's rows (tokens, dim) in matrix number `part` of the `parts` matrices that lie side by side in an
// array.
template <typename Args>
struct Head {
  const Args& a;
  int64_t image, head;

  int64_t at(int64_t token, int64_t parts, int64_t part) const {
    return ((image * a.tokens + token) * parts + part) * a.heads * a.head_dim + head * a.head_dim;
  }
  template <typename S>
  std::vector<float> load(const S* array, int64_t parts, int64_t part) const {
    std::vector<float> rows(static_cast<size_t>(a.tokens * a.head_dim));
    for (int64_t token = 0; token < a.tokens; ++token) {
      const S* from = array + at(token, parts, part);
      for (int64_t d = 0; d < a.head_dim; ++d)
        rows[static_cast<size_t>(token * a.head_dim + d)] = widen(from[d]);
    }
    return rows;
  }
  template <typename S>
  void store(const std::vector<float>& rows, S* array, int64_t parts, int64_t part) const {
    for (int64_t token = 0; token < a.tokens; ++token) {
      S* to = array + at(token, parts, part);
      for (int64_t d = 0; d < a.head_dim; ++d)
        to[d] = narrow<S>(rows[static_cast<size_t>(token * a.head_dim + d)]);
    }
  }
  int64_t statistics(int64_t token) const { return 2 * ((image * a.heads + head) * a.tokens + token); }
};

template <typename Args, typename Call>
void for_heads(const Args& a, const Call& call) {
  parallel_for(a.batch * a.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) call(Head<Args>{a, i / a.heads, i % a.heads});
  });
}

}  // namespace

template <typename S>
void attention(const Attention<S>& a) {
  const float scale = attention_scale(a.head_dim);
  for_heads(a, [&](const Head<Attention<S>>& head) {
    const std::vector<float> q = head.load(a.qkv, 3, 0), k = head.load(a.qkv, 3, 1),
                             v = head.load(a.qkv, 3, 2);
    std::vector<float> out(q.size(), 0.0f), weights(static_cast<size_t>(a.tokens));
    for (int64_t query = 0; query < a.tokens; ++query) {
      for (int64_t key = 0; key < a.tokens; ++key) {
        weights[static_cast<size_t>(key)] =
            scale * dot(q.data() + query * a.head_dim, k.data() + key * a.head_dim, a.head_dim);
      }
      const float greatest = *std::max_element(weights.begin(), weights.end());
      float sum = 0.0f;
      for (float& weight : weights) sum += weight = exp_float(weight - greatest);
      const float inverse = 1.0f / sum;
      for (int64_t key = 0; key < a.tokens; ++key) {
        add_scaled(v.data() + key * a.head_dim, weights[static_cast<size_t>(key)] * inverse, a.head_dim,
                   out.data() + query * a.head_dim);
      }
      if (a.statistics == nullptr) continue;
      a.statistics[head.statistics(query)] = greatest;
      a.statistics[head.statistics(query) + 1] = inverse;
    }
    head.store(out, a.merged, 1, 0);
  });
}

template <typename S>
void attention_backward(const AttentionBackward<S>& a) {
  const float scale = attention_scale(a.head_dim);
  const int64_t width = 3 * a.heads * a.head_dim, tiles = (a.tokens + kAttentionTile - 1) / kAttentionTile;
  for_heads(a, [&](const Head<AttentionBackward<S>>& head) {
    const std::vector<float> q = head.load(a.qkv, 3, 0), k = head.load(a.qkv, 3, 1),
                             v = head.load(a.qkv, 3, 2);
    const std::vector<float> out = head.load(a.merged, 1, 0), d_out = head.load(a.d_merged, 1, 0);
    std::vector<float> gradients[3];
    for (auto& gradient : gradients) gradient.assign(q.size(), 0.0f);
    for (int64_t query = 0; query < a.tokens; ++query) {
      const int64_t row = query * a.head_dim;
      const float greatest = a.statistics[head.statistics(query)];
      const float inverse = a.statistics[head.statistics(query) + 1];
      const float mean = dot(out.data() + row, d_out.data() + row, a.head_dim);
      for (int64_t key = 0; key < a.tokens; ++key) {
        const int64_t other = key * a.head_dim;
        const float score = scale * dot(q.data() + row, k.data() + other, a.head_dim);
        const float weight = exp_float(score - greatest) * inverse;
        const float d_score = scale * weight * (dot(d_out.data() + row, v.data() + other, a.head_dim) - mean);
        add_scaled(k.data() + other, d_score, a.head_dim, gradients[0].data() + row);
        add_scaled(q.data() + row, d_score, a.head_dim, gradients[1].data() + other);
        add_scaled(d_out.data() + row, weight, a.head_dim, gradients[2].data() + other);
      }
    }
    for (int part = 0; part < 3; ++part) {
      head.store(gradients[part], a.d_qkv, 3, part);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        float* partial = a.workspace + (head.image * tiles + tile) * width + part * a.heads * a.head_dim +
                         head.head * a.head_dim;
        std::fill_n(partial, a.head_dim, 0.0f);
        for (int64_t token = tile * kAttentionTile; token < std::min(a.tokens, (tile + 1) * kAttentionTile);
             ++token)
          add_scaled(gradients[part].data() + token * a.head_dim, 1.0f, a.head_dim, partial);
      }
    }
  });
  if (!a.partial_only) combine_partial_sums(a.sums());
}

GW_INSTANTIATE_OP(attention, Attention)
GW_INSTANTIATE_OP(attention_backward, AttentionBackward)

}  // namespace gradwire::host

namespace gradwire {

template <typename S>
bool fuses_attention([[maybe_unused]] const Device& device, [[maybe_unused]] int64_t tokens,
                     [[maybe_unused]] int64_t head_dim) {
#ifdef GRADWIRE_HAS_CUDA
  if (!device.is_host()) {
    detail::make_current(device);
    return cuda::attention_fits<S>(tokens, head_dim);
  }
#endif
  return false;
}
template bool fuses_attention<float>(const Device&, int64_t, int64_t);
template bool fuses_attention<Bf16>(const Device&, int64_t, int64_t);

}  // namespace gradwire
