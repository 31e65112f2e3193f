#include "trainer/plan/simulated_schedule.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "collectives/program/program.h"
#include "kernels/wire/format.h"
#include "trainer/plan/nccl_model.h"
#include "trainer/plan/simulator.h"

namespace gradwire {
namespace {

constexpr int kLeastExponent = 10;  // smaller buffers take the time of 1 KiB

ScheduleKind transfers_of(ScheduleKind kind) {
  return kind == ScheduleKind::nccl ? ScheduleKind::ring : kind;
}

}  // namespace

SimulatedSchedule::SimulatedSchedule(ScheduleKind kind, const Cluster& cluster, int ranks)
    : cluster_(cluster), kind_(kind), fabric_(cluster, ranks, is_symmetric(transfers_of(kind))) {
  const std::vector<std::vector<double>> levels = sent_by_level(flows(1), fabric_);
  // NCCL rotates its rings, so that every rank has its turn at a network card.
  const auto busiest = [&](const std::vector<double>& sent) {
    return kind == ScheduleKind::nccl ? std::reduce(sent.begin(), sent.end()) / fabric_.period()
                                      : *std::max_element(sent.begin(), sent.end());
  };
  for (const std::vector<double>& level : levels) busiest_.push_back(busiest(level));
  std::vector<double> all = levels[0];  // of each rank; a rank's messages are on the first two levels
  for (size_t r = 0; levels.size() > 1 && r < all.size(); ++r) all[r] += levels[1][r];
  busiest_of_all_ = busiest(all);
}

bool SimulatedSchedule::supports(ScheduleKind kind, const Cluster& cluster, int ranks) {
  const int per_node = std::min(ranks, cluster.gpus_per_node);
  if (kind == ScheduleKind::two_shot) return ranks <= kMaxInputs + 1;
  if (kind == ScheduleKind::hierarchical) return per_node > 1 && per_node < ranks && per_node <= kMaxInputs;
  return kind != ScheduleKind::automatic;
}

const FlowRounds& SimulatedSchedule::flows(int slices) {
  auto at = flows_.find(slices);
  if (at == flows_.end()) {
    at = flows_.emplace(slices, flow_rounds(transfers_of(kind_), fabric_, slices)).first;
  }
  return at->second;
}

double SimulatedSchedule::knot_us(int exponent, double inside) {
  auto [at, is_new] = knots_.try_emplace({exponent, inside}, 0);
  if (!is_new) return at->second;
  const double bytes = std::exp2(exponent);
  const double slices = std::ceil(bytes / outline().chunks / kSliceBytes);
  const FlowRounds& rounds = flows(static_cast<int>(std::clamp<double>(slices, 1, Program::kMostSlices)));
  return at->second = simulate_us(rounds, fabric_, bytes, inside * bytes);
}

AllreduceCost SimulatedSchedule::cost(int64_t count, Wire wire, bool fp32_inside) {
  const auto bytes = static_cast<double>(wire->bytes(count));
  AllreduceCost out{.schedule = name(kind_)};
  out.sent_bytes = busiest_of_all_ * bytes;
  if (is_fp32_inside(fp32_inside)) {  // every rank of a hierarchical schedule sends on both levels
    const std::vector<double> levels = level_bytes(count, wire, fp32_inside);
    out.sent_bytes = levels[0] + levels[1];
  }
  if (kind_ == ScheduleKind::nccl) {
    out.us = nccl_allreduce_estimate(cluster_, fabric_.ranks(), bytes).us;
    return out;
  }
  const double inside = fp32_inside ? static_cast<double>(kFp32->bytes(count)) / bytes : 1;
  const int exponent = std::max(kLeastExponent, static_cast<int>(std::log2(bytes)));
  const double low = knot_us(exponent, inside), high = knot_us(exponent + 1, inside);
  out.us = low + (high - low) * std::max(0.0, bytes / std::exp2(exponent) - 1);
  return out;
}

std::vector<double> SimulatedSchedule::level_bytes(int64_t count, Wire wire, bool fp32_inside) const {
  std::vector<double> out;
  for (double fraction : busiest_) {
    const Wire format = is_fp32_inside(fp32_inside) && out.empty() ? kFp32 : wire;
    out.push_back(fraction * static_cast<double>(format->bytes(count)));
  }
  return out;
}

}  // namespace gradwire
