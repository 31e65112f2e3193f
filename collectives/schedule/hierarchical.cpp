// Hierarchical allreduce: most bytes stay on links inside a node, and the least possible number of bytes
// crosses between nodes.
//
// N nodes of L ranks, rank = node * L + local. The buffer is cut into L shards of N chunks: chunk l * N + b
// belongs to shard l and is owned by local rank l of node b. With one node the schedule is a two-shot.
//
// Phases: (1) inside each node, one round: all ranks send their part of shard l directly to local rank l,
//   which adds the parts. (2) between nodes: the N ranks with local index l allreduce shard l, as a two-shot
//   (2 rounds) or a ring (2 (N-1) rounds). (3) inside each node, one round: local rank l sends shard l to the
//   node's other ranks.
// Messages: S/(L N) each.
// Bytes per rank: 2 (L-1)/L S inside the node, 2 (N-1)/N S/L between nodes; so a node sends 2 (N-1)/N S, the
//   minimum.
// Lossy steps: with the wire format on every link, 1 inside nodes plus 2 (two-shot) or N (ring) between
//   nodes; with the wire format only between nodes, 2 or N.
// Sync points: rounds inside a node wait for the node's slowest rank. Rounds between nodes have the sync
//   points of the two-shot or the ring.
//
// Partial sums leave a node only after phase 1, so other nodes receive the node's sum. The owner first sends
// a finished chunk to another node. So the owner stores the transmitted value, and phase 3 distributes the
// transmitted value.
#include <fmt/format.h>

#include "collectives/schedule/build.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Throws BadInput for arguments of hierarchical() that do not give a schedule.
void check_arguments(int nodes, int per_node, ScheduleKind between) {
  if (nodes < 1 || per_node < 1) {
    throw BadInput(fmt::format("a hierarchical schedule needs at least 1 node of 1 rank, got {} of {}", nodes,
                               per_node));
  }
  if (between != ScheduleKind::two_shot && between != ScheduleKind::ring) {
    throw BadInput(
        fmt::format("between nodes a hierarchical schedule runs two_shot or ring, not {}", name(between)));
  }
  const bool direct = between == ScheduleKind::two_shot;
  const int most_inputs = per_node - 1 + (nodes == 1 ? 0 : direct ? nodes - 1 : 1);
  if (most_inputs <= kMaxInputs) return;
  throw BadInput(
      fmt::format("{} nodes of {} ranks would add {} messages at once, more than {}; use {}", nodes, per_node,
                  most_inputs, kMaxInputs,
                  direct && per_node <= kMaxInputs ? "a ring between the nodes" : "schedule=ring"));
}

// Adds the reduce-scatter inside the node to round `first`, and the all-gather to round `last`.
void add_transfers_inside(Schedule& s, int node, int first, int last) {
  const auto rank = [&](int local) { return node * s.per_node + local; };
  for (int hop = 1; hop < s.per_node; ++hop) {
    for (int local = 0; local < s.per_node; ++local) {
      const int to = (local + hop) % s.per_node;
      for (int b = 0; b < s.nodes; ++b) {
        detail::add_transfer(s, first, rank(local), rank(to), to * s.nodes + b, Step::Kind::recv_reduce,
                             true);
        detail::add_transfer(s, last, rank(local), rank(to), local * s.nodes + b, Step::Kind::recv_copy,
                             true);
      }
    }
  }
}

// Adds the allreduce of shard `local` between the nodes, from round `first` on.
void add_transfers_between(Schedule& s, const Schedule& across, int local, int first) {
  const auto rank = [&](int node) { return node * s.per_node + local; };
  for (int node = 0; node < s.nodes; ++node) {
    for (int k = 0; k < across.num_rounds(); ++k) {
      for (Step step : across.rounds[node][k]) {
        step.peer = rank(step.peer);
        step.chunk += local * s.nodes;
        s.rounds[rank(node)][first + k].push_back(step);
      }
    }
  }
}

}  // namespace

Schedule hierarchical(int nodes, int per_node, ScheduleKind between) {
  check_arguments(nodes, per_node, between);
  const Schedule across = between == ScheduleKind::two_shot ? two_shot(nodes) : ring(nodes);
  const int inner = per_node > 1 ? 1 : 0, outer = across.num_rounds();
  const int world = nodes * per_node;
  Schedule s = detail::empty_schedule(ScheduleKind::hierarchical, world, detail::one_chunk_each(world),
                                      2 * inner + outer);
  s.nodes = nodes;
  s.per_node = per_node;
  s.inter_node_lossy_steps = across.lossy_steps;
  s.lossy_steps = nodes > 1 ? inner + across.lossy_steps : 2 * inner;
  for (int local = 0; local < per_node; ++local) {
    for (int node = 0; node < nodes; ++node) s.owner[local * nodes + node] = node * per_node + local;
  }
  for (int node = 0; node < nodes; ++node) add_transfers_inside(s, node, 0, inner + outer);
  for (int local = 0; local < per_node; ++local) add_transfers_between(s, across, local, inner);
  return s;
}

}  // namespace gradwire
