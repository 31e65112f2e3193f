#include "collectives/plan/planner.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/program/program.h"
#include "kernels/wire/format.h"

namespace gradwire {
namespace {

constexpr double kWorseByLossyStep = 0.1, kAsGood = 1.2;
constexpr double kLatenciesPerSlice = 4;
constexpr int64_t kMinSlice = 128 << 10;
// The cost of NCCL's allreduce if not measured: NCCL 2.27.7 on eight H200 behind one NVSwitch, as published
// (stas00/ml-engineering, 2026-08): 38 us up to 512 KiB, 482 GB/s at 16 GiB.
constexpr LinkCosts::Pattern kNcclOnNvlink{.latency_us = 38, .bytes_per_us = 482e3};

std::string milliseconds(double us) {
  return fmt::format("{:.3g} ms", us / 1e3);
}

}  // namespace

SchedulePlanner::Loads SchedulePlanner::loads(const Schedule& s, const std::vector<double>& parts) {
  Loads result;
  std::vector<double> sent[2], received[2];
  for (bool intra_node : {false, true})
    sent[intra_node].resize(s.world), received[intra_node].resize(s.world);
  for (int k = 0; k < s.num_rounds(); ++k) {
    double most[2] = {};
    bool used[2] = {};
    for (int r = 0; r < s.world; ++r) {
      double out[2] = {}, in[2] = {};
      int messages = 0;
      for (const Step& step : s.rounds[r][k]) {
        const bool sends = step.kind == Step::Kind::send;
        const double part = parts[static_cast<size_t>(step.chunk)];
        if (part == 0) continue;
        (sends ? out : in)[step.intra_node] += part;
        messages += sends ? 1 : 0;
        used[step.intra_node] = true;
      }
      result.messages = std::max(result.messages, messages);
      for (bool intra_node : {false, true}) {
        most[intra_node] = std::max({most[intra_node], out[intra_node], in[intra_node]});
        sent[intra_node][r] += out[intra_node];
        received[intra_node][r] += in[intra_node];
      }
    }
    for (bool intra_node : {false, true}) {
      result.rounds[intra_node] += used[intra_node] ? 1 : 0;
      result.serial[intra_node] += most[intra_node];
    }
  }
  for (bool intra_node : {false, true}) {
    double& busiest = result.busiest[intra_node];
    for (int r = 0; r < s.world; ++r) {
      busiest = std::max({busiest, sent[intra_node][r], received[intra_node][r]});
    }
  }
  return result;
}

SchedulePlanner::SchedulePlanner(const CompressionSpec& spec, Collective collective, int world,
                                 int ranks_per_node, const LinkCosts& costs, int64_t slice_bytes, int root)
    : fp32_intra_node_(spec.fp32_intra_node), world_(world), costs_(costs), slice_bytes_(slice_bytes) {
  const Topology topology{.nodes = 0, .per_node = ranks_per_node};
  auto add = [&](ScheduleKind kind) {
    Candidate& c = candidates_.emplace_back();
    c.schedule = make_schedule(collective, kind, world, topology, root);
    c.even = loads(c.schedule, std::vector<double>(c.schedule.chunks, 1.0 / c.schedule.chunks));
  };
  if (spec.schedule != ScheduleKind::automatic) {
    add(spec.schedule);
    const Schedule& only = candidates_[0].schedule;
    reason_ = "requested";
    if (spec.schedule == ScheduleKind::hierarchical)
      reason_ += fmt::format(", {} nodes of {}", only.nodes, only.per_node);
    return;
  }
  const bool broadcast = collective == Collective::broadcast;  // a broadcast adds no contributions
  if (world <= max_world(ScheduleKind::two_shot) || broadcast) add(ScheduleKind::two_shot);
  const bool nodes = ranks_per_node > 1 && ranks_per_node < world && world % ranks_per_node == 0;
  if (nodes && (ranks_per_node <= kMaxInputs || broadcast)) add(ScheduleKind::hierarchical);
  if (world > 2) {  // with two ranks, all schedules are the same
    add(ScheduleKind::ring);
    if (!broadcast) add(ScheduleKind::tree);
    if (costs.library_measured && collective == Collective::allreduce) add(ScheduleKind::nccl);
  }
}

const LinkCosts::Pattern& SchedulePlanner::link(const Candidate& candidate, bool intra_node) const {
  switch (candidate.schedule.kind) {
    case ScheduleKind::two_shot:
      return costs_.all_pairs;
    case ScheduleKind::hierarchical:
      return intra_node ? costs_.intra_node : costs_.inter_node;
    case ScheduleKind::nccl:
      return costs_.library_measured ? costs_.library : kNcclOnNvlink;
    default:
      return costs_.neighbour;
  }
}

double SchedulePlanner::predicted_us(const Option& option, int64_t count, Wire wire,
                                     const Shards& shards) const {
  const Candidate& candidate = *option.candidate;
  if (candidate.schedule.kind == ScheduleKind::nccl) {
    const LinkCosts::Pattern& pattern = link(candidate, false);
    return world_ == 1
               ? 0
               : pattern.latency_us + option.loads.busiest[false] * static_cast<double>(kFp32->bytes(count)) /
                                          pattern.bytes_per_us;
  }
  double us = 0;
  for (bool intra_node : {false, true}) {
    const int all_rounds = option.loads.rounds[intra_node];
    const double serial = option.loads.serial[intra_node], busiest = option.loads.busiest[intra_node];
    if (all_rounds == 0) continue;
    const bool exact = intra_node && fp32_intra_node_;
    const auto bytes = static_cast<double>((exact ? kFp32 : wire)->bytes(count));
    const LinkCosts::Pattern& pattern = link(candidate, intra_node);
    const int slices = Program::slices_for(candidate.schedule, count, wire, option.slice_bytes, shards);
    const double rounds = slices == 1 ? all_rounds : 2 * (all_rounds - 1) + slices;
    const double buffers = busiest + (serial - busiest) / slices;
    us += rounds * pattern.latency_us + buffers * bytes / pattern.bytes_per_us;
  }
  return us;
}

SchedulePlanner::Option SchedulePlanner::consider(const Candidate& c, int64_t count, Wire wire,
                                                  const Shards& shards) const {
  Option option{.candidate = &c, .loads = c.even, .slice_bytes = 0, .us = 0, .score = 0, .lossy_steps = 0};
  if (!shards.empty()) {
    std::vector<double> parts;
    for (ElementRange range : chunk_ranges(c.schedule, count, shards, wire->granularity)) {
      parts.push_back(count == 0 ? 0 : static_cast<double>(range.count()) / static_cast<double>(count));
    }
    option.loads = loads(c.schedule, parts);
  }
  if (slice_bytes_ != kAutomaticSlices) {
    option.slice_bytes = slice_bytes_;
  } else if (!costs_.measured) {
    option.slice_bytes = costs_.slice_bytes;
  } else {
    const LinkCosts::Pattern& slow = link(c, false);
    const double exchange = kLatenciesPerSlice * slow.latency_us * slow.bytes_per_us;
    option.slice_bytes =
        std::clamp(static_cast<int64_t>(exchange / option.loads.messages), kMinSlice, kSliceBytes);
  }
  option.us = predicted_us(option, count, wire, shards);
  if (!wire->exact) {
    option.lossy_steps = fp32_intra_node_ ? c.schedule.inter_node_lossy_steps : c.schedule.lossy_steps;
  }
  return option;
}

SchedulePlanner::Choice SchedulePlanner::choose(int64_t count, Wire wire, const Shards& shards) const {
  std::vector<Option> options;
  for (const Candidate& c : candidates_) {
    const ScheduleKind kind = c.schedule.kind;
    // A tree assigns chunks to only two ranks, and NCCL's allreduce sends whole buffers of FP32.
    const bool serves = shards.empty() ? kind != ScheduleKind::nccl || wire->exact
                                       : kind != ScheduleKind::tree && kind != ScheduleKind::nccl;
    if (serves || candidates_.size() == 1) options.push_back(consider(c, count, wire, shards));
  }
  if (options.size() == 1) {
    return {options[0].candidate->schedule,
            !reason_.empty() ? reason_
            : world_ == 1    ? "a world of 1"
                             : "with two ranks, all schedules are the same",
            options[0].us, options[0].slice_bytes};
  }
  int fewest = 1 << 30;
  for (const Option& o : options) fewest = std::min(fewest, o.lossy_steps);
  for (Option& o : options) o.score = o.us * (1 + kWorseByLossyStep * (o.lossy_steps - fewest));
  const double best = std::ranges::min_element(options, {}, &Option::score)->score;
  const Option chosen = *std::find_if(options.begin(), options.end(),
                                      [&](const Option& o) { return o.score <= kAsGood * best; });
  const Option fastest = *std::ranges::min_element(options, {}, &Option::us);
  const ScheduleKind kind = chosen.candidate->schedule.kind;
  std::string reason;
  if (fastest.candidate == chosen.candidate) {
    reason = fmt::format("fastest: {} predicted", milliseconds(chosen.us));
  } else if (chosen.lossy_steps < fastest.lossy_steps) {
    reason = fmt::format("{} predicted, {} lossy steps; {} is faster but has {}", milliseconds(chosen.us),
                         chosen.lossy_steps, name(fastest.candidate->schedule.kind), fastest.lossy_steps);
  } else {
    reason = fmt::format("{} predicted, within 20 % of the fastest", milliseconds(chosen.us));
  }
  for (const Option& o : options) {
    if (o.candidate->schedule.kind == kind) continue;
    reason += fmt::format(", {} {}", name(o.candidate->schedule.kind), milliseconds(o.us));
  }
  return {chosen.candidate->schedule, reason, chosen.us, chosen.slice_bytes};
}

}  // namespace gradwire
