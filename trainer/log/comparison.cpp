#include "trainer/log/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "trainer/log/console.h"
#include "trainer/log/json.h"
#include "trainer/log/table.h"

namespace gradwire {
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

double median_of(const ComparedRun& run, double RunSummary::*field) {
  return median(over_seeds(run, [=](const RunSummary& s) { return s.*field; }));
}

std::optional<double> ratio_of(const ComparedRun& run) {
  const double sent = median_of(run, &RunSummary::wire_bytes);
  if (!(sent > 0)) return {};
  return median_of(run, &RunSummary::dense_bytes) / sent;
}

// Returns the median of the seeds' times to a percentage; empty if a seed did not reach it.
std::optional<double> seconds_to_target(const ComparedRun& run, double percentage) {
  const std::vector<double> times = over_seeds(run, [=](const RunSummary& s) {
    return seconds_to(s, percentage / 100).value_or(std::numeric_limits<double>::quiet_NaN());
  });
  if (std::any_of(times.begin(), times.end(), [](double t) { return std::isnan(t); })) return {};
  return median(times);
}

std::string with_spread(const std::string& mean, double deviation, double unit, const char* format) {
  return std::isnan(deviation) ? mean : mean + " +-" + fmt::format(fmt::runtime(format), unit * deviation);
}

std::string accuracy_text(const ComparedRun& run) {
  const Spread accuracy = accuracy_of(run);
  if (std::isnan(accuracy.mean)) return "-";
  return with_spread(fmt::format("{:.2f}", 100 * accuracy.mean), accuracy.deviation, 100, "{:.2f}") + " %";
}

}  // namespace

std::string compare_document(const std::vector<ComparedRun>& runs, std::optional<double> target) {
  Json document = Json::array();
  for (const ComparedRun& run : runs) {
    const Spread accuracy = accuracy_of(run), loss = loss_of(run);
    const RunSummary& first = run.seeds.front().summary;
    const double sent = median_of(run, &RunSummary::wire_bytes);
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
                        {"step_ms", median_of(run, &RunSummary::step_ms)},
                        {"images_per_s", median_of(run, &RunSummary::images_per_s)},
                        {"wire_bytes", sent},
                        {"wire_bytes_per_element", sent / static_cast<double>(first.parameters)},
                        {"dense_bytes", median_of(run, &RunSummary::dense_bytes)},
                        {"ratio", or_null(ratio_of(run))},
                        {"exposed_comm_ms", median_of(run, &RunSummary::exposed_comm_ms)},
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
    const Spread loss = loss_of(run);
    const std::optional<double> ratio = ratio_of(run);
    const std::string mean = fmt::format("{:.4f}", loss.mean);
    rows.push_back({run.compression, accuracy_text(run),
                    std::isnan(loss.mean) ? "diverged" : with_spread(mean, loss.deviation, 1, "{:.4f}"),
                    milliseconds(median_of(run, &RunSummary::step_ms)),
                    human_count(median_of(run, &RunSummary::images_per_s)),
                    human_bytes(median_of(run, &RunSummary::wire_bytes)),
                    ratio ? fmt::format("{:.2f}x", *ratio) : "-",
                    milliseconds(median_of(run, &RunSummary::exposed_comm_ms))});
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

}  // namespace gradwire
