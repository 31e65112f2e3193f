#include "trainer/measure/topology.h"

#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <new>

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "runtime/device.h"
#include "runtime/error.h"
#include "trainer/measure/nvml.h"

namespace gradwire {

PciTree::PciTree() {
  load({});  // if hwloc cannot read the machine, the tree is empty
}

PciTree::PciTree(const std::string& xml) {
  if (!load(xml)) throw BadInput("this is not XML from hwloc's lstopo");
}

bool PciTree::load(const std::string& xml) {
  hwloc_topology* topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) throw std::bad_alloc();
  topology_.reset(topology);
  if (!xml.empty()) hwloc_topology_set_xmlbuffer(topology, xml.c_str(), static_cast<int>(xml.size()) + 1);
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
  if (hwloc_topology_load(topology) != 0) return false;
  // If the text is not XML, hwloc 2.12 loads this machine.
  return xml.empty() || hwloc_topology_is_thissystem(topology) == 0;
}

void PciTree::Destroy::operator()(hwloc_topology* topology) const {
  hwloc_topology_destroy(topology);
}

std::optional<PciPlace> PciTree::find(const std::string& address) const {
  auto text = [](const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci) {
    return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", pci.domain, pci.bus, pci.dev, pci.func);
  };
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology_.get(), address.c_str());
  if (device == nullptr) return {};
  PciPlace place{.address = text(device->attr->pcidev)};
  for (hwloc_obj_t up = device->parent; up->type == HWLOC_OBJ_BRIDGE; up = up->parent) {
    const hwloc_obj_attr_u::hwloc_bridge_attr_s& bridge = up->attr->bridge;
    place.above.push_back(bridge.upstream_type == HWLOC_OBJ_BRIDGE_PCI
                              ? text(bridge.upstream.pci)
                              : fmt::format("pci{:04x}:{:02x}", bridge.downstream.pci.domain,
                                            bridge.downstream.pci.secondary_bus));
  }
  if (place.above.empty()) return {};
  std::reverse(place.above.begin(), place.above.end());
  const hwloc_const_nodeset_t nodes = hwloc_get_non_io_ancestor_obj(topology_.get(), device)->nodeset;
  if (hwloc_bitmap_weight(nodes) == 1) place.numa_node = hwloc_bitmap_first(nodes);
  return place;
}

GpuPath pci_path(const PciPlace& a, const PciPlace& b) {
  if (a.address == b.address) return GpuPath::self;
  if (a.above.empty() || b.above.empty()) return GpuPath::unknown;
  if (a.above[0] != b.above[0]) return a.numa_node == b.numa_node ? GpuPath::node : GpuPath::system;
  size_t common = 0;
  while (common < std::min(a.above.size(), b.above.size()) && a.above[common] == b.above[common]) ++common;
  if (common == 1) return GpuPath::host_bridge;  // only the root complex
  // Below the upstream port of a switch, each device has a downstream port of the same switch. An additional
  // bridge is another switch.
  const size_t below = std::max(a.above.size(), b.above.size()) - common;
  return below <= 1 ? GpuPath::one_switch : GpuPath::switches;
}

std::string path_name(GpuPath path, int nvlinks) {
  switch (path) {
    case GpuPath::self:
      return "X";
    case GpuPath::nvlink:
      return fmt::format("NV{}", nvlinks);
    case GpuPath::one_switch:
      return "PIX";
    case GpuPath::switches:
      return "PXB";
    case GpuPath::host_bridge:
      return "PHB";
    case GpuPath::node:
      return "NODE";
    case GpuPath::system:
      return "SYS";
    case GpuPath::unknown:
      break;
  }
  return "?";
}

std::string path_words(GpuPath path) {
  switch (path) {
    case GpuPath::self:
      return "itself";
    case GpuPath::nvlink:
      return "NVLink";
    case GpuPath::one_switch:
      return "one PCIe switch";
    case GpuPath::switches:
      return "several PCIe switches";
    case GpuPath::host_bridge:
      return "a PCIe host bridge";
    case GpuPath::node:
      return "two host bridges of one NUMA node";
    case GpuPath::system:
      return "across sockets";
    case GpuPath::unknown:
      break;
  }
  return "not known";
}

