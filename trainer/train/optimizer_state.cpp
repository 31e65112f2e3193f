#include "trainer/train/optimizer_state.h"

#include <cmath>

#include "kernels/optimizer/optimizer.h"

namespace gradwire {

Optimizer::Optimizer(const TrainConfig& config, const Stream& stream, std::vector<ElementRange> parts)
    : kind_(config.optimizer),
      parts_(std::move(parts)),
      momentum_(config.momentum),
      beta1_(config.beta1),
      beta2_(config.beta2),
      eps_(config.eps),
      weight_decay_(config.weight_decay),
      scalars_(stream.device(), sizeof(OptimizerScalars)) {
  for (const ElementRange& part : parts_) elements_ += part.count();
  if (kind_ == OptimizerKind::adamw || momentum_ != 0.0) {
    first_ = make_buffer<float>(stream.device(), elements_);
    fill_zero(stream, first_.data(), first_.bytes());
  }
  if (kind_ == OptimizerKind::adamw) {
    second_ = make_buffer<float>(stream.device(), elements_);
    fill_zero(stream, second_.data(), second_.bytes());
  }
}

void Optimizer::prepare(const Stream& stream, int64_t step, double lr) {
  OptimizerScalars scalars{.lr = static_cast<float>(lr)};
  if (kind_ == OptimizerKind::adamw) {
    double t = static_cast<double>(step + 1);
    scalars.correction1 = static_cast<float>(1.0 - std::pow(beta1_, t));
    scalars.correction2 = static_cast<float>(1.0 - std::pow(beta2_, t));
  }
  store(stream, scalars_.data(), &scalars, sizeof scalars);
}

void Optimizer::step(const Stream& stream, Parts<float> params, Parts<const float> grads, Bf16* rounded) {
  int64_t first = 0;
  for (const ElementRange& part : parts_) {
    step_part(stream, params.data + (params.packed ? first : part.begin),
              grads.data + (grads.packed ? first : part.begin),
              rounded == nullptr ? nullptr : rounded + part.begin, first, part.count());
    first += part.count();
  }
}

void Optimizer::step(const Stream& stream, float* params, const float* grads, ElementRange range,
                     Bf16* rounded) {
  step_part(stream, params + range.begin, grads + range.begin,
            rounded == nullptr ? nullptr : rounded + range.begin, range.begin, range.count());
}

void Optimizer::step_part(const Stream& stream, float* params, const float* grads, Bf16* rounded,
                          int64_t first, int64_t count) {
  if (count == 0) return;
  auto from = [first](const Buffer& state) { return state ? state.as<float>() + first : nullptr; };
  if (kind_ == OptimizerKind::sgd) {
    sgd_step(stream, {.params = params,
                      .grads = grads,
                      .velocity = from(first_),
                      .count = count,
                      .momentum = static_cast<float>(momentum_),
                      .weight_decay = static_cast<float>(weight_decay_),
                      .scalars = scalars_.as<OptimizerScalars>(),
                      .rounded = rounded});
  } else {
    adamw_step(stream, {.params = params,
                        .grads = grads,
                        .m = from(first_),
                        .v = from(second_),
                        .count = count,
                        .beta1 = static_cast<float>(beta1_),
                        .beta2 = static_cast<float>(beta2_),
                        .eps = static_cast<float>(eps_),
                        .weight_decay = static_cast<float>(weight_decay_),
                        .scalars = scalars_.as<OptimizerScalars>(),
                        .rounded = rounded});
  }
}

std::vector<FlatState> Optimizer::moments() const {
  if (kind_ == OptimizerKind::adamw)
    return {{"m", {first_.as<float>(), true}}, {"v", {second_.as<float>(), true}}};
  if (first_) return {{"velocity", {first_.as<float>(), true}}};
  return {};
}

}  // namespace gradwire
