// The links of a cluster between the ranks of a run, and the path from one rank to another.
//
// A cluster looks the same to every group of symmetric_ranks() consecutive ranks, and so do its links. So
// only the links of the first group exist here, and each stands for the same link of all groups. Groups do
// not matter to a schedule that treats ranks differently, such as a tree.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "trainer/plan/cluster.h"

namespace gradwire {

class Fabric {
 public:
  // A level of the cluster: 0 inside nodes, 1 network cards, 2 and above the links upwards of switches.
  struct Path {
    static constexpr int kMostLinks = 16;
    std::array<int, kMostLinks> links{};
    int size = 0;
    int levels = 1;  // number of levels that the path enters, counted from the level below
    bool inside = false;
    double latency_us = 0;
    void add(int link) { links[size++] = link; }
  };

  // `symmetric`: whether the schedules for these links are the same for every group of symmetric_ranks()
  // ranks. If not, the links of all ranks exist. Throws BadInput if the ranks do not fill nodes and switches.
  Fabric(const Cluster& cluster, int ranks, bool symmetric);

  int ranks() const { return ranks_; }
  // The number of ranks of a node.
  int per_node() const { return per_node_; }
  // The number of ranks whose links exist.
  int period() const { return period_; }
  int links() const { return static_cast<int>(bytes_per_us_.size()); }
  double bytes_per_us(int link) const { return bytes_per_us_[link]; }
  // Returns the path of a message from rank `from`, below period(), to any other rank.
  Path path(int from, int to) const;
  // Returns the names of the levels that this number of ranks uses: "node", "nic", "switch 1", ...
  const std::vector<std::string>& levels() const { return levels_; }

 private:
  // Adds links of this bandwidth, and returns the number of the first link.
  int add_links(int count, double gb_per_s);
  // Adds both directions of a link that connects a group of ranks upwards.
  struct Both {
    int out = 0, in = 0;
    int group = 0;  // ranks of a group; 0: there are no such links
  };
  Both add_both(int group, double gb_per_s);
  void cross(Path& path, const Both& links, int from, int to) const;

  const Cluster cluster_;
  const int ranks_, per_node_, period_;
  std::vector<double> bytes_per_us_;
  Both gpus_, roots_, nics_;
  std::vector<Both> switches_;
  std::vector<std::string> levels_;
};

}  // namespace gradwire
