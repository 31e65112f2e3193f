#include "trainer/measure/ranks_json.h"

#include <cmath>

namespace gradwire {
namespace {

Json row_json(const Prediction& p) {
  Json json{{"compression", p.spec},  {"bucket_mb", p.bucket_mb},   {"buckets", p.buckets},
            {"schedule", p.schedule}, {"sent_bytes", p.sent_bytes}, {"dense_bytes", p.dense_bytes},
            {"links_ms", p.comm_ms},  {"kernels_ms", p.codec_ms},   {"exposed_ms", p.exposed_ms},
            {"step_ms", p.step_ms}};
  if (std::isfinite(p.error)) json["error"] = p.error;
  if (std::isfinite(p.low_ms)) json["step_interval_ms"] = {p.low_ms, p.high_ms};
  return json;
}

}  // namespace

Json ranks_json(const RanksReport& report) {
  auto pattern = [](const LinkCosts::Pattern& p) {
    return Json{{"latency_us", p.latency_us}, {"gb_per_s", p.bytes_per_us / 1e3}};
  };
  Json json{{"world", report.world},
            {"transport", report.transport},
            {"link", report.link ? Json(report.link.to_string()) : Json(nullptr)},
            {"neighbour", pattern(report.links.neighbour)},
            {"all_pairs", pattern(report.links.all_pairs)},
            {"inside", pattern(report.links.intra_node)},
            {"between", pattern(report.links.inter_node)},
            {"pairs", Json::array()}};
  if (report.links.library_measured) json["nccl_allreduce"] = pattern(report.links.library);
  for (int a = 0; report.matrix && a < report.world; ++a) {
    for (int b = a + 1; b < report.world; ++b) {
      const LinkMatrix::Link& link = report.matrix->between(a, b);
      json["pairs"].push_back(
          {{"a", a}, {"b", b}, {"latency_us", link.latency_us}, {"gb_per_s", link.gb_per_s}});
    }
  }
  return json;
}

Json prediction_json(const RanksReport& report, const VitConfig& model) {
  const Recommendation& r = report.recommendation;
  Json json{{"model", model.name},
            {"parameters", report.parameters},
            {"batch_size", report.batch_size},
            {"rank_tflops", report.rank_tflops},
            {"compute_ms", report.costs.compute_ms},
            {"optimizer_ms", report.costs.optimizer_ms},
            {"kernels_ns_per_element", report.costs.codec_ns},
            {"fp32_one_bucket", row_json(r.one_bucket)},
            {"best", Json::array()}};
  for (const Prediction& p : r.best) json["best"].push_back(row_json(p));
  json["compress"] = r.compress();
  json["recommended"] = row_json(r.best[r.chosen]);
  return json;
}

}  // namespace gradwire
