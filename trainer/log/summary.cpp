#include "trainer/log/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "trainer/log/console.h"
#include "trainer/log/records.h"

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

namespace {

// Returns the median over the steps from `first` on.
template <typename Value>
double median_over(const std::vector<StepRecord>& steps, Value value, int64_t first = 0) {
  std::vector<double> values;
  for (const StepRecord& step : steps) {
    if (step.step >= first) values.push_back(value(step));
  }
  return median(std::move(values));
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
  for (const StepField& f : kStepFields)
    summary.*f.value = median_over(steps_, [&](const StepRecord& step) { return step.*f.value; });
  if (std::isfinite(info_.peak_tflops)) summary.peak_fraction = summary.tflops / info_.peak_tflops;
  double data_ms = 0, all_ms = 0;
  for (const StepRecord& step : steps_) data_ms += step.data_ms, all_ms += step.step_ms;
  summary.data_wait_share = data_ms / all_ms;
  const auto sum = [&](double StepValues::*time) {
    double all = 0;
    for (const StepRecord& step : steps_) all += std::isnan(step.*time) ? 0 : step.*time;
    return all;
  };
  const double whole = sum(&StepValues::step_ms);
  double rest = 1, comm = 0;
  for (size_t i = 0; i < std::size(kStepShares); ++i) {
    double& share = summary.shares.*kStepShares[i].time;
    share = whole > 0 ? sum(kStepShares[i].time) / whole : 0;
    (i < kPhases ? rest : comm) += i < kPhases ? -share : share;
  }
  summary.other_share = std::max(0.0, rest);
  if (comm > 0) summary.hidden_of_comm = std::clamp(1 - summary.shares.exposed_comm_ms / comm, 0.0, 1.0);
  for (const StepPart& part : kStepParts) {
    summary.measured.*part.value = median_over(
        steps_, [&](const StepRecord& step) { return part.of(step); }, plan_from_);
  }
  summary.predicted = predicted_;
  if (summary.wire_bytes > 0) summary.ratio = summary.dense_bytes / summary.wire_bytes;
  for (const StepRecord& step : steps_) summary.total_wire_bytes += static_cast<uint64_t>(step.wire_bytes);

  double losses = 0, count = 0;
  for (auto step = steps_.rbegin(); step != steps_.rend() && count < kFinalLossSteps; ++step) {
    if (!std::isfinite(step->loss)) break;
    losses += step->loss;
    ++count;
  }
  // The update of the last step shows in the evaluation that follows.
  const bool fails_after = !steps_.empty() && !evals_.empty() && evals_.back().step > steps_.back().step &&
                           !std::isfinite(evals_.back().test_loss);
  summary.final_loss = count > 0 && !fails_after ? losses / count : std::numeric_limits<double>::quiet_NaN();
  summary.evals = evals_;
  if (!evals_.empty() && !summary.diverged()) {
    summary.test_loss = evals_.back().test_loss;
    summary.test_accuracy = evals_.back().test_accuracy;
  }
  return summary;
}

namespace {

// Mean and sample standard deviation over the seeds. The deviation is NaN for a single seed. Mean and
// deviation are NaN when a value is missing.
struct Spread {
  double mean = 0, deviation = std::numeric_limits<double>::quiet_NaN();
};

Spread spread_of(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  Spread spread;
  for (double v : values) spread.mean += v / n;
  if (values.size() < 2) return spread;
  double squares = 0;
  for (double v : values) squares += (v - spread.mean) * (v - spread.mean);
  spread.deviation = std::sqrt(squares / (n - 1));
  return spread;
}

template <typename Field>
std::vector<double> over_seeds(const ComparedRun& run, Field field) {
  std::vector<double> values;
  for (const SeedRun& seed : run.seeds) values.push_back(field(seed.summary));
  return values;
}

Spread accuracy_of(const ComparedRun& run) {
  return spread_of(over_seeds(run, [](const RunSummary& s) {
    return s.test_accuracy.value_or(std::numeric_limits<double>::quiet_NaN());
  }));
}

Spread loss_of(const ComparedRun& run) {
  return spread_of(over_seeds(run, [](const RunSummary& s) { return s.final_loss; }));
}

double median_of(const ComparedRun& run, double StepValues::*field) {
  return median(over_seeds(run, [=](const RunSummary& s) { return s.*field; }));
}

std::optional<double> ratio_of(const ComparedRun& run) {
  const double sent = median_of(run, &StepValues::wire_bytes);
  if (!(sent > 0)) return {};
  return median_of(run, &StepValues::dense_bytes) / sent;
}

// Returns the median of the seeds' times to a percentage; empty if a seed did not reach it.
std::optional<double> seconds_to_target(const ComparedRun& run, double percentage) {
  const std::vector<double> times = over_seeds(run, [=](const RunSummary& s) {
    return seconds_to(s, percentage / 100).value_or(std::numeric_limits<double>::quiet_NaN());
  });
  if (std::any_of(times.begin(), times.end(), [](double t) { return std::isnan(t); })) return {};
  return median(times);
}

// Returns the mean, with the deviation unless there is a single seed.
std::string spread_text(const Spread& spread, double unit, int digits) {
  const std::string mean = fmt::format("{:.{}f}", unit * spread.mean, digits);
  return std::isnan(spread.deviation) ? mean
                                      : fmt::format("{} +-{:.{}f}", mean, unit * spread.deviation, digits);
}

}  // namespace

std::string compare_document(const std::vector<ComparedRun>& runs, std::optional<double> target) {
  Json document = Json::array();
  for (const ComparedRun& run : runs) {
    const Spread accuracy = accuracy_of(run), loss = loss_of(run);
    const RunSummary& first = run.seeds.front().summary;
    const double sent = median_of(run, &StepValues::wire_bytes);
    Json seeds = Json::array();
    for (const SeedRun& seed : run.seeds) {
      seeds.push_back({{"seed", seed.seed},
                       {"test_accuracy", or_null(seed.summary.test_accuracy)},
                       {"final_loss", seed.summary.final_loss},
                       {"diverged", seed.summary.diverged()},
                       {"log", seed.log.empty() ? Json(nullptr) : Json(seed.log)}});
    }
    document.push_back({{"compression", run.compression},
                        {"test_accuracy", accuracy.mean},
                        {"test_accuracy_std", accuracy.deviation},
                        {"final_loss", loss.mean},
                        {"final_loss_std", loss.deviation},
                        {"step_ms", median_of(run, &StepValues::step_ms)},
                        {"images_per_s", median_of(run, &StepValues::images_per_s)},
                        {"wire_bytes", sent},
                        {"wire_bytes_per_element", sent / static_cast<double>(first.parameters)},
                        {"dense_bytes", median_of(run, &StepValues::dense_bytes)},
                        {"ratio", or_null(ratio_of(run))},
                        {"exposed_comm_ms", median_of(run, &StepValues::exposed_comm_ms)},
                        {"ranks", run.ranks},
                        {"device", run.device},
                        {"link", run.link.empty() ? Json(nullptr) : Json(run.link)},
                        {"schedule", first.schedule},
                        {"bucket_mb", shortest(run.bucket_mb)},
                        {"seeds", std::move(seeds)}});
    if (!target) continue;
    document.back()["target_accuracy"] = *target / 100;
    document.back()["seconds_to_target"] = or_null(seconds_to_target(run, *target));
  }
  return json_text(document, 2) + "\n";
}

std::string compare_table(const std::vector<ComparedRun>& runs, std::optional<double> target) {
  Table rows{{"compression", "test accuracy", "final loss", "step ms", "images/s", "sent per step", "ratio",
              "exposed comm ms"}};
  for (const ComparedRun& run : runs) {
    const Spread accuracy = accuracy_of(run), loss = loss_of(run);
    const std::optional<double> ratio = ratio_of(run);
    rows.push_back({run.compression, std::isnan(accuracy.mean) ? "-" : spread_text(accuracy, 100, 2) + " %",
                    std::isnan(loss.mean) ? "diverged" : spread_text(loss, 1, 4),
                    milliseconds(median_of(run, &StepValues::step_ms)),
                    human_count(median_of(run, &StepValues::images_per_s)),
                    human_bytes(median_of(run, &StepValues::wire_bytes)),
                    ratio ? fmt::format("{:.2f}x", *ratio) : "-",
                    milliseconds(median_of(run, &StepValues::exposed_comm_ms))});
  }
  if (target) {
    rows[0].push_back(fmt::format("time to {:g} %", *target));
    for (size_t i = 0; i < runs.size(); ++i) {
      const std::optional<double> seconds = seconds_to_target(runs[i], *target);
      rows[i + 1].push_back(seconds ? human_seconds(*seconds) : "-");
    }
  }
  // Show the bucket sizes only if they differ.
  if (std::any_of(runs.begin(), runs.end(),
                  [&](const auto& r) { return r.bucket_mb != runs[0].bucket_mb; })) {
    rows[0].insert(rows[0].begin() + 1, "bucket MiB");
    for (size_t i = 0; i < runs.size(); ++i)
      rows[i + 1].insert(rows[i + 1].begin() + 1, fmt::format("{:g}", runs[i].bucket_mb));
  }
  return table_text(rows, "", true);
}

std::optional<Straggler> find_straggler(const std::vector<std::vector<double>>& waited_s, double seconds) {
  if (waited_s.size() < 2) return {};
  // A rank that waits for a late rank is late for the next rank. So the straggler is the rank that waits
  // least, not the rank for which others wait most.
  std::vector<double> total;
  for (const auto& of_rank : waited_s) total.push_back(std::accumulate(of_rank.begin(), of_rank.end(), 0.0));
  const auto least = std::min_element(total.begin(), total.end());
  const double others =
      (std::accumulate(total.begin(), total.end(), 0.0) - *least) / static_cast<double>(total.size() - 1);
  constexpr double kWorthMentioning = 0.05;
  if (!(others - *least >= kWorthMentioning * seconds)) return {};
  return Straggler{.rank = static_cast<int>(least - total.begin()),
                   .behind_s = others - *least,
                   .share = (others - *least) / seconds};
}

void WaitHistory::add(const WaitRecord& record) {
  if (!window_.empty()) {
    const WaitRecord& last = window_.back();
    if (record.waited_s.size() != last.waited_s.size() || record.seconds <= last.seconds) {
      window_.clear();
      finding_.reset();
    }
  }
  window_.push_back(record);
  if (window_.size() > kWindow + 1) window_.pop_front();
  const auto found = find_straggler(recent_waits(), recent_seconds());
  if (!found) {
    finding_.reset();
  } else if (finding_ && finding_->straggler.rank == found->rank) {
    finding_->straggler = *found;
  } else {
    const WaitRecord& before = window_[window_.size() - 2];
    finding_ = {.straggler = *found, .since_step = before.step, .since_s = before.seconds};
  }
}

std::vector<std::vector<double>> WaitHistory::recent_waits() const {
  if (window_.size() < 2) return {};
  std::vector<std::vector<double>> waits = window_.back().waited_s;
  const auto& before = window_.front().waited_s;
  for (size_t r = 0; r < waits.size(); ++r) {
    for (size_t p = 0; p < std::min(waits[r].size(), before[r].size()); ++p) waits[r][p] -= before[r][p];
  }
  return waits;
}

double WaitHistory::recent_seconds() const {
  return window_.size() < 2 ? 0 : window_.back().seconds - window_.front().seconds;
}

int64_t WaitHistory::recent_steps() const {
  return window_.size() < 2 ? 0 : window_.back().step - window_.front().step;
}

std::string table_text(const Table& table, const std::string& indent, bool rule) {
  std::vector<size_t> widths;
  for (const auto& row : table) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : table) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      line += i == 0 ? row[i] + pad : "  " + pad + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
    if (rule && &row == &table.front()) {
      line = indent;
      for (size_t i = 0; i < widths.size(); ++i) line += (i == 0 ? "" : "  ") + std::string(widths[i], '-');
      text += line + "\n";
    }
  }
  return text;
}

std::string row_text(const std::string& name, const std::string& value) {
  return fmt::format("  {:<17} {}\n", name, value);
}

}  // namespace gradwire
