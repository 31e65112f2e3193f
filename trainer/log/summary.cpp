#include "trainer/log/summary.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gradwire {

double median(std::vector<double> values) {
  std::erase_if(values, [](double v) { return std::isnan(v); });
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

std::optional<double> seconds_to(const RunSummary& summary, double accuracy) {
  for (const EvalRecord& eval : summary.evals) {
    if (eval.test_accuracy >= accuracy) return eval.seconds;
  }
  return {};
}

std::optional<double> StepShares::hidden_of_comm() const {
  if (!(comm() > 0)) return {};
  return std::clamp(1 - exposed_comm / comm(), 0.0, 1.0);
}

namespace {

StepParts median_parts(const std::vector<StepRecord>& steps, int64_t from) {
  const auto median_of = [&](auto part) {
    std::vector<double> values;
    for (const StepRecord& step : steps) {
      if (step.step >= from) values.push_back(part(step));
    }
    return median(std::move(values));
  };
  return {.compute_ms = median_of([](const StepRecord& s) { return s.forward_ms + s.backward_ms; }),
          .kernels_ms = median_of([](const StepRecord& s) { return s.compress_ms + s.decompress_ms; }),
          .links_ms = median_of([](const StepRecord& s) { return s.communicate_ms; }),
          .exposed_ms = median_of([](const StepRecord& s) { return s.exposed_comm_ms; }),
          .optimizer_ms = median_of([](const StepRecord& s) { return s.optimizer_ms; }),
          .step_ms = median_of([](const StepRecord& s) { return s.step_ms; })};
}

StepShares shares_of(const std::vector<StepRecord>& steps) {
  auto sum = [&](auto field) {
    double all = 0;
    for (const StepRecord& step : steps) {
      if (!std::isnan(step.*field)) all += step.*field;
    }
    return all;
  };
  const double whole = sum(&StepRecord::step_ms);
  auto share = [&](auto field) { return whole > 0 ? sum(field) / whole : 0; };
  StepShares shares{.data = share(&StepRecord::data_ms),
                    .forward = share(&StepRecord::forward_ms),
                    .backward = share(&StepRecord::backward_ms),
                    .exposed_comm = share(&StepRecord::exposed_comm_ms),
                    .optimizer = share(&StepRecord::optimizer_ms),
                    .compress = share(&StepRecord::compress_ms),
                    .communicate = share(&StepRecord::communicate_ms),
                    .decompress = share(&StepRecord::decompress_ms)};
  shares.other = std::max(
      0.0, 1 - shares.data - shares.forward - shares.backward - shares.exposed_comm - shares.optimizer);
  return shares;
}

}  // namespace

void Summarizer::on_run(const RunInfo& info) {
  info_ = info;
  if (info.takes_over) {  // drop this rank's reports of steps that will be repeated
    std::erase_if(steps_, [&](const StepRecord& step) { return step.step >= info.first_step; });
    std::erase_if(evals_, [&](const EvalRecord& eval) { return eval.step > info.first_step; });
  }
}
void Summarizer::on_step(const StepRecord& step) {
  steps_.push_back(step);
}
void Summarizer::on_eval(const EvalRecord& eval) {
  evals_.push_back(eval);
}

void Summarizer::on_end(const EndRecord& end) {
  end_ = end;
  ended_ = true;
}

void Summarizer::on_replan(const ReplanRecord& replan) {
  plan_from_ = replan.step;
  predicted_ = replan.predicted;
  info_.schedule = replan.schedule;
}

RunSummary Summarizer::summary(double seconds) const {
  RunSummary summary;
  summary.steps = static_cast<int64_t>(steps_.size());
  summary.seconds = seconds;
  summary.schedule = info_.schedule;
  summary.parameters = info_.parameters;
  summary.waited_s = end_.waited_s;
  summary.memory_bytes = end_.memory_bytes;
  auto median_of = [&](auto field) {
    std::vector<double> values;
    for (const StepRecord& step : steps_) values.push_back(static_cast<double>(step.*field));
    return median(std::move(values));
  };
  summary.step_ms = median_of(&StepRecord::step_ms);
  summary.images_per_s = median_of(&StepRecord::images_per_s);
  summary.wire_bytes = median_of(&StepRecord::wire_bytes);
  summary.dense_bytes = median_of(&StepRecord::dense_bytes);
  summary.comm_ms = median_of(&StepRecord::comm_ms);
  summary.compress_ms = median_of(&StepRecord::compress_ms);
  summary.communicate_ms = median_of(&StepRecord::communicate_ms);
  summary.decompress_ms = median_of(&StepRecord::decompress_ms);
  summary.exposed_comm_ms = median_of(&StepRecord::exposed_comm_ms);
  summary.data_ms = median_of(&StepRecord::data_ms);
  summary.forward_ms = median_of(&StepRecord::forward_ms);
  summary.backward_ms = median_of(&StepRecord::backward_ms);
  summary.optimizer_ms = median_of(&StepRecord::optimizer_ms);
  summary.tflops = median_of(&StepRecord::tflops);
  if (std::isfinite(info_.peak_tflops)) summary.peak_fraction = summary.tflops / info_.peak_tflops;
  double data_ms = 0, all_ms = 0;
  for (const StepRecord& step : steps_) data_ms += step.data_ms, all_ms += step.step_ms;
  summary.data_wait_share = data_ms / all_ms;
  summary.shares = shares_of(steps_);
  summary.measured = median_parts(steps_, plan_from_);
  summary.predicted = predicted_;
  if (summary.wire_bytes > 0) summary.ratio = summary.dense_bytes / summary.wire_bytes;
  for (const StepRecord& step : steps_) summary.total_wire_bytes += step.wire_bytes;

  double sum = 0, count = 0;
  for (auto step = steps_.rbegin(); step != steps_.rend() && count < kFinalLossSteps; ++step) {
    if (!std::isfinite(step->loss)) break;
    sum += step->loss;
    ++count;
  }
  // The update of the last step shows in the evaluation that follows.
  const bool fails_after = !steps_.empty() && !evals_.empty() && evals_.back().step > steps_.back().step &&
                           !std::isfinite(evals_.back().test_loss);
  summary.final_loss = count > 0 && !fails_after ? sum / count : std::numeric_limits<double>::quiet_NaN();
  summary.evals = evals_;
  if (!evals_.empty() && !summary.diverged()) {
    summary.test_loss = evals_.back().test_loss;
    summary.test_accuracy = evals_.back().test_accuracy;
  }
  return summary;
}

}  // namespace gradwire
