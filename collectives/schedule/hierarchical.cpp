// Hierarchical allreduce: most bytes stay on links inside a node, as few as possible cross between nodes.
//
// N nodes of L ranks, rank = node * L + local. The buffer is cut into L shards of N chunks: chunk l * N + b
// belongs to shard l and is owned by local rank l of node b. With one node the schedule is a two-shot.
//
// Phases: (1) inside each node, one round: all ranks send their shard l directly to local rank l, which adds
//   them. (2) between nodes: the N ranks with local index l allreduce shard l, as a two-shot (2 rounds) or a
//   ring (2 (N-1) rounds). (3) inside each node, one round: local rank l sends shard l to the others.
// Messages: S/(L N) each.
// Bytes per rank: 2 (L-1)/L S inside the node, 2 (N-1)/N S/L between nodes; so a node sends 2 (N-1)/N S, the
//   minimum.
// Lossy steps with the wire format on every link: 1 inside, plus 2 (two-shot) or N (ring) between nodes; with
//   it only between nodes: 2 or N.
// Sync points: rounds inside a node wait for its slowest rank, rounds between nodes as in their schedule.
//
// Partial sums leave a node only after phase 1, so other nodes receive the node's sum. The owner's first send
// of a finished chunk goes to another node, so the owner keeps, and phase 3 distributes, the transmitted
// value.
#include <fmt/format.h>

#include "collectives/schedule/build.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire {

Schedule hierarchical(int nodes, int per_node, ScheduleKind between) {
  if (nodes < 1 || per_node < 1) {
    throw BadInput(fmt::format("a hierarchical schedule needs at least 1 node of 1 rank, got {} of {}", nodes,
                               per_node));
  }
  if (between != ScheduleKind::two_shot && between != ScheduleKind::ring) {
    throw BadInput(
        fmt::format("between nodes a hierarchical schedule runs two_shot or ring, not {}", name(between)));
  }
  bool straight = between == ScheduleKind::two_shot;
  int most_inputs = per_node - 1 + (nodes == 1 ? 0 : straight ? nodes - 1 : 1);
  if (most_inputs > kMaxInputs) {
    throw BadInput(
        fmt::format("{} nodes of {} ranks would add {} messages at once, more than {}; use {}", nodes,
                    per_node, most_inputs, kMaxInputs,
                    straight && per_node <= kMaxInputs ? "a ring between the nodes" : "schedule=ring"));
  }
  int inner = per_node > 1 ? 1 : 0;
  int outer = nodes == 1 ? 0 : straight ? 2 : 2 * (nodes - 1);
  int world = nodes * per_node;
  Schedule s = detail::empty_schedule(ScheduleKind::hierarchical, world, detail::one_chunk_each(world),
                                      2 * inner + outer);
  s.nodes = nodes;
  s.per_node = per_node;
  if (nodes > 1) s.inter_node_lossy_steps = straight ? 2 : nodes;
  s.lossy_steps = nodes > 1 ? inner + s.inter_node_lossy_steps : 2 * inner;

  auto rank = [&](int node, int local) { return node * per_node + local; };
  for (int local = 0; local < per_node; ++local) {
    for (int node = 0; node < nodes; ++node) s.owner[local * nodes + node] = rank(node, local);
  }
  for (int node = 0; node < nodes; ++node) {
    for (int hop = 1; hop < per_node; ++hop) {
      for (int local = 0; local < per_node; ++local) {
        int to = (local + hop) % per_node;
        for (int b = 0; b < nodes; ++b) {
          detail::add_transfer(s, 0, rank(node, local), rank(node, to), to * nodes + b,
                               Step::Kind::recv_reduce, true);
          detail::add_transfer(s, inner + outer, rank(node, local), rank(node, to), local * nodes + b,
                               Step::Kind::recv_copy, true);
        }
      }
    }
  }
  if (nodes == 1) return s;
  // The schedule between the nodes; each local index runs it on its own shard.
  Schedule across = straight ? two_shot(nodes) : ring(nodes);
  for (int local = 0; local < per_node; ++local) {
    for (int node = 0; node < nodes; ++node) {
      for (int k = 0; k < outer; ++k) {
        for (Step step : across.rounds[node][k]) {
          step.peer = rank(step.peer, local);
          step.chunk += local * nodes;
          s.rounds[rank(node, local)][inner + k].push_back(step);
        }
      }
    }
  }
  return s;
}

}  // namespace gradwire
