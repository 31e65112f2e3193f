// Two-shot allreduce: two rounds, and a rounding error that does not grow with n.
//
// Phases: round 1, all ranks send their chunk c directly to rank c, which adds all n parts in rank order in
//   FP32; round 2, rank c sends the result directly to all.
// Messages: S/n each, n (n-1) per round, between all pairs: suits switched fabrics and small worlds.
// Bytes per rank: 2 (n-1)/n S, the minimum, spread over n-1 links.
// Lossy steps: 2, the sender's encode and the owner's.
// Sync points: each round waits for the slowest rank.
#include "collectives/schedule/schedule.h"

namespace gradwire {

void detail::emit_two_shot(int world, const TransferSink& sink) {
  Schedule s = outline(ScheduleKind::two_shot, world, one_chunk_each(world));
  s.lossy_steps = s.inter_node_lossy_steps = world == 1 ? 0 : 2;
  sink.begin(s, 2);
  // Start at the right neighbour to spread the load: no rank is the first peer of all other ranks.
  for (int k = 1; k < world; ++k) {
    for (int r = 0; r < world; ++r) {
      int to = (r + k) % world;
      sink.add(0, r, to, to, Step::Kind::recv_reduce, false);
      sink.add(1, r, to, r, Step::Kind::recv_copy, false);
    }
  }
}

Schedule two_shot(int world) {
  return detail::collect([&](const TransferSink& sink) { detail::emit_two_shot(world, sink); });
}

}  // namespace gradwire
