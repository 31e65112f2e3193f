// Leaves tensors alone that no rank used in a step, as frameworks do: a tensor whose gradient is zero on
// every rank gets a gradient of zero, and its state (residual, momentum, estimates, factors) keeps its bits.
// Without this codec the residual would be sent in a mean that DistributedDataParallel throws away.
//
// Ranks add up one float per tensor before each step. The state of an unused tensor is copied to the host
// before the step and back after it. On CUDA the host waits for both, so steps cannot be captured in a graph.
// With residual=int8, values that share a block with a used tensor are rounded to the block's unit.
#include <algorithm>
#include <limits>

#include "collectives/codec/codec.h"

namespace gradwire {
namespace {

// Elements of a gradient on CUDA that are copied to the host at a time.
constexpr int64_t kPiece = 1024;

class UnusedCodec final : public Codec {
 public:
  UnusedCodec(const BucketContext& c, std::unique_ptr<Codec> codec)
      : codec_(std::move(codec)),
        tensors_(c.tensors),
        gradients_(c.gradients),
        counts_(tensors_.size()),
        sums_(make_buffer<float>(c.transport->device(), static_cast<int64_t>(tensors_.size()))),
        choice_(c.choose(static_cast<int64_t>(tensors_.size()), kFp32)),
        allreduce_(*c.transport, choice_.schedule,
                   {sums_.data(), sums_.data(), nullptr, static_cast<int64_t>(tensors_.size())},
                   c.plain_options("used tensors", choice_.slice_bytes)) {}

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
    enqueue(stream, [this](const Stream& s) { count_used(s); });
    allreduce_.run(stream, &phases);
    phases.enter(stream, Phase::compress);
    enqueue(stream, [this](const Stream& s) { save_unused(s); });
    codec_->run(stream, step, phases);
    phases.enter(stream, Phase::decompress);
    enqueue(stream, [this](const Stream& s) { restore_unused(s); });
  }
  int64_t steady_from() const override { return std::numeric_limits<int64_t>::max(); }
  int64_t period() const override { return codec_->period(); }
  Residual* residual() override { return codec_->residual(); }
  std::vector<TensorState> tensor_state() override { return codec_->tensor_state(); }
  int64_t state_bytes() const override { return codec_->state_bytes() + static_cast<int64_t>(sums_.bytes()); }
  std::string describe() const override { return codec_->describe(); }
  std::vector<PlannedAllreduce> plan() const override { return codec_->plan(); }

 private:
  struct Saved {
    TensorState state;
    std::vector<std::byte> bytes = {};
  };

  // Runs `work` at this point of the stream; on CUDA now, with work that it enqueues.
  static void enqueue(const Stream& stream, std::function<void(const Stream&)> work) {
    if (stream.device().is_cuda()) return work(stream);
    stream.submit([work = std::move(work)] { work(Stream::immediate_host()); });
  }

  bool is_used(const Stream& stream, const BucketTensor& tensor) {
    const float* values = gradients_ + tensor.offset;
    const auto is_nonzero = [](float value) { return value != 0.0f; };  // also NaN
    if (stream.device().is_host()) return std::any_of(values, values + tensor.count(), is_nonzero);
    piece_.resize(kPiece);
    for (int64_t at = 0; at < tensor.count(); at += kPiece) {
      const int64_t count = std::min(kPiece, tensor.count() - at);
      copy(stream, piece_.data(), values + at, static_cast<size_t>(count) * sizeof(float));
      stream.synchronize();
      if (std::any_of(piece_.begin(), piece_.begin() + count, is_nonzero)) return true;
    }
    return false;
  }

  void count_used(const Stream& stream) {
    for (size_t i = 0; i < tensors_.size(); ++i) counts_[i] = is_used(stream, tensors_[i]) ? 1.0f : 0.0f;
    copy(stream, sums_.data(), counts_.data(), counts_.size() * sizeof(float));
  }

  bool is_unused(size_t i) const { return counts_[i] == 0.0f && tensors_[i].count() > 0; }

  void save_unused(const Stream& stream) {
    copy(stream, counts_.data(), sums_.data(), counts_.size() * sizeof(float));
    stream.synchronize();
    saved_.clear();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!is_unused(i)) continue;
      const BucketTensor& t = tensors_[i];
      if (const Residual* residual = codec_->residual()) {
        saved_.push_back({.state = {.tensor = t.index,
                                    .kind = kResidualKind,
                                    .residual = residual,
                                    .first = t.offset,
                                    .shape = {t.count()}}});
      }
      for (const TensorState& state : codec_->tensor_state()) {
        if (state.tensor == t.index) saved_.push_back({.state = state});
      }
    }
    for (Saved& saved : saved_) {
      saved.bytes.resize(static_cast<size_t>(saved.state.bytes()));
      saved.state.read(stream, 0, saved.bytes);
    }
    stream.synchronize();
  }

  void restore_unused(const Stream& stream) {
    for (const Saved& saved : saved_) saved.state.write(stream, 0, saved.bytes);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!is_unused(i)) continue;
      fill_zero(stream, gradients_ + tensors_[i].offset,
                static_cast<size_t>(tensors_[i].count()) * sizeof(float));
    }
    if (stream.device().is_cuda()) stream.synchronize();  // saved_ is host memory
  }

  const std::unique_ptr<Codec> codec_;
  const std::vector<BucketTensor> tensors_;
  float* gradients_;
  std::vector<float> counts_;  // [tensor]: 1 if this rank used it; after the exchange the mean over the ranks
  Buffer sums_;
  const SchedulePlanner::Choice choice_;
  Program allreduce_;
  std::vector<Saved> saved_;
  std::vector<float> piece_;
};

}  // namespace

std::unique_ptr<Codec> make_unused_codec(const BucketContext& context, std::unique_ptr<Codec> codec) {
  // FP32 averages zeros to zeros.
  const bool exact = context.spec.method == CompressionSpec::Method::wire && context.spec.wire->exact;
  if (exact && codec->residual() == nullptr && codec->tensor_state().empty()) return codec;
  return std::make_unique<UnusedCodec>(context, std::move(codec));
}

}  // namespace gradwire
