// Ring allreduce: the classic bandwidth-optimal schedule.
//
// Phases: n-1 rounds of reduce-scatter, n-1 rounds of all-gather. In each round every rank sends a chunk of
//   S/n to its right neighbour and receives a chunk from its left neighbour. Chunk c starts at rank c + 1,
//   collects a contribution per hop, is complete at its owner, rank c, and then passes all ranks once more.
// Bytes per rank: 2 (n-1)/n S, the minimum, over a single link.
// Lossy steps: n, one per hop of the reduction and the owner's encode, so the error grows with n.
// Sync points: a rank waits for its left neighbour in every round; the result crosses 2 (n-1) hops.
#include "collectives/schedule/schedule.h"

namespace gradwire {

void detail::emit_ring(int world, const TransferSink& sink) {
  Schedule s = outline(ScheduleKind::ring, world, one_chunk_each(world));
  s.lossy_steps = s.inter_node_lossy_steps = world == 1 ? 0 : world;
  sink.begin(s, 2 * (world - 1));
  auto wrap = [world](int x) { return ((x % world) + world) % world; };
  for (int k = 0; k < world - 1; ++k) {
    for (int r = 0; r < world; ++r) {
      sink.add(k, r, wrap(r + 1), wrap(r - 1 - k), Step::Kind::recv_reduce, false);
      sink.add(world - 1 + k, r, wrap(r + 1), wrap(r - k), Step::Kind::recv_copy, false);
    }
  }
}

Schedule ring(int world) {
  return detail::collect([&](const TransferSink& sink) { detail::emit_ring(world, sink); });
}

}  // namespace gradwire
