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
#include "collectives/codec/policy_codec.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "collectives/codec/codec.h"
#include "kernels/passes/passes.h"
#include "kernels/powersgd/powersgd.h"
#include "kernels/wire/floats.h"
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
      throw BadInput(
          "compression spec '{}': {} needs the whole mean on every rank, but a sharded reducer gives each "
          "rank its part; use ef=on without momentum",
          c.spec.to_string(), estimates() ? "ef=ef21" : "momentum");
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

// Averages the dense tensors of a bucket, and the ends of tensors that would share a block, in FP32. Another
// codec averages the other elements. The phases of a step:
//   pack         moves dense tensors and ends to a separate buffer and leaves zeros in the bucket
//   allreduce    averages the separate buffer in FP32
//   codec        averages the whole bucket, including the zeros
//   unpack       copies the averages to their places in the bucket
// The separate buffer adds one small exchange. The codec also sends the zeros, which take at most an eighth
// of the dense tensors' FP32 bytes in the formats whose default is dense=auto. The copies of dense tensors
// move 20 bytes per element.
//
// A bucket of only dense tensors is reduced by one allreduce in place. BF16 gradients are also summed in
// FP32: BF16 on the wire would round the sum at each hop, in a ring of 16 ranks to three times the error.

namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

class DenseCodec final : public Codec {
 public:
  DenseCodec(const BucketContext& c, const BucketContext& others, const std::vector<Segment>& dense)
      : codec_(make_compressing_codec(others)),
        segments_(c.stream, dense),
        elements_(packed_elements(segments_.host(), kUnit)),
        gradients_(c.gradients),
        packed_(make_buffer<float>(c.transport->device(), elements_)),
        loaded_(make_buffer<float>(c.transport->device(), codec_->residual() != nullptr ? elements_ : 0)),
        choice_(c.choose(elements_, kFp32)),
        allreduce_(*c.transport, choice_.schedule, {packed_.data(), packed_.data(), nullptr, elements_},
                   c.plain_options("dense tensors", choice_.slice_bytes)) {
    for (Buffer* b : {&packed_, &loaded_}) fill_zero(c.stream, b->data(), b->bytes());
    c.stream.synchronize();
  }

  static constexpr int64_t kUnit = 4;  // alignment in elements, for vectorized kernels

  // The codec and the allreduce share one workspace, because they do not run concurrently.
  size_t workspace_bytes() const override {
    return std::max(codec_->workspace_bytes(), allreduce_.workspace_bytes());
  }
  void bind(void* workspace) override {
    codec_->bind(workspace);
    allreduce_.bind(workspace);
  }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    codec_->rebind(gradients);
  }
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    phases.enter(stream, Phase::compress);
    pack(stream, {&segments_, gradients_, packed_.as<float>(), false});
    pack(stream, {&segments_, gradients_, nullptr, true});
    if (loaded_ && codec_->residual()->take_written()) add_residual(stream, phases);
    allreduce_.run(stream, &phases);
    phases.enter(stream, Phase::compress);
    codec_->run(stream, step, phases);
    phases.enter(stream, Phase::decompress);
    pack(stream, {&segments_, gradients_, packed_.as<float>(), true});
  }
  int64_t steady_from() const override { return codec_->steady_from(); }
  int64_t period() const override { return codec_->period(); }
  Residual* residual() override { return codec_->residual(); }
  std::vector<TensorState> tensor_state() override { return codec_->tensor_state(); }
  int64_t state_bytes() const override {
    return codec_->state_bytes() + static_cast<int64_t>(packed_.bytes() + loaded_.bytes());
  }
  std::string describe() const override {
    return fmt::format("{}; {} dense tensors or ends of {} in fp32", codec_->describe(), segments_.count(),
                       elements_);
  }
  std::vector<PlannedAllreduce> plan() const override {
    std::vector<PlannedAllreduce> all = codec_->plan();
    all.push_back({"dense tensors", choice_.schedule.kind, choice_.reason});
    return all;
  }

 private:
  // Adds the residuals of dense tensors and ends to the values, and clears these residuals. A loaded state,
  // perhaps from another layout, may hold such residuals, and the averages of the separate buffer overwrite
  // the codec's output for dense tensors and ends.
  void add_residual(const Stream& stream, BucketPhases& phases) {
    const Residual& all = *codec_->residual();
    all.load(stream, phases);
    pack(stream, {&segments_, all.values(), loaded_.as<float>(), false});
    pack(stream, {&segments_, all.values(), nullptr, true});
    fp32_reduce(stream, {.inputs = {loaded_.as<const float>()},
                         .num_inputs = 1,
                         .own = packed_.as<const float>(),
                         .out = packed_.as<float>(),
                         .count = elements_});
    all.store(stream, phases);
  }

  std::unique_ptr<Codec> codec_;
  SegmentTable segments_;
  int64_t elements_;
  float* gradients_;
  Buffer packed_;
  Buffer loaded_;  // loaded residuals; only with error feedback
  SchedulePlanner::Choice choice_;
  Program allreduce_;
};

}  // namespace

