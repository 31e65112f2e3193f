// The path from one GPU to another, as shown by `nvidia-smi topo -m` (NV#, PIX, PXB, PHB, NODE, SYS), and the
// transport that NCCL chooses for it.
//
// Sources: hwloc provides the PCI tree; NVML (opened at run time, if installed) counts the NVLinks. Every
// function except gpu_topology() is a function of its arguments.
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

// A PCI device's position in the machine.
struct PciPlace {
  std::string address;                  // "0000:3b:00.0"
  std::vector<std::string> above = {};  // from the root complex ("pci0000:3a") to the device's bridge
  int numa_node = -1;                   // -1: unknown, or the machine has a single node
  bool operator==(const PciPlace&) const = default;
};

// A machine's PCI devices.
class PciTree {
 public:
  PciTree();                                 // of this machine
  explicit PciTree(const std::string& xml);  // of the machine that wrote `xml` with `lstopo --of xml`
  // Returns the position of a device; empty if it is not in the tree. `address`: in either case, with a
  // domain of 4 or 8 digits, or without domain.
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

// Returns the PCIe path between two devices.
GpuPath pci_path(const PciPlace& a, const PciPlace& b);
// Returns "NV18", "PIX", ...; "?" for unknown, "X" for self.
std::string path_name(GpuPath path, int nvlinks = 0);
// Returns the path in words: "2 PCIe switches", "across sockets".
std::string path_words(GpuPath path);

// The inputs, besides the path, to NCCL's choice. Read from the environment through `lookup` (null: not set).
struct NcclSettings {
  bool p2p_disable = false, shm_disable = false, ib_disable = false;
  bool cumem = true;                      // NCCL_CUMEM_ENABLE is not 0
  std::optional<GpuPath> p2p_level = {};  // NCCL_P2P_LEVEL: the longest path that may use P2P
  std::string net = {};                   // NCCL_NET: the network NCCL must use; empty: any
  bool amd = false;                       // the processor's vendor is AMD
  int gpus = 1;                           // in this machine
  bool infiniband = false;                // an InfiniBand or RoCE device is up
};
NcclSettings nccl_settings(const std::function<const char*(const char*)>& lookup);

// Returns the transport of NCCL between two GPUs of one machine: "P2P/CUMEM", "P2P/IPC", "P2P/direct
// pointer", "SHM", "NET/IB" or "NET/Socket". By default P2P does not cross host bridges, except on AMD
// machines with two GPUs (NCCL 2.27, graph/paths.cc). `peer_access`: CUDA allows one GPU to access the
// other's memory. `one_process`: one process owns both GPUs.
std::string nccl_transport(GpuPath path, bool peer_access, bool one_process, const NcclSettings& settings);
// Returns the transport of NCCL between machines.
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
  std::string nvlink_source;   // "NVML", or the reason why NVLinks are unknown
};
// Returns the topology of the GPUs that CUDA makes visible to this process. Empty without GPUs.
GpuTopology gpu_topology();

// Returns the matrix in nvidia-smi's form.
Table topology_table(const GpuTopology& topology);

}  // namespace gradwire
