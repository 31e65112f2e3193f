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
#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <numeric>

#include "collectives/codec/dense.h"
#include "kernels/wire/fp32.h"
#include "runtime/util/error.h"

namespace gradwire {
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
        packed_(c.exchanged(elements_)),
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

bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor) {
  const bool vector = tensor.rows <= 1 || tensor.cols <= 1;
  const bool small = vector ? tensor.count() <= kLongestVector : tensor.count() < kSmallMatrix;
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
        fmt::format("compression spec '{}': no tensor of the model matches dense={}; their names are "
                    "such as {}",
                    spec.to_string(), name, tensors.empty() ? "" : tensors.front()));
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

}  // namespace gradwire
