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

#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Throws BadInput for arguments of hierarchical() that do not give a schedule.
void check_arguments(int nodes, int per_node, ScheduleKind between) {
  if (nodes < 1 || per_node < 1) {
    throw BadInput("a hierarchical schedule needs at least 1 node of 1 rank, got {} of {}", nodes, per_node);
  }
  if (between != ScheduleKind::two_shot && between != ScheduleKind::ring) {
    throw BadInput("between nodes a hierarchical schedule runs two_shot or ring, not {}", name(between));
  }
  const bool direct = between == ScheduleKind::two_shot;
  const int max_inputs = per_node - 1 + (nodes == 1 ? 0 : direct ? nodes - 1 : 1);
  if (max_inputs <= kMaxInputs) return;
  throw BadInput("{} nodes of {} ranks would add {} messages at once, more than {}; use {}", nodes, per_node,
                 max_inputs, kMaxInputs,
                 direct && per_node <= kMaxInputs ? "a ring between the nodes" : "schedule=ring");
}

// Adds the reduce-scatter inside the node to round `first`, and the all-gather to round `last`.
void add_transfers_inside(const Schedule& s, int node, int first, int last, const TransferSink& sink) {
  const auto rank = [&](int local) { return node * s.per_node + local; };
  for (int hop = 1; hop < s.per_node; ++hop) {
    for (int local = 0; local < s.per_node; ++local) {
      const int to = (local + hop) % s.per_node;
      for (int b = 0; b < s.nodes; ++b) {
        sink.add(first, rank(local), rank(to), to * s.nodes + b, Step::Kind::recv_reduce, true);
        sink.add(last, rank(local), rank(to), local * s.nodes + b, Step::Kind::recv_copy, true);
      }
    }
  }
}

}  // namespace

void detail::emit_hierarchical(int nodes, int per_node, ScheduleKind between, const TransferSink& sink) {
  check_arguments(nodes, per_node, between);
  const bool direct = between == ScheduleKind::two_shot;
  const int inner = per_node > 1 ? 1 : 0, outer = nodes == 1 ? 0 : direct ? 2 : 2 * (nodes - 1);
  const int between_steps = nodes == 1 ? 0 : direct ? 2 : nodes;
  const int world = nodes * per_node;
  Schedule s = outline(ScheduleKind::hierarchical, world, one_chunk_each(world));
  s.nodes = nodes;
  s.per_node = per_node;
  s.inter_node_lossy_steps = between_steps;
  s.lossy_steps = nodes > 1 ? inner + between_steps : 2 * inner;
  for (int local = 0; local < per_node; ++local) {
    for (int node = 0; node < nodes; ++node) s.owner[local * nodes + node] = node * per_node + local;
  }
  sink.begin(s, 2 * inner + outer);
  for (int node = 0; node < nodes; ++node) add_transfers_inside(s, node, 0, inner + outer, sink);
  for (int local = 0; local < per_node; ++local) {
    // Shift the allreduce of the nodes to the ranks and the shard of this local index, and to later rounds.
    const TransferSink shard{.begin = [](const Schedule&, int) {},
                             .add =
                                 [&](int round, int from, int to, int chunk, Step::Kind receive, bool) {
                                   sink.add(inner + round, from * per_node + local, to * per_node + local,
                                            chunk + local * nodes, receive, false);
                                 }};
    direct ? emit_two_shot(nodes, shard) : emit_ring(nodes, shard);
  }
}

Schedule hierarchical(int nodes, int per_node, ScheduleKind between) {
  return detail::collect(
      [&](const TransferSink& sink) { detail::emit_hierarchical(nodes, per_node, between, sink); });
}

}  // namespace gradwire
