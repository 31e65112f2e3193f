#include "trainer/plan/nccl_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

enum Protocol : uint8_t { ll, ll128, simple };
constexpr const char* kProtocols[] = {"ll", "ll128", "simple"};
using PerProtocol = std::array<double, 3>;
using PerSize = std::array<double, 3>;  // for 1, 2, and more nodes

// Latencies in microseconds.
struct HopLatencies {
  PerProtocol tree, ring;
};
constexpr HopLatencies kBase{{6.8, 14, 8.4}, {6.6, 14, 8.4}};
constexpr HopLatencies kNvlink{{0.6, 1.25, 4}, {0.6, 1.9, 3.4}};
constexpr HopLatencies kPcie{{1, 1.9, 4}, {1, 2.5, 5.7}};
constexpr HopLatencies kNetwork{{5, 8.5, 14}, {2.7, 4, 14}};
constexpr double kNvlsHop = 25, kNvlsTreeHop = 20.9;
// The cluster file states the latency of a hop with the Simple protocol; the other constants scale with it.
constexpr double kNetworkSimple = 14;
constexpr double kNetworkOverhead = 1;
constexpr double kSimpleRingFactor = 1.4, kSimpleRingFactorVolta = 1.9;

// Bandwidths in GB/s: of one channel, except `ll`, which bounds all channels of a ring together.
struct Bounds {
  int channels;
  PerSize ll, tree, tree_ll128, nvls_tree;
  double ring_ll128;
};
const Bounds& bounds(Cluster::Generation generation) {
  static constexpr Bounds kAll[] = {
      {12, {39, 39, 20.4}, {24, 23.6, 17.8}, {20, 16.7, 16.7}, {}, 20},
      {24, {87.7, 22.5, 19}, {24, 23.6, 17.8}, {20, 16.7, 16.7}, {}, 20},
      {16, {141, 45, 35}, {38.7, 41.4, 36}, {36.7, 36.7, 29}, {0, 57.7, 45.5}, 36.7},
      {16, {282, 90, 70}, {70, 42.8, 24}, {55.6, 31.7, 20}, {0, 96, 80}, 40}};
  return kAll[static_cast<size_t>(generation)];
}

// The factors of a tree's bandwidth for 64 B x 2^i. The last factor is that of all larger sizes.
constexpr std::array<std::array<double, 24>, 3> kTreeFactors = {
    {{1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1},
     {1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1},
     {0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5,
      0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9, 0.9}}};

class Tuner {
 public:
  Tuner(const Cluster& cluster, int ranks, double bytes)
      : cluster_(cluster),
        bounds_(bounds(cluster.generation)),
        ranks_(ranks),
        per_node_(std::min(ranks, cluster.gpus_per_node)),
        nodes_(ranks / per_node_),
        bytes_(bytes),
        bus_(nodes_ == 1 ? cluster.gpu.gb_per_s
                         : std::min(per_node_ == 1 ? 1e9 : cluster.gpu.gb_per_s,
                                    cluster.nics * cluster.nic.gb_per_s)),
        channels_(cluster.nccl.channels > 0 ? cluster.nccl.channels : bounds_.channels),
        at_(std::min(nodes_, 3) - 1) {}

  NcclEstimate ring(Protocol p) const {
    const double all = 2.0 * (ranks_ - 1), between = nodes_ > 1 ? 2.0 * (nodes_ - 1) : 0;
    double inside = local().ring[p];
    if (nodes_ > 1) inside = std::max(inside, kNetworkOverhead * (p == simple ? 3 : 1));
    const double hop = scale() * (per_node_ == 1 ? kNetwork.tree : kNetwork.ring)[p];
    double latency = kBase.ring[p] + (all - between) * inside + between * hop;
    if (p == simple && nodes_ > 1) {
      latency *=
          cluster_.generation == Cluster::Generation::volta ? kSimpleRingFactorVolta : kSimpleRingFactor;
    }
    const double bandwidth[] = {std::min(bounds_.ll[at_], 0.5 * bus_),
                                std::min(0.92 * bus_, channels_ * bounds_.ring_ll128), bus_};
    return estimate("ring", p, latency, bandwidth[p] * ranks_ / all);
  }

