// Double binary tree allreduce: logarithmic latency at (nearly) the ring's bandwidth.
//
// After Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"
// (2009). In a single binary tree half of the ranks are leaves and use only half of their bandwidth. Two
// trees, one for each half of the buffer, with every rank an interior node in at most one of them, keep all
// ranks busy.
//
// The trees: in an in-order traversal of a full binary tree, leaves and interior nodes alternate. So the odd
// positions form the interior of tree 0, which is balanced, and the even positions are the leaves of tree 0.
// Tree 1 is tree 0 mirrored (n even) or shifted by one position (n odd), so that the interior of tree 1 is at
// even positions.
//
// Phases: up, floor(log2 n) rounds: a node adds its children's sums to its part and sends the sum to its
//   parent; down, floor(log2 n) rounds: the root, which owns a half of the buffer, sends the result to its
//   children, and the children forward the result.
// Messages: S/2 each, 2 (n-1) per tree. A slice uses one level of the tree at a time, so run the schedule
//   pipelined().
// Bytes per rank: at most 2 S. An interior node sends S/2 up and S down, and S/2 up as a leaf of the other
//   tree. The sum over ranks, 2 (n-1) S, is optimal.
// Lossy steps: floor(log2 n) + 1, one per level.
// Sync points: a node waits for both subtrees, then for its parent.
#include <algorithm>

#include "collectives/schedule/schedule.h"

namespace gradwire {
namespace {

struct Tree {
  std::vector<int> parent;  // -1 for the root
  std::vector<int> depth;   // 0 for the root
  std::vector<int> height;  // 0 for a leaf
};

// Builds the subtree of positions [begin, end) below `parent`, with interior nodes at odd positions. Returns
// the subtree's height.
int build_subtree(Tree& tree, int begin, int end, int parent, int depth) {
  if (begin >= end) return -1;
  // Use the middle odd position as the subtree's root. A range of one position is a leaf.
  int first_odd = begin | 1, odds = (end - first_odd + 1) / 2;
  int top = end - begin == 1 ? begin : first_odd + (odds - 1) / 2 * 2;
  tree.parent[top] = parent;
  tree.depth[top] = depth;
  int below = std::max(build_subtree(tree, begin, top, top, depth + 1),
                       build_subtree(tree, top + 1, end, top, depth + 1));
  return tree.height[top] = below + 1;
}

}  // namespace

void detail::emit_double_tree(int world, const TransferSink& sink) {
  int levels = 0;  // edges from the root to the deepest leaf: floor(log2 n)
  while (2 << levels <= world) ++levels;
  Schedule s = outline(ScheduleKind::tree, world, {0, 0});
  s.lossy_steps = s.inter_node_lossy_steps = world == 1 ? 0 : levels + 1;
  Tree tree{std::vector<int>(world), std::vector<int>(world), std::vector<int>(world)};
  build_subtree(tree, 0, world, -1, 0);
  const auto rank_at = [world](int half, int position) {
    if (half == 0) return position;
    return world % 2 == 0 ? world - 1 - position : (position + 1) % world;
  };
  for (int position = 0; position < world; ++position) {
    if (tree.parent[position] >= 0) continue;
    for (int half : {0, 1}) s.owner[half] = rank_at(half, position);
  }
  sink.begin(s, 2 * levels);
  for (int half : {0, 1}) {
    for (int position = 0; position < world; ++position) {
      if (tree.parent[position] < 0) continue;
      const int node = rank_at(half, position), parent = rank_at(half, tree.parent[position]);
      sink.add(tree.height[position], node, parent, half, Step::Kind::recv_reduce, false);
      sink.add(levels + tree.depth[position] - 1, parent, node, half, Step::Kind::recv_copy, false);
    }
  }
}

Schedule double_tree(int world) {
  return detail::collect([&](const TransferSink& sink) { detail::emit_double_tree(world, sink); });
}

}  // namespace gradwire
