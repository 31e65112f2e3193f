#include "trainer/plan/flow_rounds.h"

#include <algorithm>
#include <tuple>

#include "collectives/schedule/schedule.h"

namespace gradwire {
namespace {

using Rounds = std::vector<std::vector<Flow>>;

class FlowSink final : public TransferSink {
 public:
  explicit FlowSink(int period) : period_(period) {}
  void begin(const Schedule& given, int count) override {
    outline = given;
    rounds.resize(outline.world == 1 ? 0 : count);
  }
  void add(int round, int from, int to, int, Step::Kind, bool intra_node) override {
    if (from >= period_) return;
    std::vector<Flow>& flows = rounds[round];
    // Chunks of one message come one after another in the schedules with many chunks per message.
    if (!flows.empty() && flows.back().from == from && flows.back().to == to) {
      ++flows.back().chunks;
    } else {
      flows.push_back({from, to, 1, intra_node});
    }
  }

  Schedule outline;
  Rounds rounds;

 private:
  const int period_;
};

void sort_and_merge(std::vector<Flow>& flows) {
  std::stable_sort(flows.begin(), flows.end(), [](const Flow& a, const Flow& b) {
    return std::tie(a.from, a.to) < std::tie(b.from, b.to);
  });
  size_t last = 0;
  for (size_t i = 1; i < flows.size(); ++i) {
    if (flows[i].from == flows[last].from && flows[i].to == flows[last].to) {
      flows[last].chunks += flows[i].chunks;
    } else {
      flows[++last] = flows[i];
    }
  }
  if (!flows.empty()) flows.resize(last + 1);
}

// Returns the rounds of pipelined(): round k of slice i is round i + 2 k.
Rounds cut_into_slices(const Rounds& rounds, int slices) {
  if (slices == 1 || rounds.empty()) return rounds;
  Rounds all(2 * (rounds.size() - 1) + slices);
  for (int slice = 0; slice < slices; ++slice) {
    for (size_t k = 0; k < rounds.size(); ++k) {
      std::vector<Flow>& into = all[2 * k + slice];
      into.insert(into.end(), rounds[k].begin(), rounds[k].end());
    }
  }
  return all;
}

FlowRounds collect(FlowSink&& sink, int slices) {
  FlowRounds out{.outline = std::move(sink.outline), .chunks = 1, .runs = {}};
  out.chunks = out.outline.chunks * slices;
  for (std::vector<Flow>& flows : cut_into_slices(sink.rounds, slices)) {
    sort_and_merge(flows);
    if (!out.runs.empty() && out.runs.back().flows == flows) {
      ++out.runs.back().rounds;
    } else {
      out.runs.push_back({std::move(flows), 1});
    }
  }
  return out;
}

}  // namespace

bool is_symmetric(ScheduleKind kind) {
  return kind != ScheduleKind::tree;
}

FlowRounds flow_rounds(ScheduleKind kind, const Fabric& fabric, int slices) {
  FlowSink sink(fabric.period());
  emit_schedule(kind, fabric.ranks(), {.nodes = 0, .per_node = fabric.per_node()}, sink);
  return collect(std::move(sink), slices);
}

FlowRounds flow_rounds(const Schedule& schedule) {
  FlowSink sink(schedule.world);
  sink.begin(schedule, schedule.num_rounds());
  sink.outline.rounds.clear();
  for (int k = 0; k < schedule.num_rounds(); ++k) {
    for (int r = 0; r < schedule.world; ++r) {
      for (const Step& step : schedule.rounds[r][k]) {
        if (step.kind == Step::Kind::send) sink.add(k, r, step.peer, step.chunk, step.kind, step.intra_node);
      }
    }
  }
  return collect(std::move(sink), 1);
}

}  // namespace gradwire