NcclSettings nccl_settings(const std::function<const char*(const char*)>& lookup) {
  auto number = [&](const char* name, long otherwise) {
    const char* text = lookup(name);
    return text == nullptr || *text == '\0' ? otherwise : std::strtol(text, nullptr, 0);
  };
  NcclSettings settings{.p2p_disable = number("NCCL_P2P_DISABLE", 0) == 1,
                        .shm_disable = number("NCCL_SHM_DISABLE", 0) != 0,
                        .ib_disable = number("NCCL_IB_DISABLE", 0) != 0,
                        .cumem = number("NCCL_CUMEM_ENABLE", 1) != 0};
  if (const char* net = lookup("NCCL_NET"); net != nullptr) settings.net = net;
  if (const char* text = lookup("NCCL_P2P_LEVEL"); text != nullptr && *text != '\0') {
    const std::string level = text;
    const std::pair<const char*, GpuPath> words[] = {
        {"LOC", GpuPath::self},     {"NVL", GpuPath::nvlink}, {"PIX", GpuPath::one_switch},
        {"PXB", GpuPath::switches}, {"PHB", GpuPath::node},  // NCCL does not distinguish NODE from PHB
        {"SYS", GpuPath::system}};
    for (const auto& [word, path] : words) {
      if (level == word) settings.p2p_level = path;
    }
    const GpuPath old_numbers[] = {GpuPath::self, GpuPath::one_switch, GpuPath::switches,
                                   GpuPath::node, GpuPath::system,     GpuPath::system};
    if (std::isdigit(static_cast<unsigned char>(level[0]))) {
      settings.p2p_level = old_numbers[std::clamp<long>(std::strtol(text, nullptr, 0), 0, 5)];
    }
  }
  return settings;
}

std::string nccl_network(const NcclSettings& settings) {
  if (!settings.net.empty()) return "NET/" + settings.net;
  return settings.infiniband && !settings.ib_disable ? "NET/IB" : "NET/Socket";
}

std::string nccl_transport(GpuPath path, bool peer_access, bool one_process, const NcclSettings& settings) {
  const GpuPath usual = settings.amd && settings.gpus <= 2 ? GpuPath::system : GpuPath::switches;
  const GpuPath farthest = settings.p2p_disable ? GpuPath::self : settings.p2p_level.value_or(usual);
  if (peer_access && path != GpuPath::unknown && path <= farthest) {
    return one_process ? "P2P/direct pointer" : settings.cumem ? "P2P/CUMEM" : "P2P/IPC";
  }
  return settings.shm_disable ? nccl_network(settings) : "SHM";
}

GpuTopology gpu_topology() {
  GpuTopology topology;
#ifdef GRADWIRE_HAS_CUDA
  const int gpus = cuda_device_count();
  if (gpus == 0) return topology;
  const PciTree tree;
  std::vector<std::optional<PciPlace>> places;
  for (int i = 0; i < gpus; ++i) {
    char address[32] = "";
    if (cudaDeviceGetPCIBusId(address, sizeof address, i) != cudaSuccess) cudaGetLastError();
    places.push_back(tree.find(address));
    topology.addresses.push_back(places.back() ? places.back()->address : address);
    topology.numa_nodes.push_back(places.back() ? places.back()->numa_node : -1);
  }
  if (gpus < 2) return topology;
  const NvLinks links(topology.addresses);
  topology.nvlink_source = links.source();
  for (int a = 0; a < gpus; ++a) {
    for (int b = a + 1; b < gpus; ++b) {
      GpuPair pair{.a = a, .b = b, .nvlinks = links.between(a, b)};
      int reachable = 0;
      pair.peer_access = cudaDeviceCanAccessPeer(&reachable, a, b) == cudaSuccess && reachable == 1;
      const auto &from = places[static_cast<size_t>(a)], &to = places[static_cast<size_t>(b)];
      pair.path = pair.nvlinks > 0 ? GpuPath::nvlink : from && to ? pci_path(*from, *to) : GpuPath::unknown;
      topology.pairs.push_back(pair);
    }
  }
#endif
  return topology;
}

Table topology_table(const GpuTopology& topology) {
  const size_t gpus = topology.addresses.size();
  Table table(gpus + 1, std::vector<std::string>(gpus + 2, "X"));
  table[0][0] = "";
  table[0][gpus + 1] = "NUMA";
  for (size_t i = 0; i < gpus; ++i) {
    table[0][i + 1] = table[i + 1][0] = fmt::format("cuda:{}", i);
    table[i + 1][gpus + 1] = topology.numa_nodes[i] < 0 ? "-" : fmt::to_string(topology.numa_nodes[i]);
  }
  for (const GpuPair& pair : topology.pairs) {
    const auto a = static_cast<size_t>(pair.a), b = static_cast<size_t>(pair.b);
    table[a + 1][b + 1] = table[b + 1][a + 1] = path_name(pair.path, pair.nvlinks);
  }
  return table;
}

}  // namespace gradwire
