#include "trainer/model/vit.h"

#include "kernels/wire/bf16.h"
#include "runtime/error.h"

namespace gradwire {

Vit::Vit(const VitConfig& config, const Stream& stream, ParameterLayout layout, Options options)
    : config_(config), stream_(stream), parameters_(vit_parameters(config)), layout_(std::move(layout)) {
  check_model(config);
  if (options.max_batch < 1) throw BadInput("Vit: max_batch is " + std::to_string(options.max_batch));
  if (layout_.offsets.size() != parameters_.size()) {
    throw Error("Vit: a layout of " + std::to_string(layout_.offsets.size()) + " tensors for " +
                std::to_string(parameters_.size()) + " parameters");
  }
  const bool rounds = options.precision == Precision::bf16;
  if (options.share != nullptr) {
    weights_ = options.share->weights_;
    rounded_ = options.share->rounded_;
    if (options.share->layout_.elements < layout_.elements || static_cast<bool>(rounded_) != rounds) {
      throw Error("Vit: the shared weights are of another layout or precision");
    }
  } else {
    weights_ = make_buffer<float>(stream_.device(), layout_.elements);
    if (rounds) rounded_ = make_buffer<Bf16>(stream_.device(), layout_.elements);
  }
  passes_ = make_vit_passes(config_, stream_, parameters_, layout_,
                            {.max_batch = options.max_batch,
                             .precision = options.precision,
                             .training = options.training,
                             .weights = weights_,
                             .rounded_weights = rounded_});
}

void Vit::load(std::span<const float> values) {
  if (static_cast<int64_t>(values.size()) != layout_.elements) {
    throw Error("Vit::load: " + std::to_string(values.size()) + " values for " +
                std::to_string(layout_.elements));
  }
  to_device(stream_, weights_.as<float>(), values);
  round_weights();
}

void Vit::round_weights() {
  if (!rounded_) return;
  // The nearest BF16 is what the wire format's encoder stores.
  bf16_reduce_encode(
      stream_, {.own = weights_.as<float>(), .wire = rounded_.as<Bf16>(), .count = layout_.elements});
}

}  // namespace gradwire