bool is_small(int64_t rows, int64_t cols) {
  if (rows <= 1 || cols <= 1) return rows * cols <= kLongestVector;
  return std::max(rows, cols) < kSmallMatrix && rows * cols < kSmallMatrix;
}

bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor) {
  const bool small = is_small(tensor.rows, tensor.cols);
  return std::any_of(spec.dense.begin(), spec.dense.end(), [&](const std::string& name) {
    return name == kDenseAuto ? small : matches(name, tensor.name);
  });
}

void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors) {
  for (const std::string& name : spec.dense) {
    const bool found = name == kDenseAuto || std::any_of(tensors.begin(), tensors.end(),
                                                         [&](auto& tensor) { return matches(name, tensor); });
    if (found) continue;
    throw BadInput(
        "compression spec '{}': no tensor of the model matches dense={}; their names are "
        "such as {}",
        spec.to_string(), name, tensors.empty() ? "" : tensors.front());
  }
}

int64_t packing_unit(Wire wire, int64_t least) {
  return wire->masks ? std::lcm(wire->granularity, least) : least;
}

std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t unit) {
  std::vector<Segment> all;
  for (const BucketTensor& t : tensors) {
    if (t.count() == 0) continue;
    all.push_back({t.offset, packed_elements(all, unit), t.count()});
  }
  return all;
}

int64_t packed_elements(const std::vector<Segment>& segments, int64_t unit) {
  return segments.empty() ? 0 : (segments.back().packed + segments.back().count + unit - 1) / unit * unit;
}

std::vector<ElementSpan> shared_ends(const BucketContext& c) {
  if (c.spec.method != CompressionSpec::Method::wire || !c.spec.wire->masks) return {};
  const int64_t block = c.spec.wire->granularity;
  std::vector<ElementSpan> ends;
  // Parts of tensors in the latest block, in memory order.
  std::vector<ElementSpan> parts;
  int64_t parts_block = -1;
  const auto close = [&] {
    const auto longest =
        std::ranges::max_element(parts, {}, [](const ElementSpan& part) { return part.end - part.begin; });
    for (auto part = parts.begin(); part != parts.end(); ++part) {
      if (part != longest) ends.push_back(*part);
    }
    parts.clear();
  };
  // Each rank's shard begins with a new block.
  int64_t begin = 0;
  for (const int64_t count : c.shards.empty() ? Shards{c.elements} : c.shards) {
    const int64_t end = begin + count;
    for (const BucketTensor& t : c.tensors) {
      const int64_t first = std::max(t.offset, begin), last = std::min(t.offset + t.count(), end);
      if (first >= last) continue;
      const int64_t first_block = (first - begin) / block, last_block = (last - 1 - begin) / block;
      // Only the ends of a tensor can share a block with another tensor.
      for (const int64_t b : {first_block, last_block}) {
        if (b != parts_block) close();
        parts_block = b;
        parts.push_back({std::max(first, begin + b * block), std::min(last, begin + (b + 1) * block)});
        if (first_block == last_block) break;
      }
    }
    close();
    parts_block = -1;
    begin = end;
  }
  return ends;
}

std::unique_ptr<Codec> make_split_codec(const BucketContext& context) {
  BucketContext others = context;
  std::vector<BucketTensor> dense;
  std::erase_if(others.tensors, [&](const BucketTensor& t) {
    if (t.count() > 0 && !is_dense(context.spec, t)) return false;
    if (t.count() > 0) dense.push_back(t);
    return true;
  });
  std::vector<Segment> segments = pack_tensors(dense, DenseCodec::kUnit);
  others.aside = shared_ends(others);
  for (const ElementSpan& end : others.aside) {
    segments.push_back({end.begin, packed_elements(segments, DenseCodec::kUnit), end.end - end.begin});
  }
  if (segments.empty()) return make_compressing_codec(context);
  if (!others.tensors.empty()) return std::make_unique<DenseCodec>(context, others, segments);
  others.spec.method = CompressionSpec::Method::wire;
  others.spec.wire = kFp32;
  others.spec.policy = {.feedback = ResidualPolicy::Feedback::off};
  return make_wire_codec(others);
}

// The codec of a wire format (`fp32`, `bf16`, ...): the bucket is sent in one allreduce or, for a sharded
// reducer, in one reduce-scatter in place.
//
// The gaps between the bucket's tensors, and the parts that the codec does not compress, are zero. Some
// formats decode zeros to other values: a format of one bit per value has no zero, and NaN may spread over a
// block. So the codec resets the gaps to zero in the result, which is the next step's gradient in the gaps,
// and in the residual, because no tensor's state covers the gaps.

