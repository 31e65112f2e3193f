// A codec with its own state, as a user might write. docs/extending.md promises that such state is preserved.
//
// The codec sends bf16 with error feedback, then applies momentum to the averaged gradients in double
// precision: the result is velocity = 0.5 velocity + gradient. Host only.
#pragma once

#include <memory>
#include <vector>

#include "collectives/codec/pipeline.h"
#include "collectives/program/program.h"

namespace gradwire::testing {

class OwnCodec final : public Codec {
 public:
  explicit OwnCodec(const BucketContext& c)
      : inner_(c),
        tensors_(c.tensors),
        gradients_(c.gradients),
        velocity_(static_cast<size_t>(c.elements)),
        seen_(2 * c.tensors.size(), static_cast<int16_t>(100 * c.transport->rank())) {}

  size_t workspace_bytes() const override { return inner_.workspace_bytes(); }
  void bind(void* workspace) override { inner_.bind(workspace); }
  void rebind(float* gradients) override {
    gradients_ = gradients;
    inner_.rebind(gradients);
  }
  void run(const Stream& stream, int64_t step, BucketPhases& phases) override {
    inner_.run(stream, step, phases);
    stream.submit([this, gradients = gradients_] {
      for (const BucketTensor& t : tensors_) {
        for (int64_t i = t.offset; i < t.offset + t.count(); ++i) {
          velocity_[i] = 0.5 * velocity_[i] + gradients[i];
          gradients[i] = static_cast<float>(velocity_[i]);
        }
      }
      for (int16_t& seen : seen_) ++seen;
    });
  }
  Residual* residual() override { return inner_.residual(); }
  std::vector<TensorState> tensor_state() override {
    std::vector<TensorState> all;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const BucketTensor& tensor = tensors_[t];
      all.push_back({.tensor = tensor.index,
                     .kind = "velocity",
                     .dtype = DType::f64,
                     .data = velocity_.data() + tensor.offset,
                     .shape = {tensor.rows, tensor.cols},
                     .same_on_all_ranks = true});
      all.push_back({.tensor = tensor.index,
                     .kind = "seen",
                     .dtype = DType::i16,
                     .data = seen_.data() + 2 * t,
                     .shape = {2}});
    }
    return all;
  }
  int64_t state_bytes() const override {
    return inner_.state_bytes() + static_cast<int64_t>(velocity_.size() * 8 + seen_.size() * 2);
  }
  std::string describe() const override { return "a test's own codec"; }
  PlannedAllreduces plan() const override { return inner_.plan(); }

 private:
  BucketPipeline inner_;
  std::vector<BucketTensor> tensors_;
  float* gradients_;
  std::vector<double> velocity_;
  std::vector<int16_t> seen_;  // Two values per tensor, each steps + 100 * rank.
};

inline std::unique_ptr<Codec> make_own_codec(const BucketContext& context) {
  return std::make_unique<OwnCodec>(context);
}

}  // namespace gradwire::testing
