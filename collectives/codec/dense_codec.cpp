// `dense=`: the named tensors of a bucket in FP32, the others through another codec. One step:
//   pack         dense tensors into a buffer of their own; zeros take their places in the bucket
//   allreduce    that buffer, FP32
//   the codec    of the whole bucket, which sees zeros there
//   unpack       the averages into their places
// One small exchange more than without; the zeros cost as many bytes as the codec's format takes for them, an
// eighth of the tensors' FP32 or less in the formats that do this by default. Nothing is copied but the dense
// tensors: 20 bytes for each of their elements.
//
// A bucket of dense tensors alone is one FP32 allreduce in place.
#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "collectives/codec/dense.h"
#include "runtime/error.h"

namespace gradwire {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

class DenseCodec final : public Codec {
 public:
  DenseCodec(const BucketContext& c, const BucketContext& others, const std::vector<BucketTensor>& dense)
      : codec_(make_compressing_codec(others)),
        segments_(c.stream, pack_tensors(dense, 0)),
        elements_(packed_elements(segments_.host(), 0)),
        gradients_(c.gradients),
        packed_(c.exchanged(elements_)),
        choice_(c.choose(elements_, kFp32)),
        allreduce_(*c.transport, choice_.schedule, {packed_.data(), packed_.data(), nullptr, elements_},
                   {.what = c.name + " (dense tensors)",
                    .part = "dense tensors",
                    .scale = c.scale,
                    .spec = c.spec.to_string(),
                    .transfers = c.transfers,
                    .beside_others = c.beside_others,
                    .slice_bytes = choice_.slice_bytes}) {
    fill_zero(c.stream, packed_.data(), packed_.bytes());
    c.stream.synchronize();
  }

  // One for both: they do not run at the same time.
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
    return codec_->state_bytes() + static_cast<int64_t>(packed_.bytes());
  }
  std::string describe() const override {
    return fmt::format("{}; {} dense tensors of {} in FP32", codec_->describe(), segments_.count(),
                       elements_);
  }
  std::vector<PlannedAllreduce> plan() const override {
    std::vector<PlannedAllreduce> all = codec_->plan();
    all.push_back({"dense tensors", choice_.schedule.kind, choice_.reason});
    return all;
  }

 private:
  std::unique_ptr<Codec> codec_;
  SegmentTable segments_;
  int64_t elements_;
  float* gradients_;
  Buffer packed_;
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

std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t first) {
  std::vector<Segment> all;
  for (const BucketTensor& t : tensors) {
    if (t.count() == 0) continue;
    all.push_back({t.offset, first + packed_elements(all, first), t.count()});
  }
  return all;
}

int64_t packed_elements(const std::vector<Segment>& segments, int64_t first) {
  return segments.empty() ? 0 : (segments.back().packed + segments.back().count + 3) / 4 * 4 - first;
}

std::unique_ptr<Codec> make_dense_codec(const BucketContext& context) {
  BucketContext others = context;
  std::vector<BucketTensor> dense;
  std::erase_if(others.tensors, [&](const BucketTensor& t) {
    if (t.count() > 0 && !is_dense(context.spec, t)) return false;
    if (t.count() > 0) dense.push_back(t);
    return true;
  });
  if (dense.empty()) return make_compressing_codec(context);
  if (!others.tensors.empty()) return std::make_unique<DenseCodec>(context, others, dense);
  others.spec.method = CompressionSpec::Method::wire;
  others.spec.wire = kFp32;
  return make_wire_codec(others);
}

}  // namespace gradwire
