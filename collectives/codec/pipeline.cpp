#include "collectives/codec/pipeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/passes/passes.h"
#include "kernels/wire/floats.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr int64_t kUnit = 4;  // alignment of packed dense tensors, in elements, for vectorized kernels
// Elements of a gradient on CUDA that are copied to the host at a time.
constexpr int64_t kPiece = 1024;

// Returns the parts of tensors that must leave the bucket so that no block of its wire format holds values of
// two tensors, by offset. In a block that tensors share, only the longest part stays. Empty if a non-finite
// value does not delay other values (WireFormat::masks).
std::vector<ElementRange> shared_ends(const BucketContext& c) {
  if (c.spec.method != CompressionSpec::Method::wire || !c.spec.wire->masks) return {};
  const int64_t block = c.spec.wire->granularity;
  std::vector<ElementRange> ends;
  // Parts of tensors in the latest block, in memory order.
  std::vector<ElementRange> parts;
  int64_t parts_block = -1;
  const auto close = [&] {
    const auto longest = std::ranges::max_element(parts, {}, &ElementRange::count);
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
// Returns the elements of the tensors, in the order of their offsets, without `ends`.
std::vector<ElementRange> ranges_without(const std::vector<BucketTensor>& tensors,
                                         const std::vector<ElementRange>& ends) {
  std::vector<ElementRange> ranges;
  auto part = ends.begin();
  for (const BucketTensor& t : tensors) {
    int64_t begin = t.offset;
    const int64_t end = t.offset + t.count();
    for (; part != ends.end() && part->begin < end; ++part) {
      if (part->begin > begin) ranges.push_back({begin, part->begin});
      begin = part->end;
    }
    if (begin < end) ranges.push_back({begin, end});
  }
  return ranges;
}

// Runs `work` at this point of the stream; on CUDA now, with work that it enqueues.
void enqueue(const Stream& stream, std::function<void(const Stream&)> work) {
  if (stream.device().is_cuda()) return work(stream);
  stream.submit([work = std::move(work)] { work(Stream::immediate_host()); });
}

}  // namespace

BucketPipeline::BucketPipeline(const BucketContext& c, std::unique_ptr<Codec> codec)
    : policy_(codec ? ResidualPolicy{} : c.spec.policy),
      tensors_(c.tensors),
      gradients_(c.gradients),
      elements_(c.elements),
      shard_(c.shards.empty()
                 ? 0
                 : std::accumulate(c.shards.begin(), c.shards.begin() + c.transport->rank(), int64_t{0})),
      codec_(std::move(codec)),
      unit_(c.scale == 1.0f ? 1.0f / static_cast<float>(c.transport->world()) : 1.0f),
      max_norm_(static_cast<float>(policy_.max_norm / std::sqrt(c.transport->world()))) {
  if (codec_ == nullptr) add_average(c);
  add_policies(c);
  // FP32 averages zeros to zeros.
  const bool exact = c.spec.method == CompressionSpec::Method::wire && c.spec.wire->exact;
  if (c.skip_unused && (!exact || residual() != nullptr || !tensor_state().empty())) {
    counts_.resize(tensors_.size());
    sums_ = make_buffer<float>(c.transport->device(), std::ssize(tensors_));
    used_allreduce_ =
        c.allreduce("used tensors", kFp32, {sums_.data(), sums_.data(), nullptr, std::ssize(tensors_)});
  }
  c.stream.synchronize();
}

void BucketPipeline::add_average(const BucketContext& c) {
  BucketContext rest = c;  // without dense tensors
  std::vector<BucketTensor> dense;
  std::erase_if(rest.tensors, [&](const BucketTensor& t) {
    if (t.count() > 0 && !is_dense(c.spec, t)) return false;
    if (t.count() > 0) dense.push_back(t);
    return true;
  });
  std::vector<Segment> segments = pack_tensors(dense, kUnit);
  const std::vector<ElementRange> ends = shared_ends(rest);
  for (const ElementRange& end : ends) {
    segments.push_back({end.begin, packed_elements(segments, kUnit), end.count()});
  }
  const bool only_dense = rest.tensors.empty() && !segments.empty();
  if (only_dense) {
    rest.spec.method = CompressionSpec::Method::wire;
    rest.spec.wire = kFp32;
    rest.spec.policy = {.feedback = ResidualPolicy::Feedback::off};
  } else if (segments.empty()) {
    rest.tensors = c.tensors;
  }
  if (policy_.momentum > 0) masked_ = ranges_without(rest.tensors, ends);
  codec_ = make_codec(rest);
  if (codec_ == nullptr) {
    format_name_ = rest.spec.wire->name;
    residual_.emplace(rest, !rest.spec.wire->exact && rest.spec.policy.keeps_errors());
    const std::vector<Wire> formats = rest.spec.ramp_formats();
    // Gaps between tensors, and dense parts, are zero. Some formats decode zeros to other values: a format of
    // one bit per value has no zero, and NaN may spread over a block. So the step resets the gaps to zero in
    // the result, which is the next step's gradient in the gaps, and in the residual, because no tensor's
    // state covers the gaps.
    if (!std::ranges::all_of(formats, &WireFormat::keeps_zero)) {
      std::vector<Segment> gaps;
      for (const ElementRange& part : ends) gaps.push_back({part.begin, 0, part.count()});
      int64_t end = 0;
      for (const BucketTensor& t : rest.tensors) {
        if (t.offset > end) gaps.push_back({end, 0, t.offset - end});
        end = t.offset + t.count();
      }
      if (elements_ > end) gaps.push_back({end, 0, elements_ - end});
      gaps_ = SegmentTable(c.stream, gaps);
    }
    for (Wire wire : formats) formats_.push_back(plan_format(rest, wire, residual_->values()));
  }
  if (segments.empty() || only_dense) return;
  const int64_t count = packed_elements(segments, kUnit);
  dense_ = SegmentTable(c.stream, std::move(segments));
  packed_ = c.zeros(count);
  loaded_ = c.zeros(average_residual() != nullptr ? count : 0);
  dense_allreduce_ = c.allreduce("dense tensors", kFp32, {packed_.data(), packed_.data(), nullptr, count});
}

void BucketPipeline::add_policies(const BucketContext& c) {
  if (policy_.start > 0) {
    BucketContext plain = c;
    plain.spec = CompressionSpec();  // FP32
    plain.spec.schedule = c.spec.schedule;
    plain.name += ", before compression starts";
    plain_ = plan_format(plain, kFp32, nullptr);
  }
  if (!c.shards.empty() && (estimates() || (policy_.momentum > 0 && elements_ > 0))) {
    throw BadInput(
        "compression spec '{}': {} needs the whole mean on every rank, but a sharded reducer gives each "
        "rank its part; use ef=on without momentum",
        c.spec.to_string(), estimates() ? "ef=ef21" : "momentum");
  }
  estimate_ = c.zeros(estimates() ? elements_ : 0);
  deviation_ = c.zeros(estimates() && average_residual() == nullptr ? elements_ : 0);
  momentum_ = c.zeros(policy_.momentum > 0 ? elements_ : 0);
  size_t bytes = estimate_.bytes();
  for (const BucketTensor& t : tensors_) {
    if (max_norm_ > 0) bytes = std::max(bytes, static_cast<size_t>(clip_chunks(t.count())) * sizeof(double));
  }
  scratch_bytes_ = (bytes + 255) / 256 * 256;
}

BucketAllreduce BucketPipeline::plan_format(const BucketContext& c, Wire wire, float* residual) const {
  return c.allreduce("", wire,
                     {.in = c.gradients,
                      .out = c.gradients + shard_,
                      .residual = residual,
                      .count = c.elements,
                      .shards = c.shards});
}

Residual* BucketPipeline::average_residual() {
  if (codec_) return codec_->residual();
  return residual_ && *residual_ ? &*residual_ : nullptr;
}

float* BucketPipeline::deviation() {
  Residual* const residual = average_residual();
  return residual != nullptr ? residual->values() : deviation_.as<float>();
}

// The stages share one workspace, because they do not run concurrently.
size_t BucketPipeline::workspace_bytes() const {
  size_t bytes = codec_ ? codec_->workspace_bytes() : 0;
  for (const BucketAllreduce& a : formats_) bytes = std::max(bytes, a.program->workspace_bytes());
  if (residual_) bytes += residual_->workspace_bytes();
  for (const BucketAllreduce* a : {&plain_, &dense_allreduce_}) {
    if (a->program) bytes = std::max(bytes, a->program->workspace_bytes());
  }
  bytes += scratch_bytes_;
  return used_allreduce_.program ? std::max(bytes, used_allreduce_.program->workspace_bytes()) : bytes;
}

void BucketPipeline::bind(void* workspace) {
  scratch_ = workspace;
  void* const rest = static_cast<std::byte*>(workspace) + scratch_bytes_;
  if (codec_) codec_->bind(rest);
  void* const after = residual_ ? residual_->bind(rest) : rest;
  for (const BucketAllreduce& a : formats_) {
    a.program->rebind_residual(residual_->values());
    a.program->bind(after);
  }
  if (plain_.program) plain_.program->bind(rest);
  if (dense_allreduce_.program) dense_allreduce_.program->bind(rest);
  if (used_allreduce_.program) used_allreduce_.program->bind(workspace);
}

void BucketPipeline::rebind(float* gradients) {
  gradients_ = gradients;
  if (codec_) codec_->rebind(gradients);
  for (const BucketAllreduce& a : formats_) a.program->rebind(gradients, gradients + shard_);
  if (plain_.program) plain_.program->rebind(gradients, gradients + shard_);
}

void BucketPipeline::run(const Stream& stream, int64_t step, BucketPhases& phases) {
  if (used_allreduce_.program) {
    phases.enter(stream, Phase::compress);
    enqueue(stream, [this](const Stream& s) { count_used(s); });
    used_allreduce_.program->run(stream, &phases);
    phases.enter(stream, Phase::compress);
    enqueue(stream, [this](const Stream& s) { save_unused(s); });
  }
  auto* const momentum = momentum_.as<float>();
  if (max_norm_ > 0 || estimates() || momentum_) phases.enter(stream, Phase::compress);
  for (size_t i = 0; max_norm_ > 0 && i < tensors_.size(); ++i) {
    const BucketTensor& t = tensors_[i];
    clip_norm(stream, {gradients_ + t.offset, static_cast<double*>(scratch_), max_norm_, t.count()});
  }
  auto* const kept = static_cast<float*>(scratch_);
  if (estimates()) {
    ef21_difference(stream, {gradients_, deviation(), estimate_.as<const float>(), kept, unit_, elements_});
  }
  if (momentum_)
    momentum_add(stream, {gradients_, momentum, static_cast<float>(policy_.momentum), elements_});

  const bool plain = step < policy_.start;
  if (plain) {
    plain_.program->run(stream, &phases);
  } else {
    if (dense_allreduce_.program) pack_dense(stream, phases);
    if (codec_) {
      codec_->run(stream, step, phases);
    } else {
      residual_->load(stream, phases, true);
      formats_[policy_.stage(step, formats_.size())].program->run(stream, &phases);
      if (gaps_.count() > 0) {
        phases.enter(stream, Phase::decompress);
        pack(stream, {&gaps_, gradients_, nullptr, true});
        if (*residual_) pack(stream, {&gaps_, residual_->values(), nullptr, true});
      }
      residual_->store(stream, phases);
    }
    if (dense_allreduce_.program) {
      phases.enter(stream, Phase::decompress);
      pack(stream, {&dense_, gradients_, packed_.as<float>(), true});
    }
  }

  const bool masks = momentum_ && !plain;
  if (estimates() || masks) phases.enter(stream, Phase::decompress);
  if (estimates()) {
    if (average_residual() != nullptr) average_residual()->settle(stream);
    ef21_update(stream, {gradients_, deviation(), estimate_.as<float>(), kept, unit_, elements_});
  }
  for (size_t i = 0; masks && i < masked_.size(); ++i) {
    momentum_mask(stream, {gradients_ + masked_[i].begin, momentum + masked_[i].begin, masked_[i].count()});
  }
  if (used_allreduce_.program) {
    phases.enter(stream, Phase::decompress);
    enqueue(stream, [this](const Stream& s) { restore_unused(s); });
  }
}

// Moves dense tensors and ends to the separate buffer, and averages them. A loaded state, perhaps from
// another layout, may hold residuals of dense tensors and ends: they are added to the values and cleared,
// because the averages overwrite the codec's output.
void BucketPipeline::pack_dense(const Stream& stream, BucketPhases& phases) {
  auto* const values = packed_.as<float>();
  phases.enter(stream, Phase::compress);
  pack(stream, {&dense_, gradients_, values, false});
  pack(stream, {&dense_, gradients_, nullptr, true});
  Residual* const residual = average_residual();
  if (loaded_ && residual->take_written()) {
    residual->load(stream, phases);
    pack(stream, {&dense_, residual->values(), loaded_.as<float>(), false});
    pack(stream, {&dense_, residual->values(), nullptr, true});
    fp32_reduce(stream, {.inputs = {loaded_.as<const float>()},
                         .num_inputs = 1,
                         .own = values,
                         .out = values,
                         .count = static_cast<int64_t>(packed_.bytes() / sizeof(float))});
    residual->store(stream, phases);
  }
  dense_allreduce_.program->run(stream, &phases);
  phases.enter(stream, Phase::compress);
}

int64_t BucketPipeline::steady_from() const {
  if (used_allreduce_.program) return std::numeric_limits<int64_t>::max();
  return std::max(codec_                ? codec_->steady_from()
                  : formats_.size() > 1 ? policy_.start + policy_.ramp
                                        : 0,
                  policy_.start);
}

std::vector<TensorState> BucketPipeline::tensor_state() {
  std::vector<TensorState> all = codec_ ? codec_->tensor_state() : std::vector<TensorState>();
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

int64_t BucketPipeline::state_bytes() const {
  int64_t bytes = codec_ ? codec_->state_bytes() : residual_->bytes();
  for (const Buffer* b : {&packed_, &loaded_, &estimate_, &deviation_, &momentum_, &sums_}) {
    bytes += static_cast<int64_t>(b->bytes());
  }
  return bytes;
}

std::string BucketPipeline::describe() const {
  std::string text = codec_ ? codec_->describe() : format_name_ + residual_->describe();
  if (dense_.count() > 0) {
    text += fmt::format("; {} dense tensors or ends of {} in fp32", dense_.count(),
                        packed_.bytes() / sizeof(float));
  }
  if (estimates()) text += ", by EF21";
  if (momentum_) text += fmt::format(", momentum {}", policy_.momentum);
  if (max_norm_ > 0) text += fmt::format(", gradients clipped to norm {:.3g} on each rank", max_norm_);
  if (plain_.program) text += fmt::format(", from step {} on", policy_.start);
  return text;
}

PlannedAllreduces BucketPipeline::plan() const {
  PlannedAllreduces all = codec_ ? codec_->plan() : PlannedAllreduces();
  if (!formats_.empty()) all.emplace_back("", &formats_.back().choice);
  if (dense_allreduce_.program) all.emplace_back("dense tensors", &dense_allreduce_.choice);
  return all;
}

void BucketPipeline::count_used(const Stream& stream) {
  const auto is_nonzero = [](float value) { return value != 0.0f; };  // also NaN
  const auto is_used = [&](const float* values, int64_t count) {
    if (stream.device().is_host()) return std::any_of(values, values + count, is_nonzero);
    std::array<float, kPiece> piece;
    for (int64_t at = 0; at < count; at += kPiece) {
      const int64_t part = std::min(kPiece, count - at);
      copy(stream, piece.data(), values + at, static_cast<size_t>(part) * sizeof(float));
      stream.synchronize();
      if (std::any_of(piece.begin(), piece.begin() + part, is_nonzero)) return true;
    }
    return false;
  };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    counts_[i] = is_used(gradients_ + tensors_[i].offset, tensors_[i].count()) ? 1.0f : 0.0f;
  }
  copy(stream, sums_.data(), counts_.data(), counts_.size() * sizeof(float));
}

void BucketPipeline::save_unused(const Stream& stream) {
  copy(stream, counts_.data(), sums_.data(), counts_.size() * sizeof(float));
  stream.synchronize();
  saved_.clear();
  unused_.clear();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const BucketTensor& t = tensors_[i];
    if (counts_[i] != 0.0f || t.count() == 0) continue;
    unused_.push_back(i);
    TensorState whole{.tensor = t.index, .kind = kResidualKind, .residual = residual(), .first = t.offset};
    whole.shape = {t.count()};
    if (whole.residual != nullptr) saved_.emplace_back(std::move(whole), std::vector<std::byte>());
    for (TensorState& state : tensor_state()) {
      if (state.tensor == t.index) saved_.emplace_back(std::move(state), std::vector<std::byte>());
    }
  }
  for (auto& [state, bytes] : saved_) {
    bytes.resize(static_cast<size_t>(state.bytes()));
    state.read(stream, 0, bytes);
  }
  stream.synchronize();
}

void BucketPipeline::restore_unused(const Stream& stream) {
  for (const auto& [state, bytes] : saved_) state.write(stream, 0, bytes);
  for (const size_t i : unused_) {
    fill_zero(stream, gradients_ + tensors_[i].offset,
              static_cast<size_t>(tensors_[i].count()) * sizeof(float));
  }
  if (stream.device().is_cuda()) stream.synchronize();  // saved_ is host memory
}

}  // namespace gradwire
