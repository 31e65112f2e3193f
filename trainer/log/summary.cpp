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

void Summarizer::on_run(const RunInfo& info) {
  info_ = info;
}
void Summarizer::on_step(const StepRecord& step) {
  steps_.push_back(step);
}
void Summarizer::on_eval(const EvalRecord& eval) {
  last_eval_ = eval;
}

RunSummary Summarizer::summary(double seconds) const {
  RunSummary summary;
  summary.steps = static_cast<int64_t>(steps_.size());
  summary.seconds = seconds;
  summary.schedule = info_.schedule;
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
  if (summary.wire_bytes > 0) summary.ratio = summary.dense_bytes / summary.wire_bytes;
  for (const StepRecord& step : steps_) summary.total_wire_bytes += step.wire_bytes;

  size_t last = std::min(steps_.size(), static_cast<size_t>(kFinalLossSteps));
  double sum = 0;
  for (size_t i = steps_.size() - last; i < steps_.size(); ++i) sum += steps_[i].loss;
  summary.final_loss = last > 0 ? sum / static_cast<double>(last) : std::numeric_limits<double>::quiet_NaN();
  if (last_eval_) {
    summary.test_loss = last_eval_->test_loss;
    summary.test_accuracy = last_eval_->test_accuracy;
  }
  return summary;
}

}  // namespace gradwire
