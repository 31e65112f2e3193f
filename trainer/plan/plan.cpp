#include "trainer/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "runtime/util/error.h"
#include "trainer/model/vit.h"
#include "trainer/model/parameters.h"
#include "trainer/plan/simulated_schedule.h"

namespace gradwire {
namespace {

constexpr double kAdamwBytes = 28;  // AdamW reads four floats per parameter and writes three
constexpr double kStateBytes = 16;  // weight, gradient and AdamW's moments

// Returns the bytes per element that the kernels of a spec read and write. NCCL's kernels are part of its
// time. PowerSGD's passes: kernels/powersgd; formats: ReduceEncode and Decode in kernels/wire/format.h, with
// one contribution, or spread over the ranks.
double kernel_bytes(const CompressionSpec& spec, ScheduleKind kind) {
  if (spec.method == CompressionSpec::Method::powersgd || spec.method == CompressionSpec::Method::dion)
    return 24;
  if (spec.method == CompressionSpec::Method::randk) return 16;
  if (spec.wire->exact) return kind == ScheduleKind::nccl ? 0 : 12;
  return 3 * spec.wire->bytes_per_value() + (spec.policy.keeps_errors() ? 16 : 8);
}

double kernel_ns(const Cluster& cluster, const std::string& text, ScheduleKind kind) {
  const auto measured = cluster.kernels_ns_per_element.find(text);
  if (measured != cluster.kernels_ns_per_element.end()) return measured->second;
  return kernel_bytes(CompressionSpec::parse(text), kind) / cluster.memory_gb_per_s;
}

// Returns how many times the variance of one rounding enters the sum of independent values of equal size. A
// partial sum of k of n ranks has k/n of the variance of the sum.
double roundings(const Schedule& s, bool fp32_inside) {
  switch (s.kind) {
    case ScheduleKind::ring:
      return (s.world + 1) / 2.0;
    case ScheduleKind::hierarchical: {
      const double between = s.inter_node_lossy_steps <= 2 ? 2 : (s.nodes + 1) / 2.0;
      return between + (fp32_inside ? 0 : 1);
    }
    default:
      return s.lossy_steps;
  }
}

double relative_error(const CompressionSpec& spec, const SimulatedSchedule& schedule) {
  if (spec.method != CompressionSpec::Method::wire) return -1;
  if (spec.wire->exact) return 0;
  if (spec.wire->gaussian_error <= 0) return -1;
  return std::sqrt(roundings(schedule.outline(), spec.fp32_intra_node) * spec.wire->gaussian_error);
}

StepCosts step_costs(const PlanRequest& request) {
  StepCosts costs;
  int64_t parameters = 0;
  for (const VitParameter& p : vit_parameters(request.model)) {
    costs.tensors.push_back({p.name, p.shape});
    parameters += p.elements();
  }
  costs.world = request.ranks;
  costs.shared_cores = true;  // backward keeps a GPU busy, so kernels delay backward as on the host
  costs.compute_ms = training_flops_per_image(request.model) * static_cast<double>(request.batch_size) /
                     (request.cluster.tflops * 1e9);
  costs.optimizer_ms =
      kAdamwBytes * static_cast<double>(parameters) / (request.cluster.memory_gb_per_s * 1e6);
  return costs;
}

PlanRow make_row(const PlanRequest& request, StepCosts costs, const std::string& text,
                 SimulatedSchedule& schedule, const std::vector<int64_t>& sizes) {
  const CompressionSpec spec = CompressionSpec::parse(text);
  costs.codec_ns[text] = kernel_ns(request.cluster, text, schedule.kind());
  PlanRow row;
  std::vector<std::vector<double>> levels;  // of each size
  for (int64_t mb : sizes) {
    std::vector<double>& sum = levels.emplace_back(schedule.fabric().levels().size());
    row.tried.push_back(predict_step(costs, text, mb, [&](int64_t count, Wire wire) {
      const std::vector<double> bytes = schedule.level_bytes(count, wire, spec.fp32_intra_node);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += bytes[i];
      return schedule.cost(count, wire, spec.fp32_intra_node);
    }));
  }
  row.best = best_of(row.tried);
  row.error = relative_error(spec, schedule);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == row.best.bucket_mb) row.level_bytes = levels[i];
  }
  const double bucket =
      std::min(row.best.dense_bytes, static_cast<double>(row.best.bucket_mb << 20)) / row.best.dense_bytes;
  const bool exact = spec.wire->exact && spec.method == CompressionSpec::Method::wire;
  const double residual = exact || !spec.policy.keeps_errors() ? 0 : 4;
  row.memory_bytes = row.best.dense_bytes / 4 * (kStateBytes + residual) + bucket * row.best.sent_bytes;
  return row;
}

}  // namespace

Plan make_plan(const PlanRequest& request) {
  Plan plan{.costs = step_costs(request), .levels = {}, .parameters = 0, .rows = {}};
  for (const GradientTensor& tensor : plan.costs.tensors) plan.parameters += tensor.count();
  const std::vector<int64_t> sizes =
      request.bucket_mb.empty() ? candidate_bucket_mb(plan.costs) : request.bucket_mb;
  std::vector<ScheduleKind> kinds = {ScheduleKind::nccl};
  kinds.insert(kinds.end(), all_schedules().begin(), all_schedules().end());
  std::vector<std::unique_ptr<SimulatedSchedule>> schedules;
  for (ScheduleKind kind : kinds) {
    if (!SimulatedSchedule::supports(kind, request.cluster, request.ranks)) continue;
    schedules.push_back(std::make_unique<SimulatedSchedule>(kind, request.cluster, request.ranks));
  }
  plan.levels = schedules[0]->fabric().levels();
  plan.rows.push_back(make_row(request, plan.costs, "fp32", *schedules[0], sizes));
  for (const std::string& text : request.specs.empty() ? candidate_specs() : request.specs) {
    const CompressionSpec spec = CompressionSpec::parse(text);
    const size_t before = plan.rows.size();
    for (const auto& schedule : schedules) {
      const ScheduleKind kind = schedule->kind();
      if (spec.schedule != ScheduleKind::automatic && kind != spec.schedule) continue;
      if (kind == ScheduleKind::nccl && (!spec.wire->exact || text == "fp32")) continue;
      plan.rows.push_back(make_row(request, plan.costs, text, *schedule, sizes));
    }
    if (plan.rows.size() == before) {
      throw BadInput(fmt::format("{}: {} ranks in nodes of {} cannot run schedule={}; use schedule=auto",
                                 text, request.ranks, request.cluster.gpus_per_node, name(spec.schedule)));
    }
  }
  return plan;
}

}  // namespace gradwire
