// The policies of a spec that a codec does not apply itself, around the codec of the whole bucket, including
// its dense tensors:
//
//   start=N     the first N steps average the bucket in FP32
//   ef=ef21     EF21 (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021). Rank i has an estimate h_i of its
//               gradient g_i; all ranks have h, the mean of the estimates. A step averages the compressed
//               differences c_i = C(g_i - h_i); then h_i += c_i, h += mean of the c_i, and the gradient
//               becomes h. A rank computes c_i = g_i - h_i - e_i from what its encodes lost, e_i, the
//               residual of a codec that begins each step without one. So h stays the mean of the h_i in
//               every schedule, although partial sums are encoded again.
//   momentum=M  momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018): u = M u + g is
//               compressed in place of g, and u becomes 0 where the bucket's mean changed. Dense tensors keep
//               their u, as in SGD with momentum. The optimizer's own momentum must be 0.
//   max_norm=C  local gradient clipping, as in Deep Gradient Compression: a rank first scales each tensor's
//               gradient, also of dense tensors, to a norm of at most C / sqrt(ranks). What clipping takes
//               away is forgotten. Two launches per tensor on CUDA.
//
// A rank stores d_i = h_i - h in place of h_i. d_i and u belong to the rank; they are reset to 0 when the
// ranks change. The sum of the h_i then still is n h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collectives/codec/codec.h"
#include "collectives/codec/dense.h"
#include "kernels/feedback/clip.h"
#include "kernels/feedback/feedback.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

using Feedback = ResidualPolicy::Feedback;

// Returns the codec of the steps before compression begins; null if the first step is compressed.
std::unique_ptr<Codec> make_plain_start(const BucketContext& c) {
  if (c.spec.policy.start == 0) return nullptr;
  BucketContext plain = c;
  plain.spec = CompressionSpec();  // FP32
  plain.spec.schedule = c.spec.schedule;
  plain.aside = {};
  plain.name += ", before compression starts";
  return make_wire_codec(plain);
}

// Returns the parts of the bucket that are compressed.
std::vector<ElementSpan> compressed_spans(const BucketContext& c) {
  BucketContext others = c;
  std::erase_if(others.tensors, [&](const BucketTensor& t) { return is_dense(c.spec, t); });
  const std::vector<ElementSpan> aside = shared_ends(others);
  std::vector<ElementSpan> spans;
  for (const BucketTensor& t : others.tensors) {
    int64_t begin = t.offset;
    const int64_t end = t.offset + t.count();
    for (const ElementSpan& part : aside) {
      if (part.begin < begin || part.begin >= end) continue;
      if (part.begin > begin) spans.push_back({begin, part.begin});
      begin = part.end;
    }
    if (begin < end) spans.push_back({begin, end});
  }
  return spans;
}

