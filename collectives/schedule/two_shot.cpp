// Two-shot allreduce: two rounds, and a rounding error that does not grow with n.
//
// Phases: round 1, all ranks send their chunk c directly to rank c, which adds all n parts in rank order in
//   FP32; round 2, rank c sends the result directly to all.
// Messages: S/n each, n (n-1) per round, between all pairs: suits switched fabrics and small worlds.
// Bytes per rank: 2 (n-1)/n S, the minimum, spread over n-1 links.
// Lossy steps: 2, the sender's encode and the owner's.
// Sync points: each round waits for the slowest rank.
#include "collectives/schedule/build.h"

namespace gradwire {

Schedule two_shot(int world) {
  Schedule s = detail::empty_schedule(ScheduleKind::two_shot, world, detail::one_chunk_each(world), 2);
  s.lossy_steps = s.inter_node_lossy_steps = world == 1 ? 0 : 2;
  // Start at the right neighbour to spread the load: no rank is the first peer of all other ranks.
  for (int k = 1; k < world; ++k) {
    for (int r = 0; r < world; ++r) {
      int to = (r + k) % world;
      detail::add_transfer(s, 0, r, to, to, Step::Kind::recv_reduce);
      detail::add_transfer(s, 1, r, to, r, Step::Kind::recv_copy);
    }
  }
  return s;
}

}  // namespace gradwire