namespace {

// Returns the elements of the bucket that belong to no tensor or are in `aside`. The tensors must be in the
// order of their offsets.
std::vector<Segment> gaps_between(const BucketContext& c) {
  std::vector<Segment> gaps;
  int64_t end = 0;
  const auto gap_until = [&](int64_t begin) {
    if (begin > end) gaps.push_back({.scattered = end, .packed = 0, .count = begin - end});
  };
  auto aside = c.aside.begin();
  for (const BucketTensor& tensor : c.tensors) {
    gap_until(tensor.offset);
    end = tensor.offset;
    const int64_t tensor_end = tensor.offset + tensor.count();
    for (; aside != c.aside.end() && aside->begin < tensor_end; ++aside) {
      if (aside->begin > end) end = aside->begin;
      gap_until(aside->end);
      end = aside->end;
    }
    end = tensor_end;
  }
  gap_until(c.elements);
  return gaps;
}

bool all_keep_zero(const std::vector<Wire>& formats) {
  return std::ranges::all_of(formats, [](Wire wire) { return wire->keeps_zero(); });
}

class WireCodec final : public Codec {
 public:
  explicit WireCodec(const BucketContext& c)
      : policy_(c.spec.policy),
        residual_(c, !c.spec.wire->exact && policy_.keeps_errors()),
        name_(c.spec.wire->name),
        gradients_(c.gradients),
        gaps_(c.stream, all_keep_zero(c.spec.ramp_formats()) ? std::vector<Segment>() : gaps_between(c)),
        shard_(c.shards.empty()
                   ? 0
                   : std::accumulate(c.shards.begin(), c.shards.begin() + c.transport->rank(), int64_t{0})) {
    for (Wire wire : c.spec.ramp_formats()) add_stage(c, wire);
    c.stream.synchronize();
  }

  size_t workspace_bytes() const override {
    size_t bytes = 0;
    for (const Stage& stage : stages_) bytes = std::max(bytes, stage.program->workspace_bytes());
    return residual_.workspace_bytes() + bytes;
  }
  void bind(void* workspace) override {
    void* rest = residual_.bind(workspace);
    for (const Stage& stage : stages_) {
      stage.program->rebind_residual(residual_.values());
      stage.program->bind(rest);
    }
  }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    for (const Stage& stage : stages_) stage.program->rebind(gradients, gradients + shard_);
  }
  int64_t steady_from() const override { return policy_.ramp > 0 ? policy_.start + policy_.ramp : 0; }
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    residual_.begin_step(stream, phases);
    stages_[policy_.stage(step, stages_.size())].program->run(stream, &phases);
    if (gaps_.count() > 0) {
      phases.enter(stream, Phase::decompress);
      pack(stream, {&gaps_, gradients_, nullptr, true});
      if (residual_) pack(stream, {&gaps_, residual_.values(), nullptr, true});
    }
    residual_.store(stream, phases);
  }
  Residual* residual() override { return residual_ ? &residual_ : nullptr; }
  int64_t state_bytes() const override { return residual_.bytes(); }
  std::string describe() const override { return name_ + residual_.describe(); }

  std::vector<PlannedAllreduce> plan() const override {
    const SchedulePlanner::Choice& choice = stages_.back().choice;
    return {{"", choice.schedule.kind, choice.reason}};
  }

 private:
  // A format of the ramp, and its allreduce.
  struct Stage {
    SchedulePlanner::Choice choice;
    std::unique_ptr<Program> program;
  };

  void add_stage(const BucketContext& c, Wire wire) {
    SchedulePlanner::Choice choice =
        c.shards.empty() ? c.choose(c.elements, wire) : c.scatter_planner->choose(c.elements, wire, c.shards);
    Program::Options options = c.compressed_options("", choice.slice_bytes);
    options.wire = wire;
    if (!wire->stochastic) options.rounding.mode = Rounding::nearest;
    auto program = std::make_unique<Program>(*c.transport, choice.schedule,
                                             ProgramBuffers{.in = c.gradients,
                                                            .out = c.gradients + shard_,
                                                            .residual = residual_.values(),
                                                            .count = c.elements,
                                                            .shards = c.shards},
                                             std::move(options));
    stages_.push_back({std::move(choice), std::move(program)});
  }

  const ResidualPolicy policy_;
  Residual residual_;
  std::string name_;
  float* gradients_;
  SegmentTable gaps_;
  const int64_t shard_;        // begin of this rank's shard; 0 in an allreduce
  std::vector<Stage> stages_;  // the last in the spec's format
};

}  // namespace

std::unique_ptr<Codec> make_wire_codec(const BucketContext& context) {
  return std::make_unique<WireCodec>(context);
}

}  // namespace gradwire
