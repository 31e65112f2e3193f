#include "trainer/train/optimizer_state.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/optimizer/optimizer.h"

namespace gradwire {

Optimizer::Optimizer(const TrainConfig& config, const Stream& stream, std::vector<ElementRange> parts,
                     const std::vector<FlatMatrix>& matrices)
    : kind_(config.optimizer),
      parts_(std::move(parts)),
      dion_rate_(config.lr > 0 ? config.dion_lr / config.lr : 0),
      momentum_(config.momentum),
      beta1_(config.beta1),
      beta2_(config.beta2),
      eps_(config.eps),
      weight_decay_(config.weight_decay),
      scalars_(stream.device(), 2 * sizeof(OptimizerScalars)) {
  add_runs(matrices);
  if (kind_ == OptimizerKind::adamw || momentum_ != 0.0) {
    first_ = make_buffer<float>(stream.device(), elements_);
    fill_zero(stream, first_.data(), first_.bytes());
  }
  if (kind_ == OptimizerKind::adamw) {
    second_ = make_buffer<float>(stream.device(), elements_);
    fill_zero(stream, second_.data(), second_.bytes());
  }
  if (config.muon) muon_.emplace(stream, matrices, elements_, config.muon_mu, config.precision);
}

void Optimizer::add_runs(const std::vector<FlatMatrix>& matrices) {
  for (const ElementRange& part : parts_) {
    int64_t at = part.begin;
    const auto run_until = [&](int64_t end, bool dion) {
      end = std::min(end, part.end);
      if (end <= at) return;
      if (!runs_.empty() && runs_.back().dion == dion && runs_.back().elements.end == at) {
        runs_.back().elements.end = end;
      } else {
        runs_.push_back({{at, end}, elements_ + at - part.begin, dion});
      }
      at = end;
    };
    for (const FlatMatrix& matrix : matrices) {
      run_until(matrix.begin, false);
      if (matrix.begin <= at) run_until(matrix.end(), true);
    }
    run_until(part.end, false);
    elements_ += part.count();
  }
}

void Optimizer::prepare(const Stream& stream, int64_t step, double lr) {
  std::array<OptimizerScalars, 2> scalars{};
  scalars[0].lr = static_cast<float>(lr);
  scalars[1].lr = static_cast<float>(lr * dion_rate_);
  if (kind_ == OptimizerKind::adamw) {
    double t = static_cast<double>(step + 1);
    scalars[0].correction1 = static_cast<float>(1.0 - std::pow(beta1_, t));
    scalars[0].correction2 = static_cast<float>(1.0 - std::pow(beta2_, t));
  }
  store(stream, scalars_.data(), scalars.data(), sizeof scalars);
}

void Optimizer::step(const Stream& stream, Parts<float> params, const float* grads, Bf16* rounded) {
  if (muon_) muon_->run(stream, grads, first_.as<float>());
  for (const Run& run : runs_) {
    const float* const steps = muon_ && run.dion ? muon_->steps() : grads;
    step_run(stream, params.data + (params.packed ? run.first : run.elements.begin),
             steps + run.elements.begin, rounded == nullptr ? nullptr : rounded + run.elements.begin, run);
  }
}

void Optimizer::step(const Stream& stream, float* params, const float* grads, ElementRange range,
                     Bf16* rounded) {
  for (const Run& run : runs_) {
    const int64_t begin = std::max(range.begin, run.elements.begin);
    const int64_t end = std::min(range.end, run.elements.end);
    if (begin >= end) continue;
    step_run(stream, params + begin, grads + begin, rounded == nullptr ? nullptr : rounded + begin,
             {{begin, end}, run.first + begin - run.elements.begin, run.dion});
  }
}

void Optimizer::step_run(const Stream& stream, float* params, const float* grads, Bf16* rounded,
                         const Run& run) {
  const int64_t count = run.elements.count();
  auto from = [&](const Buffer& state) { return state ? state.as<float>() + run.first : nullptr; };
  if (kind_ == OptimizerKind::sgd || run.dion) {
    sgd_step(stream, {.params = params,
                      .grads = grads,
                      .velocity = run.dion ? nullptr : from(first_),
                      .count = count,
                      .momentum = static_cast<float>(run.dion ? 0 : momentum_),
                      .weight_decay = static_cast<float>(weight_decay_),
                      .scalars = scalars_.as<OptimizerScalars>() + (run.dion ? 1 : 0),
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
