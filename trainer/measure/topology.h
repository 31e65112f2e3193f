// The path from one GPU to another: what `nvidia-smi topo -m` calls NV#, PIX, PXB, PHB, NODE, SYS, and the
// transport that NCCL picks for it.
//
// Sources: hwloc has the PCI tree, NVML (opened at run time, where it is installed) counts the NVLinks.
// Everything here but gpu_topology() is a function of its arguments.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/log/table.h"

struct hwloc_topology;

namespace gradwire {

// A PCI device's place in the machine.
struct PciPlace {
  std::string address;                  // "0000:3b:00.0"
  std::vector<std::string> above = {};  // from the root complex ("pci0000:3a") down to the bridge next to it
  int numa_node = -1;                   // -1: the machine has one, or does not say
  bool operator==(const PciPlace&) const = default;
};

// A machine's PCI devices.
class PciTree {
 public:
  PciTree();                                 // of this machine
  explicit PciTree(const std::string& xml);  // of the machine that wrote this with `lstopo --of xml`
  // `address`: in either case, with a domain of 4 or 8 digits, or none. Empty if the tree does not have it.
  std::optional<PciPlace> find(const std::string& address) const;

 private:
  struct Destroy {
    void operator()(hwloc_topology* topology) const;
  };
  bool load(const std::string& xml);
  std::unique_ptr<hwloc_topology, Destroy> topology_;
};

enum class GpuPath : uint8_t {
  self,
  nvlink,       // NV#: # bonded NVLinks, directly or through an NVSwitch
  one_switch,   // PIX: at most one PCIe bridge
  switches,     // PXB: several PCIe bridges, but no host bridge
  host_bridge,  // PHB: a PCIe host bridge, usually the processor
  node,         // NODE: from one host bridge of a NUMA node to another
  system,       // SYS: from one NUMA node to another
  unknown
};

// How PCIe goes between two devices.
GpuPath pci_path(const PciPlace& a, const PciPlace& b);
// "NV18", "PIX", ...; "?" for unknown, "X" for self.
std::string path_name(GpuPath path, int nvlinks = 0);
// In words: "2 PCIe switches", "across sockets".
std::string path_words(GpuPath path);

// What decides NCCL's choice besides the path. From the environment through `lookup` (null: not set).
struct NcclSettings {
  bool p2p_disable = false, shm_disable = false, ib_disable = false;
  bool cumem = true;                      // NCCL_CUMEM_ENABLE is not 0
  std::optional<GpuPath> p2p_level = {};  // NCCL_P2P_LEVEL: the farthest path that may use P2P
  std::string net = {};                   // NCCL_NET: empty, or the network it must use
  bool amd = false;                       // the processor's vendor
  int gpus = 1;                           // of this machine
  bool infiniband = false;                // there is an InfiniBand or RoCE device that is up
};
NcclSettings nccl_settings(const std::function<const char*(const char*)>& lookup);

// "P2P/CUMEM", "P2P/IPC", "P2P/direct pointer", "SHM", "NET/IB", "NET/Socket": what NCCL carries bytes
// between two GPUs of one machine with. By default P2P stops at host bridges, except on AMD machines with two
// GPUs (NCCL 2.27, graph/paths.cc). `peer_access`: CUDA lets one read the other's memory. `one_process`: both
// belong to the same.
std::string nccl_transport(GpuPath path, bool peer_access, bool one_process, const NcclSettings& settings);
// Between machines.
std::string nccl_network(const NcclSettings& settings);

struct GpuPair {
  int a = 0, b = 0;
  GpuPath path = GpuPath::unknown;
  int nvlinks = 0;
  bool peer_access = false;
};
struct GpuTopology {
  std::vector<std::string> addresses;  // of each GPU
  std::vector<int> numa_nodes;
  std::vector<GpuPair> pairs;  // a < b
  std::string nvlink_source;   // "NVML", or why NVLinks are not known
};
// Of the GPUs that CUDA shows this process. Empty without any.
GpuTopology gpu_topology();

// The matrix as nvidia-smi prints it.
Table topology_table(const GpuTopology& topology);

}  // namespace gradwire
