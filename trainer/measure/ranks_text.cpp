// The report of examine_ranks() as text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "trainer/log/console.h"
#include "trainer/log/summary.h"
#include "trainer/measure/ranks.h"

namespace gradwire {
namespace {

std::string number(double value, int digits = 3) {
  if (!std::isfinite(value)) return "-";
  if (std::abs(value) >= 1000) return human_count(value);
  return fmt::format("{:.{}g}", value, digits);
}
std::string ms(double value) {
  return number(value) + " ms";
}
std::string percent(double share) {
  return number(100 * share, 2) + " %";
}
std::string title(const std::string& text) {
  return fmt::format("\n{}\n", text);
}

// Returns the spec, with a long list of dense tensors cut.
std::string brief(const std::string& spec) {
  constexpr size_t kMost = 9;
  const size_t dense = spec.find("dense=");
  if (dense == std::string::npos) return spec;
  const size_t begin = dense + 6, end = std::min(spec.find(',', begin), spec.size());
  if (end - begin <= kMost) return spec;
  return spec.substr(0, begin + kMost) + "..." + spec.substr(end);
}

Table predictions(const Recommendation& r) {
  Table table{{"compression", "bucket MB", "buckets", "schedule", "sends", "links ms", "kernels ms",
               "exposed ms", "step ms", "speed"}};
  const bool measured = std::isfinite(r.from.error);  // the errors
  if (measured) table[0].emplace_back("error");
  auto add = [&](const Prediction& p) {
    table.push_back({brief(p.spec), fmt::format("{}", p.bucket_mb), fmt::format("{}", p.buckets), p.schedule,
                     human_bytes(p.sent_bytes), number(p.comm_ms), number(p.codec_ms), number(p.exposed_ms),
                     number(p.step_ms), number(r.best[0].step_ms / p.step_ms) + "x"});
    if (measured)
      table.back().push_back(number(p.error) +
                             (r.allows(p) ? "" : fmt::format(" > {}", number(r.from.error))));
  };
  if (r.one_bucket.bucket_mb != r.best[0].bucket_mb) add(r.one_bucket);
  for (const Prediction& p : r.best) add(p);
  return table;
}

}  // namespace

std::string links_text(const RanksReport& report) {
  auto pattern = [](const LinkCosts::Pattern& p) {
    return fmt::format("{} us, {} GB/s", number(p.latency_us), number(p.bytes_per_us / 1e3));
  };
  const std::string emulated = report.link ? fmt::format(", emulated at {}", report.link.to_string()) : "";
  std::string text = title(fmt::format("Links between {} ranks, transport {}{} (measured)", report.world,
                                       report.transport, emulated));
  text += row_text("to a neighbour", pattern(report.links.neighbour) + ", all ranks at once");
  text += row_text("to all", pattern(report.links.all_pairs) + ", all ranks at once");
  if (report.links.intra_node != report.links.all_pairs ||
      report.links.inter_node != report.links.all_pairs) {
    text += row_text("inside a node", pattern(report.links.intra_node));
    text += row_text("between nodes", pattern(report.links.inter_node));
  }
  if (report.links.library_measured) text += row_text("NCCL's allreduce", pattern(report.links.library));
  if (!report.matrix) return text;
  const auto world = static_cast<size_t>(report.world);
  Table table(world + 1, std::vector<std::string>(world + 1, "-"));
  table[0][0] = "us \\ GB/s";  // latency below the diagonal, bandwidth above
  for (size_t a = 0; a < world; ++a) {
    table[0][a + 1] = table[a + 1][0] = fmt::format("rank {}", a);
    for (size_t b = 0; b < world; ++b) {
      const LinkMatrix::Link& link = report.matrix->links[a * world + b];
      if (a != b) table[a + 1][b + 1] = number(a > b ? link.latency_us : link.gb_per_s);
    }
  }
  return text + "  one pair at a time: latency below the diagonal, bandwidth each way above it\n" +
         table_text(table, "    ");
}

std::string recommendation_text(const RanksReport& report, const VitConfig& model) {
  const StepCosts& costs = report.costs;
  const Recommendation& r = report.recommendation;
  std::string text = title(fmt::format("Prediction: {}, {} parameters, batch {}, {} ranks", model.name,
                                       human_count(static_cast<double>(report.parameters)), report.batch_size,
                                       report.world));
  text += row_text("compute", fmt::format("{} GFLOP x {} images / {} TFLOP/s = {}, two thirds of it backward",
                                          number(report.flops_per_image / 1e9), report.batch_size,
                                          number(report.rank_tflops), ms(costs.compute_ms)));
  text += row_text(
      "", fmt::format("(the slowest rank's speed, all at once, on {}{} and batch {})", report.probe.depth,
                      report.probe.depth == 1 ? " layer" : " layers", report.probe_batch));
  text +=
      row_text("optimizer", report.optimizer_bytes == 0
                                ? fmt::format("{}, measured", ms(costs.optimizer_ms))
                                : fmt::format("{} / {} GB/s = {}, AdamW", human_bytes(report.optimizer_bytes),
                                              number(report.peaks.copy_gb_per_s), ms(costs.optimizer_ms)));
  text += table_text(predictions(r));

  const Prediction &plain = r.best[0], &chosen = r.best[r.chosen];
  text += title(fmt::format(
      "{}: {} --bucket-mb {}", std::isfinite(r.from.error) ? "Choice" : "Recommendation",
      r.compress() ? fmt::format("--compression {}", chosen.spec) : "do not compress, --compression fp32",
      chosen.bucket_mb));
  auto line = [&](const Prediction& p) {
    const double codec = p.codec_ms * 1e6 / static_cast<double>(report.parameters);
    return row_text(brief(p.spec),
                    fmt::format("{} / {} GB/s = {} on the links, {} ns x {} = {} of kernels",
                                human_bytes(p.sent_bytes), number(p.sent_bytes / (p.comm_ms * 1e6)),
                                ms(p.comm_ms), number(codec),
                                human_count(static_cast<double>(report.parameters)), ms(p.codec_ms))) +
           row_text("", fmt::format("{} ({} of the step) are left when backward is done: {} per step, with "
                                    "90 % probability {} to {}",
                                    ms(p.exposed_ms), percent(p.exposed_ms / p.step_ms), ms(p.step_ms),
                                    number(p.low_ms), number(p.high_ms)));
  };
  text += line(plain);
  if (r.compress()) return text + line(chosen);
  const Prediction* fastest = &plain;
  for (const Prediction& p : r.best) {
    if (r.allows(p) && p.step_ms < fastest->step_ms) fastest = &p;
  }
  if (fastest == &plain) {
    return text + row_text("", fmt::format("nothing{} is predicted to be faster",
                                           std::isfinite(r.from.error) ? " within the error" : ""));
  }
  return text + line(*fastest) +
         row_text("", fmt::format("compression would gain {}, too little to justify its rounding errors",
                                  percent(plain.step_ms / fastest->step_ms - 1)));
}

}  // namespace gradwire
