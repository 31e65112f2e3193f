// The plan as text and as JSON.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"
#include "trainer/plan/nccl_model.h"
#include "trainer/plan/plan.h"

namespace gradwire {
namespace {

constexpr double kSmallestMessage = 0x1p12, kLargestMessage = 0x1p34;

std::string three_digits(double value) {
  return std::abs(value) >= 1000 ? human_count(value) : fmt::format("{:.3g}", value);
}

std::string error_text(double error) {
  return error < 0 ? "-" : error == 0 ? "0" : fmt::format("{:.1e}", error);
}

const PlanRow& fastest_row(const Plan& plan) {
  return *std::min_element(plan.rows.begin(), plan.rows.end(), [](const PlanRow& a, const PlanRow& b) {
    return a.best.step_ms < b.best.step_ms;
  });
}

// Returns NCCL's choice for the baseline's largest bucket, and its bus bandwidth.
std::string nccl_text(const PlanRequest& request, const Plan& plan) {
  const Prediction& best = plan.rows[0].best;
  const double bytes = std::min(best.dense_bytes, static_cast<double>(best.bucket_mb << 20));
  const NcclEstimate estimate = nccl_allreduce_estimate(request.cluster, request.ranks, bytes);
  return fmt::format("{}, protocol {}, for a bucket of {}: {} ms", estimate.algorithm, estimate.protocol,
                     human_bytes(bytes), three_digits(estimate.us / 1e3));
}

Json prediction_record(const Prediction& p) {
  return {{"bucket_mb", p.bucket_mb}, {"buckets", p.buckets},     {"sent_bytes", p.sent_bytes},
          {"links_ms", p.comm_ms},    {"kernels_ms", p.codec_ms}, {"exposed_ms", p.exposed_ms},
          {"step_ms", p.step_ms}};
}

}  // namespace

std::string plan_text(const PlanRequest& request, const Plan& plan) {
  const double baseline = plan.rows[0].best.step_ms;
  std::string text = fmt::format("Plan: {}, {} ranks\n", request.cluster.name, request.ranks);
  text +=
      row_text("model", fmt::format("{}, {} parameters, batch {} per rank", request.model.name,
                                    human_count(static_cast<double>(plan.parameters)), request.batch_size));
  text += row_text("compute",
                   fmt::format("{} ms, and {} ms for the optimizer", three_digits(plan.costs.compute_ms),
                               three_digits(plan.costs.optimizer_ms)));
  if (request.ranks > 1) text += row_text("NCCL", nccl_text(request, plan));
  Table table{{"compression", "schedule", "bucket MB"}};
  for (const std::string& level : plan.levels) table[0].push_back(level + " sends");
  for (const char* title : {"links ms", "kernels ms", "exposed ms", "step ms", "speed", "error", "memory"}) {
    table[0].emplace_back(title);
  }
  for (const PlanRow& row : plan.rows) {
    const Prediction& p = row.best;
    auto& cells = table.emplace_back();
    cells = {p.spec, p.schedule, fmt::format("{}", p.bucket_mb)};
    for (double bytes : row.level_bytes) cells.push_back(human_bytes(bytes));
    for (double ms : {p.comm_ms, p.codec_ms, p.exposed_ms, p.step_ms}) cells.push_back(three_digits(ms));
    cells.push_back(fmt::format("{:.2f}x", baseline / p.step_ms));
    cells.push_back(error_text(row.error));
    cells.push_back(human_bytes(row.memory_bytes));
  }
  text += fmt::format(
      "\n{}\nsends: bytes of the busiest rank; error: of the average, for independent gradients; memory:\n"
      "without activations\n",
      table_text(table));
  const Prediction& best = fastest_row(plan).best;
  if (request.ranks == 1) return text + "One rank exchanges nothing, so compression cannot pay\n";
  return text + fmt::format("Fastest: {} with schedule {}, {:.2f}x NCCL's FP32\n", best.spec, best.schedule,
                            baseline / best.step_ms);
}

std::string plan_json(const PlanRequest& request, const Plan& plan) {
  Json json{{"cluster", request.cluster.name},
            {"ranks", request.ranks},
            {"model", request.model.name},
            {"parameters", plan.parameters},
            {"batch_size", request.batch_size},
            {"compute_ms", plan.costs.compute_ms},
            {"optimizer_ms", plan.costs.optimizer_ms},
            {"levels", plan.levels},
            {"rows", Json::array()},
            {"nccl_allreduce", Json::array()}};
  for (const PlanRow& row : plan.rows) {
    Json entry{
        {"compression", row.best.spec},        {"schedule", row.best.schedule},
        {"best", prediction_record(row.best)}, {"speed", plan.rows[0].best.step_ms / row.best.step_ms},
        {"level_bytes", row.level_bytes},      {"error", row.error < 0 ? Json(nullptr) : Json(row.error)},
        {"memory_bytes", row.memory_bytes},    {"tried", Json::array()}};
    for (const Prediction& p : row.tried) entry["tried"].push_back(prediction_record(p));
    json["rows"].push_back(entry);
  }
  const double n = request.ranks;
  for (double bytes = kSmallestMessage; n > 1 && bytes <= kLargestMessage; bytes *= 2) {
    const NcclEstimate estimate = nccl_allreduce_estimate(request.cluster, request.ranks, bytes);
    json["nccl_allreduce"].push_back({{"bytes", bytes},
                                      {"algorithm", estimate.algorithm},
                                      {"protocol", estimate.protocol},
                                      {"us", estimate.us},
                                      {"bus_gb_per_s", 2 * (n - 1) / n * bytes / estimate.us / 1e3}});
  }
  return json_text(json, 2) + "\n";
}

}  // namespace gradwire
