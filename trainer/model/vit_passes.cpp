// Set-up of the passes: the layout of the activations in one allocation.
#include "trainer/model/vit_passes.h"

#include <algorithm>

#include "kernels/vit/vit.h"
#include "trainer/model/typed_vit_passes.h"

namespace gradwire {

// Hands out pieces of one allocation. Used twice: without memory to compute the size, then with it.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

template <typename S>
TypedVitPasses<S>::TypedVitPasses(const VitConfig& config, const Stream& stream,
                                  const std::vector<VitParameter>& parameters, const ParameterLayout& layout,
                                  const VitPassesOptions& options)
    : config_(config),
      stream_(stream),
      layout_(layout),
      options_(options),
      index_(find_parameters(parameters, config.depth)) {
  a_.layers.resize(static_cast<size_t>(config_.depth));
  Arena measure(nullptr);
  lay_out(measure);
  arena_ = make_buffer<char>(stream_.device(), measure.used());
  Arena place(arena_.as<char>());
  lay_out(place);
}

template <typename S>
void TypedVitPasses<S>::lay_out(Arena& arena) {
  const int64_t b = options_.max_batch, t = config_.tokens(), c = config_.width, f = config_.mlp;
  const int64_t rows = b * t,
                attention = options_.fused_attention ? 0 : b * config_.heads * t * padded_tokens();
  auto take = [&](int64_t count) { return arena.template take<float>(count); };
  auto take_operand = [&](int64_t count) { return arena.template take<S>(count); };

  a_.patches = take_operand(b * (t - 1) * patch_elements());
  for (size_t layer = 0; layer < a_.layers.size(); ++layer) {
    LayerActivations& l = a_.layers[layer];
    if (layer > 0 && !options_.training) {
      l = a_.layers
              [0];  // no backward needs the activations; a layer's input is dead before its output is written
      continue;
    }
    l.x = take(rows * c);
    l.ln1 = take_operand(rows * c);
    l.mean1 = take(rows);
    l.rstd1 = take(rows);
    if (options_.fused_attention) {
      l.qkv = take_operand(rows * 3 * c);
      l.statistics = take(2 * b * config_.heads * t);
    } else {
      l.q = take_operand(rows * c);
      l.k = take_operand(rows * c);
      l.v = take_operand(rows * c);
      l.attention = take_operand(attention);
    }
    l.merged = take_operand(rows * c);
    l.x_mid = take(rows * c);
    l.ln2 = take_operand(rows * c);
    l.mean2 = take(rows);
    l.rstd2 = take(rows);
    l.pre = take_operand(rows * f);
    l.gelu = take_operand(rows * f);
  }
  a_.x_last = options_.training ? take(rows * c) : a_.layers[0].x;
  a_.features = take_operand(b * c);
  a_.mean = take(b);
  a_.rstd = take(b);
  a_.logits = take(b * config_.classes);
  a_.loss_workspace = take(2 * b);
  a_.qkv = take_operand(rows * 3 * c);
  if (!options_.fused_attention) a_.heads_out = take_operand(rows * c);
  if constexpr (!kInPlace) {
    a_.branch = take_operand(rows * c);
    a_.scores = take(attention);
  }
  if (!options_.training) return;
  if constexpr (kInPlace) {
    a_.d_logits = a_.logits;
  } else {
    a_.d_logits = take_operand(b * config_.classes);
    a_.dx_rounded = take_operand(rows * c);
  }
  if (!options_.fused_attention) {
    a_.dq = take_operand(rows * c);
    a_.dk = take_operand(rows * c);
    a_.dv = take_operand(rows * c);
    a_.d_attention = take_operand(attention);
  }
  a_.dx = take(rows * c);
  a_.d_branch = take_operand(rows * c);
  a_.d_mlp = take_operand(rows * f);
  a_.d_features = take_operand(b * c);
  a_.mlp0_sums = take(std::max(column_sum_workspace(rows, f), column_sum_workspace(b, config_.classes)));
  a_.ln2_sums = take(layer_norm_backward_workspace(rows, c));
  a_.in_sums = take(options_.fused_attention ? attention_backward_workspace(b, t, c)
                                             : column_sum_workspace(rows, 3 * c));
  a_.ln1_sums = take(std::max(layer_norm_backward_workspace(rows, c), layer_norm_backward_workspace(b, c)));
}

bool fuses_attention(const Device& device, const VitConfig& config, Precision precision) {
  return precision == Precision::bf16 ? fuses_attention<Bf16>(device, config.tokens(), config.head_dim())
                                      : fuses_attention<float>(device, config.tokens(), config.head_dim());
}

std::unique_ptr<VitPasses> make_vit_passes(const VitConfig& config, const Stream& stream,
                                           const std::vector<VitParameter>& parameters,
                                           const ParameterLayout& layout, const VitPassesOptions& options) {
  if (options.precision == Precision::bf16) {
    return std::make_unique<TypedVitPasses<Bf16>>(config, stream, parameters, layout, options);
  }
  return std::make_unique<TypedVitPasses<float>>(config, stream, parameters, layout, options);
}

}  // namespace gradwire