class PolicyCodec final : public Codec {
 public:
  explicit PolicyCodec(const BucketContext& c)
      : policy_(c.spec.policy),
        codec_(make_split_codec(c)),
        plain_(make_plain_start(c)),
        tensors_(c.tensors),
        gradients_(c.gradients),
        elements_(c.elements),
        unit_(c.scale == 1.0f ? 1.0f / static_cast<float>(c.transport->world()) : 1.0f),
        max_norm_(static_cast<float>(policy_.max_norm / std::sqrt(c.transport->world()))),
        estimate_(buffer(c, estimates())),
        deviation_(buffer(c, estimates() && codec_->residual() == nullptr)),
        momentum_(buffer(c, policy_.momentum > 0)) {
    if (!c.shards.empty() && (estimates() || momentum_)) {
      throw BadInput(fmt::format(
          "compression spec '{}': {} needs the whole mean on every rank, but a sharded reducer gives each "
          "rank its part; use ef=on without momentum",
          c.spec.to_string(), estimates() ? "ef=ef21" : "momentum"));
    }
    if (momentum_) masked_ = compressed_spans(c);
    for (const Buffer* b : {&estimate_, &deviation_, &momentum_}) fill_zero(c.stream, b->data(), b->bytes());
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    return own_bytes() + std::max(codec_->workspace_bytes(), plain_ ? plain_->workspace_bytes() : 0);
  }
  void bind(void* workspace) override {
    own_ = workspace;
    void* const rest = static_cast<std::byte*>(workspace) + own_bytes();
    codec_->bind(rest);
    if (plain_) plain_->bind(rest);
  }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    codec_->rebind(gradients);
    if (plain_) plain_->rebind(gradients);
  }
  int64_t steady_from() const override { return std::max(policy_.start, codec_->steady_from()); }
  int64_t period() const override { return codec_->period(); }

  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    if (max_norm_ > 0 || estimates() || momentum_) phases.enter(stream, Phase::compress);
    if (max_norm_ > 0) clip(stream);
    if (estimates()) take_difference(stream);
    if (momentum_) {
      momentum_add(stream, {.grad = gradients_,
                            .momentum = momentum_.as<float>(),
                            .factor = static_cast<float>(policy_.momentum),
                            .count = elements_});
    }
    const bool plain = step < policy_.start;
    (plain ? plain_ : codec_)->run(stream, step, phases);
    if (estimates() || masks(plain)) phases.enter(stream, Phase::decompress);
    if (estimates()) update_estimate(stream);
    if (masks(plain)) mask_momentum(stream);
  }

  // With EF21 the residual's memory holds the deviation.
  Residual* residual() override { return estimates() ? nullptr : codec_->residual(); }
  std::vector<TensorState> tensor_state() override {
    std::vector<TensorState> all = codec_->tensor_state();
    const auto add = [&](const char* kind, float* values, bool same_on_all_ranks) {
      for (const BucketTensor& t : tensors_) {
        if (t.count() == 0) continue;
        all.push_back({.tensor = t.index,
                       .kind = kind,
                       .data = values + t.offset,
                       .shape = {t.rows, t.cols},
                       .same_on_all_ranks = same_on_all_ranks});
      }
    };
    if (estimates()) {
      add("estimate", estimate_.as<float>(), true);
      add("deviation", deviation(), false);
    }
    if (momentum_) add("velocity", momentum_.as<float>(), false);
    return all;
  }
  int64_t state_bytes() const override {
    return codec_->state_bytes() + (plain_ ? plain_->state_bytes() : 0) +
           static_cast<int64_t>(estimate_.bytes() + deviation_.bytes() + momentum_.bytes());
  }
  std::string describe() const override {
    std::string text = codec_->describe();
    if (estimates()) text += ", by EF21";
    if (momentum_) text += fmt::format(", momentum {}", policy_.momentum);
    if (max_norm_ > 0) text += fmt::format(", gradients clipped to norm {:.3g} on each rank", max_norm_);
    if (plain_) text += fmt::format(", from step {} on", policy_.start);
    return text;
  }
  std::vector<PlannedAllreduce> plan() const override { return codec_->plan(); }

 private:
  static Buffer buffer(const BucketContext& c, bool needed) {
    return make_buffer<float>(c.transport->device(), needed ? c.elements : 0);
  }
  bool estimates() const { return policy_.feedback == Feedback::ef21; }
  bool masks(bool plain) const { return momentum_ && !plain; }
  // The workspace's first part holds the sums of a tensor that is clipped, afterwards EF21's `kept`.
  size_t own_bytes() const {
    size_t bytes = estimates() ? static_cast<size_t>(elements_) * sizeof(float) : 0;
    for (const BucketTensor& t : tensors_) {
      if (max_norm_ == 0) break;
      bytes = std::max(bytes, static_cast<size_t>(clip_chunks(t.count())) * sizeof(double));
    }
    return (bytes + 255) / 256 * 256;
  }
  float* kept() { return static_cast<float*>(own_); }
  float* deviation() {
    return codec_->residual() != nullptr ? codec_->residual()->values() : deviation_.as<float>();
  }

  void clip(const Stream& stream) {
    for (const BucketTensor& t : tensors_) {
      clip_norm(stream, {.grad = gradients_ + t.offset,
                         .chunks = static_cast<double*>(own_),
                         .max_norm = max_norm_,
                         .count = t.count()});
    }
  }
  void take_difference(const Stream& stream) {
    ef21_difference(stream, {.grad = gradients_,
                             .residual = deviation(),
                             .estimate = estimate_.as<const float>(),
                             .kept = kept(),
                             .unit = unit_,
                             .count = elements_});
  }
  void update_estimate(const Stream& stream) {
    if (codec_->residual() != nullptr) codec_->residual()->settle(stream);
    ef21_update(stream, {.grad = gradients_,
                         .residual = deviation(),
                         .estimate = estimate_.as<float>(),
                         .kept = kept(),
                         .unit = unit_,
                         .count = elements_});
  }
  void mask_momentum(const Stream& stream) {
    for (const ElementSpan& span : masked_) {
      momentum_mask(stream, {.grad = gradients_ + span.begin,
                             .momentum = momentum_.as<float>() + span.begin,
                             .count = span.end - span.begin});
    }
  }

  const ResidualPolicy policy_;
  const std::unique_ptr<Codec> codec_, plain_;
  const std::vector<BucketTensor> tensors_;
  float* gradients_;
  const int64_t elements_;
  const float unit_;      // a mean is `unit` times the result: 1, or 1 / ranks if the result is a sum
  const float max_norm_;  // of a tensor's gradient on this rank; 0: not clipped
  Buffer estimate_;
  Buffer deviation_;  // of a codec without a residual
  Buffer momentum_;
  std::vector<ElementSpan> masked_;
  void* own_ = nullptr;  // in the workspace
};

}  // namespace

std::unique_ptr<Codec> make_codec(const BucketContext& context) {
  const ResidualPolicy& policy = context.spec.policy;
  const bool simple =
      policy.feedback != Feedback::ef21 && policy.start == 0 && policy.momentum == 0 && policy.max_norm == 0;
  if (simple) return make_split_codec(context);
  return std::make_unique<PolicyCodec>(context);
}

}  // namespace gradwire
