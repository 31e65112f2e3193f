#include "trainer/plan/fabric.h"

#include <fmt/format.h>

#include <algorithm>

namespace gradwire {

Fabric::Fabric(const Cluster& cluster, int ranks, bool symmetric)
    : cluster_(cluster),
      ranks_(ranks),
      per_node_(std::min(ranks, cluster.gpus_per_node)),
      period_(symmetric ? cluster.symmetric_ranks(ranks) : ranks) {
  check_ranks(cluster, ranks);
  levels_.push_back(cluster.nvlink ? "nvlink" : "pcie");
  gpus_ = add_both(1, cluster.gpu.gb_per_s);
  if (cluster.gpus_per_root > 0 && per_node_ > cluster.gpus_per_root) {
    roots_ = add_both(cluster.gpus_per_root, cluster.root_gb_per_s);
  }
  if (ranks <= per_node_) return;
  levels_.push_back("nic");
  const int sharing = std::max(1, per_node_ / cluster.nics);  // ranks that share a network card
  const double card = cluster.nic.gb_per_s * cluster.nics * sharing / per_node_;
  nics_ = add_both(sharing, card);
  for (const Cluster::Level& level : cluster.switches) {
    const int below = level.nodes * per_node_;
    if (below >= ranks) break;
    levels_.push_back(fmt::format("switch {}", switches_.size() + 1));
    switches_.push_back(
        add_both(below, cluster.nic.gb_per_s * cluster.nics * level.nodes / level.oversubscription));
  }
}

int Fabric::add_links(int count, double gb_per_s) {
  const int first = links();
  bytes_per_us_.resize(first + count, gb_per_s * 1e3);
  return first;
}

Fabric::Both Fabric::add_both(int group, double gb_per_s) {
  const int count = (period_ + group - 1) / group;
  Both both{.group = group};
  both.out = add_links(count, gb_per_s);
  both.in = add_links(count, gb_per_s);
  return both;
}

void Fabric::cross(Path& path, const Both& links, int from, int to) const {
  path.add(links.out + from % period_ / links.group);
  path.add(links.in + to % period_ / links.group);
}

Fabric::Path Fabric::path(int from, int to) const {
  Path path;
  path.inside = from / per_node_ == to / per_node_;
  path.latency_us = path.inside ? cluster_.gpu.latency_us : cluster_.nic.latency_us;
  // Between nodes, data leaves a GPU through PCIe, whose bandwidth NVLink does not share.
  if (path.inside || !cluster_.nvlink) {
    cross(path, gpus_, from, to);
    const int group = roots_.group;
    if (group > 0 && (!path.inside || from / group != to / group)) cross(path, roots_, from, to);
  }
  if (path.inside) return path;
  cross(path, nics_, from, to);
  path.levels = 2;
  for (const Both& level : switches_) {
    if (from / level.group == to / level.group) break;
    cross(path, level, from, to);
    ++path.levels;
  }
  return path;
}

}  // namespace gradwire
