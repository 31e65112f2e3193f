// The layout of the activations in one allocation.
#include "trainer/model/vit_passes.h"

#include <algorithm>

#include "kernels/vit/vit.h"
#include "trainer/model/typed_vit_passes.h"

namespace gradwire {

// Cuts an allocation into pieces. The first pass, without memory, computes the size. The second pass assigns
// memory.
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
      index_(find_parameters(parameters, config.depth)),
      group_layers_(options.training ? std::clamp<int64_t>(options.groups.layers, 1, GradientGroups::kMax)
                                     : 1) {
  a_.layers.resize(static_cast<size_t>(config_.depth));
  Arena measure(nullptr);
  lay_out(measure);
  arena_ = make_buffer<char>(stream_.device(), measure.used());
  Arena place(arena_.as<char>());
  lay_out(place);
}

template <typename S>
void TypedVitPasses<S>::lay_out(Arena& arena) {
  const int64_t b = options_.max_batch, t = config_.tokens(), c = config_.width;
  const int64_t rows = b * t;

  a_.patches = arena.take<S>(b * (t - 1) * patch_elements());
  lay_out_layers(arena);
  a_.x_last = options_.training ? arena.take<float>(rows * c) : a_.layers[0].x;
  a_.features = arena.take<S>(b * c);
  a_.mean = arena.take<float>(b);
  a_.rstd = arena.take<float>(b);
  a_.logits = arena.take<float>(b * config_.classes);
  a_.loss_workspace = arena.take<float>(2 * b);
  a_.qkv = arena.take<S>(rows * 3 * c);
  if (!options_.fused_attention) a_.heads_out = arena.take<S>(rows * c);
  if constexpr (!kInPlace) {
    a_.branch = arena.take<S>(rows * c);
    a_.scores = arena.take<float>(score_elements());
  }
  if (options_.training) lay_out_backward(arena);
}

// Lays out the layers in the order of backward, like the weights' gradients, because batched products stride
// through activations and gradients.
template <typename S>
void TypedVitPasses<S>::lay_out_layers(Arena& arena) {
  const int64_t c = config_.width, f = config_.mlp, rows = options_.max_batch * config_.tokens();
  for (size_t layer = a_.layers.size(); layer-- > 0;) {
    LayerActivations& l = a_.layers[layer];
    if (layer + 1 < a_.layers.size() && !options_.training) {
      // Without backward, layers can share activations, because a layer has read its input before it writes
      // its output.
      l = a_.layers.back();
      continue;
    }
    l.x = arena.take<float>(rows * c);
    l.ln1 = arena.take<S>(rows * c);
    l.mean1 = arena.take<float>(rows);
    l.rstd1 = arena.take<float>(rows);
    if (options_.fused_attention) {
      l.qkv = arena.take<S>(rows * 3 * c);
      l.statistics = arena.take<float>(2 * rows * config_.heads);
    } else {
      l.q = arena.take<S>(rows * c);
      l.k = arena.take<S>(rows * c);
      l.v = arena.take<S>(rows * c);
      l.attention = arena.take<S>(score_elements());
    }
    l.merged = arena.take<S>(rows * c);
    l.x_mid = arena.take<float>(rows * c);
    l.ln2 = arena.take<S>(rows * c);
    l.mean2 = arena.take<float>(rows);
    l.rstd2 = arena.take<float>(rows);
    if (options_.training || !options_.fused_gelu) l.pre = l.d_pre = arena.take<S>(rows * f);
    l.gelu = arena.take<S>(rows * f);
  }
}

template <typename S>
void TypedVitPasses<S>::lay_out_backward(Arena& arena) {
  const int64_t b = options_.max_batch, t = config_.tokens(), c = config_.width, f = config_.mlp;
  const int64_t rows = b * t;
  // Element 0 of each slot has the alignment of operands within their arrays.
  auto take_slots = [&](int64_t count) { return PerSlot<S>{arena.take<S>(group_layers_ * count), count}; };
  auto take_sums = [&](int64_t count) {
    return PerSlot<float>{arena.take<float>(group_layers_ * count), count};
  };
  if constexpr (kInPlace) {
    a_.d_logits = a_.logits;
  } else {
    a_.d_logits = arena.take<S>(b * config_.classes);
  }
  if (!options_.fused_attention) {
    a_.d_qkv = take_slots(rows * 3 * c);
    a_.dq = arena.take<S>(rows * c);
    a_.dk = arena.take<S>(rows * c);
    a_.dv = arena.take<S>(rows * c);
    a_.d_attention = arena.take<S>(score_elements());
  }
  a_.dx = arena.take<float>(rows * c);
  if (!kInPlace || group_layers_ > 1) {
    a_.dx_mlp = take_slots(rows * c);  // directly after dx, because both are cleared together
    a_.dx_attention = take_slots(rows * c);
  }
  a_.d_branch = arena.take<S>(rows * c);
  a_.d_gelu = arena.take<S>(rows * f);
  if (options_.fused_gelu) {
    // A product cannot overwrite the input of its epilogue. Backward no longer reads the pre-activations of
    // the layer above, so reuse their memory.
    for (size_t layer = a_.layers.size(); layer-- > 1;) a_.layers[layer].pre = a_.layers[layer - 1].d_pre;
    a_.layers[0].pre = a_.d_gelu;
  }
  a_.d_features = arena.take<S>(b * c);
  a_.mlp0_sums = take_sums(column_sum_workspace(rows, f));
  a_.ln2_sums = take_sums(layer_norm_backward_workspace(rows, c));
  a_.in_sums = take_sums(options_.fused_attention ? attention_backward_workspace(b, t, c)
                                                  : column_sum_workspace(rows, 3 * c));
  a_.ln1_sums = take_sums(layer_norm_backward_workspace(rows, c));
  a_.token_sums = arena.take<float>((t - 1) * c);
  a_.head_bias_sums = arena.take<float>(column_sum_workspace(b, config_.classes));
  a_.head_norm_sums = arena.take<float>(layer_norm_backward_workspace(b, c));
}

bool fuses_attention(const Device& device, const VitConfig& config, Precision precision) {
  return precision == Precision::bf16 ? fuses_attention<Bf16>(device, config.tokens(), config.head_dim())
                                      : fuses_attention<float>(device, config.tokens(), config.head_dim());
}

// Returns false for the exact form of GELU, because cuBLASLt provides only the tanh form.
bool fuses_gelu(const Device& device, const VitConfig& config) {
  return device.is_cuda() && config.gelu == Gelu::tanh;
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
