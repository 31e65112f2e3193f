#include "collectives/schedule/schedule.h"

#include <algorithm>

#include "collectives/schedule/build.h"
#include "kernels/wire/bf16.h"
#include "runtime/error.h"

namespace gradwire {
namespace detail {

Schedule empty_schedule(ScheduleKind kind, int world, int chunks, int rounds) {
  if (world < 1) throw BadInput("a schedule needs at least 1 rank, got " + std::to_string(world));
  Schedule s;
  s.kind = kind;
  s.world = world;
  s.chunks = chunks;
  s.nodes = world;
  s.rounds.assign(world, std::vector<Round>(world == 1 ? 0 : rounds));
  return s;
}

void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive, bool fast) {
  schedule.rounds[from][round].push_back({Step::Kind::send, to, chunk, fast});
  schedule.rounds[to][round].push_back({receive, from, chunk, fast});
}

}  // namespace detail

Schedule pipelined(const Schedule& schedule, int slices) {
  if (slices < 1)
    throw BadInput("a pipelined schedule needs at least 1 slice, got " + std::to_string(slices));
  Schedule s = schedule;
  if (slices == 1) return s;
  s.chunks *= slices;
  int rounds = schedule.num_rounds();
  for (int r = 0; r < s.world && rounds > 0; ++r) {
    s.rounds[r].assign(2 * (rounds - 1) + slices, {});
    // Slices ascend inside a round on every rank, so transfers between two ranks still match in order.
    for (int slice = 0; slice < slices; ++slice) {
      for (int k = 0; k < rounds; ++k) {
        for (Step step : schedule.rounds[r][k]) {
          step.chunk = step.chunk * slices + slice;
          s.rounds[r][2 * k + slice].push_back(step);
        }
      }
    }
  }
  return s;
}

ChunkRange chunk_range(int64_t count, int chunks, int chunk, int64_t granularity) {
  int64_t units = (count + granularity - 1) / granularity;
  auto edge = [&](int64_t c) { return std::min(count, units * c / chunks * granularity); };
  return {edge(chunk), edge(chunk + 1)};
}

int64_t elements_sent(const Schedule& schedule, int rank, int64_t count) {
  int64_t sent = 0;
  for (const Round& round : schedule.rounds[rank]) {
    for (const Step& step : round) {
      if (step.kind == Step::Kind::send) sent += chunk_range(count, schedule.chunks, step.chunk).count();
    }
  }
  return sent;
}

namespace {

// Fills in what is unknown of the topology from the world.
Topology complete(Topology t, int world) {
  if (t.nodes < 0 || t.per_node < 0) throw BadInput("nodes and ranks per node cannot be negative");
  if (t.nodes == 0 && t.per_node == 0) {
    throw BadInput("schedule=hierarchical needs the number of ranks per node; set it or use schedule=ring");
  }
  if (t.per_node == 0 && world % t.nodes == 0) t.per_node = world / t.nodes;
  if (t.nodes == 0 && world % t.per_node == 0) t.nodes = world / t.per_node;
  if (t.nodes * t.per_node != world) {
    auto part = [](int n, const char* unit) {
      return n == 0 ? std::string("equal ") + unit : std::to_string(n) + " " + unit;
    };
    throw BadInput("schedule=hierarchical: " + std::to_string(world) + " ranks are not " +
                   part(t.nodes, "nodes") + " of " + part(t.per_node, "ranks") +
                   "; use nodes of equal size or schedule=ring");
  }
  return t;
}

}  // namespace

Schedule make_schedule(ScheduleKind kind, int world, Wire wire, std::string* reason, Topology topology) {
  auto because = [&](const std::string& text) {
    if (reason) *reason = text;
  };
  constexpr int kMostTwoShot = kMaxHopInputs + 1;
  switch (kind) {
    case ScheduleKind::automatic:
      if (world > kMostTwoShot) {
        because("more than " + std::to_string(kMostTwoShot) + " ranks");
        return ring(world);
      }
      because(wire == Wire::fp32
                  ? "2 rounds instead of the ring's " + std::to_string(2 * (world - 1)) + ", same bytes"
                  : "2 lossy steps instead of the ring's " + std::to_string(world) + ", same bytes");
      return two_shot(world);
    case ScheduleKind::ring:
      because("asked for");
      return ring(world);
    case ScheduleKind::two_shot:
      if (world > kMostTwoShot) {
        throw BadInput("schedule=two_shot serves at most " + std::to_string(kMostTwoShot) + " ranks, not " +
                       std::to_string(world) + "; use schedule=ring");
      }
      because("asked for");
      return two_shot(world);
    case ScheduleKind::tree:
      because("asked for");
      return double_tree(world);
    case ScheduleKind::hierarchical: {
      Topology t = complete(topology, world);
      // A ring between very many nodes: each of its steps adds a single message.
      bool straight = t.nodes + t.per_node - 2 <= kMaxHopInputs;
      because("asked for, " + std::to_string(t.nodes) + " nodes of " + std::to_string(t.per_node));
      return hierarchical(t.nodes, t.per_node, straight ? ScheduleKind::two_shot : ScheduleKind::ring);
    }
  }
  throw BadInput("unknown schedule kind " + std::to_string(static_cast<int>(kind)));
}

}  // namespace gradwire
