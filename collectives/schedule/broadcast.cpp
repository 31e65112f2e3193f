// Broadcast: an all-gather in which the root owns every chunk. Ranks add nothing: they forward unchanged the
// bytes that the root encodes. S is the size of the buffer, n the number of ranks. Each rank but the root
// receives S, the minimum, and the value is rounded once.
//
// ring: a chain through all ranks, right neighbours first, in n chunks. Chunk c crosses hop h in round c + h,
//   so the schedule has 2n - 2 rounds. Each rank but the last sends S to its right neighbour.
// two_shot: n - 1 chunks. In round 1, the root sends chunk c directly to the c-th other rank. In round 2,
//   each other rank sends its chunk directly to all ranks but the root. The root sends S, each other rank
//   (n-2)/(n-1) S.
// hierarchical: N nodes of L ranks, (N-1) L chunks. In round 1, the root sends one chunk to every rank of the
//   other nodes, so S enters each node over L links. In round 2, ranks of the same local index exchange their
//   chunks between the other nodes, while the root scatters all chunks inside its node. In round 3, inside
//   each node, every rank sends the chunks from rounds 1 and 2 to the node's other ranks. The root sends S
//   between nodes and S inside its node. A rank of another node sends (N-2)/(N-1) S/L between nodes and
//   (L-1)/L S inside its node. The root sends the value to other nodes first, so the root's node receives the
//   transmitted value.
// Sync points: in each round a rank waits only for the sender.

#include <algorithm>

#include "collectives/schedule/schedule.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

Schedule from_root(ScheduleKind kind, int world, int root, int chunks, int rounds) {
  Schedule s = detail::empty_schedule(kind, world, std::vector<int32_t>(chunks, root), rounds);
  s.collective = Collective::broadcast;
  s.lossy_steps = s.inter_node_lossy_steps = world > 1 ? 1 : 0;
  return s;
}

Schedule chain(int world, int root) {
  const int chunks = world > 2 ? world : 1;
  Schedule s = from_root(ScheduleKind::ring, world, root, chunks, chunks + world - 2);
  for (int hop = 0; hop < world - 1; ++hop) {
    for (int c = 0; c < chunks; ++c) {
      detail::add_transfer(s, c + hop, (root + hop) % world, (root + hop + 1) % world, c,
                           Step::Kind::recv_copy);
    }
  }
  return s;
}

Schedule scatter_and_exchange(int world, int root) {
  Schedule s = from_root(ScheduleKind::two_shot, world, root, std::max(1, world - 1), std::min(2, world - 1));
  const auto holder = [&](int c) { return (root + 1 + c) % world; };
  const int others = world - 1;
  for (int c = 0; c < others; ++c) {
    detail::add_transfer(s, 0, root, holder(c), c, Step::Kind::recv_copy);
    for (int k = 1; k < others; ++k) {
      detail::add_transfer(s, 1, holder(c), holder((c + k) % others), c, Step::Kind::recv_copy);
    }
  }
  return s;
}

Schedule enter_nodes_once(int nodes, int per_node, int root) {
  const int world = nodes * per_node, parts = std::max(1, nodes - 1);
  const int first = nodes > 1 ? 1 : 0;                   // rounds before the second phase
  const int second = nodes > 2 || per_node > 1 ? 1 : 0;  // rounds of the second phase
  const int third = per_node > 2 || (nodes > 1 && per_node > 1) ? 1 : 0;
  Schedule s = from_root(ScheduleKind::hierarchical, world, root, parts * per_node, first + second + third);
  s.nodes = nodes;
  s.per_node = per_node;
  s.inter_node_lossy_steps = nodes > 1 ? 1 : 0;
  const int home = root / per_node, at_home = root % per_node;
  // Chunk (m, l) enters the m-th other node through its local rank l.
  const auto chunk = [&](int m, int l) { return m * per_node + l; };
  const auto rank = [&](int m, int l) { return (home + 1 + m) % nodes * per_node + l; };
  for (int m = 0; m < parts; ++m) {
    for (int l = 0; l < per_node; ++l) {
      const int c = chunk(m, l);
      if (nodes > 1) {
        detail::add_transfer(s, 0, root, rank(m, l), c, Step::Kind::recv_copy);
        for (int k = 1; k < parts; ++k) {
          detail::add_transfer(s, first, rank(m, l), rank((m + k) % parts, l), c, Step::Kind::recv_copy);
        }
        for (int node = 0; node < parts; ++node) {
          for (int k = 1; k < per_node; ++k) {
            detail::add_transfer(s, first + second, rank(node, l), rank(node, (l + k) % per_node), c,
                                 Step::Kind::recv_copy, true);
          }
        }
      }
      if (per_node == 1) continue;
      // In the root's node, the chunks of the root's local index go to the other ranks in turn, so that the
      // root sends each chunk once.
      const int to = l != at_home ? l : (at_home + 1 + m % (per_node - 1)) % per_node;
      const auto local = [&](int index) { return home * per_node + index; };
      detail::add_transfer(s, first, root, local(to), c, Step::Kind::recv_copy, true);
      for (int k = 1; k < per_node; ++k) {
        const int other = (to + k) % per_node;
        if (other == at_home) continue;
        detail::add_transfer(s, first + second, local(to), local(other), c, Step::Kind::recv_copy, true);
      }
    }
  }
  return s;
}

}  // namespace

Schedule broadcast(ScheduleKind kind, int world, int root, Topology topology) {
  if (world < 1) throw BadInput("a schedule needs at least 1 rank, got {}", world);
  if (root < 0 || root >= world) throw BadInput("root is {} in a world of {}", root, world);
  if (!has_broadcast(kind)) {
    throw BadInput("schedule={} has no broadcast; use schedule=ring, two_shot or hierarchical", name(kind));
  }
  switch (kind) {
    case ScheduleKind::ring:
      return chain(world, root);
    case ScheduleKind::two_shot:
      return scatter_and_exchange(world, root);
    case ScheduleKind::hierarchical: {
      const Topology t = detail::complete(topology, world);
      return enter_nodes_once(t.nodes, t.per_node, root);
    }
    default:
      break;
  }
  throw Error("broadcast: schedule=auto must be resolved by the planner");
}

}  // namespace gradwire