  NcclEstimate tree(Protocol p) const {
    const double latency = kBase.tree[p] + 2 * ((per_node_ - 1) * local().tree[p] +
                                                std::log2(nodes_) * scale() * kNetwork.tree[p]);
    double bandwidth = std::min(0.92 * bus_, channels_ * bounds_.tree[at_]);
    if (p == ll) bandwidth = bus_ / 3.8;
    if (p == ll128) {
      bandwidth = std::min(bandwidth * (nodes_ == 1 ? 7.0 / 9 : 0.9375), channels_ * bounds_.tree_ll128[at_]);
    }
    const int size = static_cast<int>(std::log2(std::max(1.0, bytes_ / 64)));
    bandwidth *= kTreeFactors[p][std::min<size_t>(size, kTreeFactors[p].size() - 1)];
    return estimate("tree", p, latency, bandwidth / 2);
  }

  std::vector<NcclEstimate> all() const {
    std::vector<NcclEstimate> out;
    for (Protocol p : {ll, ll128, simple}) {
      if (p == ll128 && !cluster_.nvlink) continue;
      out.push_back(ring(p));
      out.push_back(tree(p));
    }
    if (cluster_.nccl.nvls_gb_per_s > 0 && per_node_ == cluster_.gpus_per_node) {
      const double latency = kBase.ring[simple] + kNvlsHop;
      if (nodes_ == 1) {
        out.push_back(
            estimate("nvls", simple, latency, cluster_.nccl.nvls_gb_per_s * ranks_ / (2.0 * (ranks_ - 1))));
      } else if (bounds_.nvls_tree[at_] > 0) {
        out.push_back(estimate("nvls_tree", simple, latency + 2 * std::log2(nodes_) * scale() * kNvlsTreeHop,
                               std::min(bus_, channels_ * bounds_.nvls_tree[at_]) / 2));
      }
    }
    const auto allows = [](const std::vector<std::string>& names, const std::string& name) {
      return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
    };
    std::erase_if(out, [&](const NcclEstimate& e) {
      return !allows(cluster_.nccl.algorithms, e.algorithm) ||
             (nodes_ > 1 && !allows(cluster_.nccl.network_protocols, e.protocol));
    });
    return out;
  }

 private:
  const HopLatencies& local() const { return cluster_.nvlink ? kNvlink : kPcie; }
  double scale() const { return cluster_.nic.latency_us / kNetworkSimple; }
  NcclEstimate estimate(const char* algorithm, Protocol p, double latency_us, double gb_per_s) const {
    return {algorithm, kProtocols[p], cluster_.nccl.launch_us + latency_us + bytes_ / (gb_per_s * 1e3)};
  }

  const Cluster& cluster_;
  const Bounds& bounds_;
  const int ranks_, per_node_, nodes_;
  const double bytes_;
  const double bus_;  // bandwidth of all channels together, in GB/s
  const int channels_;
  const int at_;  // index of a PerSize
};

}  // namespace

NcclEstimate nccl_allreduce_estimate(const Cluster& cluster, int ranks, double bytes) {
  if (ranks == 1) return {"ring", "simple", 0};
  const std::vector<NcclEstimate> all = Tuner(cluster, ranks, bytes).all();
  const auto best = std::ranges::min_element(all, {}, &NcclEstimate::us);
  if (best == all.end()) {
    throw BadInput(cluster.name +
                   ": nccl.algorithms and nccl.network_protocols leave NCCL no choice; add \"ring\" "
                   "and \"simple\"");
  }
  return *best;
}

}  // namespace gradwire
