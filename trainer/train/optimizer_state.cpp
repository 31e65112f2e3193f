#include "trainer/train/optimizer_state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "kernels/passes/passes.h"
#include "kernels/powersgd/orthonormalize.h"

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

double learning_rate(const TrainConfig& config, int64_t step) {
  if (step < config.warmup_steps) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup_steps);
  }
  int64_t span = std::max<int64_t>(1, config.steps - config.warmup_steps);
  double progress =
      std::min(1.0, static_cast<double>(step - config.warmup_steps) / static_cast<double>(span));
  return config.lr * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

namespace {

constexpr int kIterations = 5;
constexpr float kA = 3.4445f, kB = -4.7750f, kC = 2.0315f;

MatrixTable as_columns(const Stream& stream, const std::vector<FlatMatrix>& matrices) {
  std::vector<MatrixDescriptor> columns;
  for (const FlatMatrix& m : matrices)
    columns.push_back(
        {.q_offset = m.begin, .rows = 1, .cols = static_cast<int32_t>(m.rows * m.cols), .rank = 1});
  return MatrixTable(stream, std::move(columns));
}

int64_t largest_square(const std::vector<FlatMatrix>& matrices) {
  int64_t side = 0;
  for (const FlatMatrix& m : matrices) side = std::max(side, std::min(m.rows, m.cols));
  return side * side;
}

}  // namespace

Muon::Muon(const Stream& stream, std::vector<FlatMatrix> matrices, int64_t elements, double mu,
           Precision precision)
    : matrices_(std::move(matrices)),
      mu_(static_cast<float>(mu)),
      precision_(precision == Precision::tf32 ? Precision::tf32 : Precision::fp32),
      columns_(as_columns(stream, matrices_)),
      steps_(make_buffer<float>(stream.device(), elements)),
      x_(make_buffer<float>(stream.device(), elements)),
      a_(make_buffer<float>(stream.device(), largest_square(matrices_))),
      b_(make_buffer<float>(stream.device(), largest_square(matrices_))),
      flags_(make_buffer<int32_t>(stream.device(), static_cast<int64_t>(matrices_.size()))) {
  fill_zero(stream, flags_.data(), flags_.bytes());
}

void Muon::run(const Stream& stream, const float* grads, float* momentum) {
  float* const steps = steps_.as<float>();
  for (const FlatMatrix& m : matrices_) {
    copy(stream, steps + m.begin, grads + m.begin, static_cast<size_t>(m.rows * m.cols) * sizeof(float));
    momentum_add(
        stream,
        {.grad = steps + m.begin, .momentum = momentum + m.begin, .factor = mu_, .count = m.rows * m.cols});
  }
  // X = M / |M|, with 0 for 0.
  normalize_columns(stream, {&columns_, steps, x_.as<float>(), flags_.as<const int32_t>()});
  for (const FlatMatrix& m : matrices_) {
    float *from = x_.as<float>() + m.begin, *to = steps + m.begin;
    for (int i = 1; i <= kIterations; ++i, std::swap(from, to)) {
      const double shape = std::sqrt(static_cast<double>(m.rows) / static_cast<double>(m.cols));
      iterate(stream, m, from, to, i == kIterations ? static_cast<float>(shape) : 1.0f);
    }
  }
}

void Muon::iterate(const Stream& stream, const FlatMatrix& matrix, const float* x, float* out, float scale) {
  const int64_t rows = matrix.rows, cols = matrix.cols, side = std::min(rows, cols);
  const bool wide = rows <= cols;  // A = X X^T, otherwise A = X^T X
  float *const a = a_.as<float>(), *const b = b_.as<float>();
  gemm(stream, {.transpose_a = !wide,
                .transpose_b = wide,
                .m = side,
                .n = side,
                .k = std::max(rows, cols),
                .a = x,
                .lda = cols,
                .b = x,
                .ldb = cols,
                .c = a,
                .ldc = side,
                .precision = precision_});
  copy(stream, b, a, static_cast<size_t>(side * side) * sizeof(float));
  gemm(stream, {.m = side,
                .n = side,
                .k = side,
                .a = a,
                .lda = side,
                .b = a,
                .ldb = side,
                .c = b,
                .ldc = side,
                .alpha = kC,
                .beta = kB,
                .precision = precision_});
  copy(stream, out, x, static_cast<size_t>(rows * cols) * sizeof(float));
  gemm(stream, {.m = rows,
                .n = cols,
                .k = side,
                .a = wide ? b : x,
                .lda = wide ? side : cols,
                .b = wide ? x : b,
                .ldb = wide ? cols : side,
                .c = out,
                .ldc = cols,
                .alpha = scale,
                .beta = scale * kA,
                .precision = precision_});
}

}  // namespace gradwire
