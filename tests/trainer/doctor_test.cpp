// Conclusions of `gradwire doctor`: paths between GPUs from PCI trees, NCCL's choice, network interfaces, and
// predictions from given costs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <thread>

#include "runtime/error.h"
#include "tests/trainer/files.h"
#include "trainer/measure/network.h"
#include "trainer/measure/ranks.h"
#include "trainer/measure/recommend.h"
#include "trainer/measure/topology.h"
#include "trainer/model/parameters.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryFolder;

// hwloc's XML of a PCI device, of a bridge between two buses, of a host bridge and its children.
std::string gpu(const std::string& address) {
  return fmt::format(
      R"(<object type="PCIDev" gp_index="{}" pci_busid="{}" pci_type="0302 [10de:2330] [0:0] 00"/>)",
      1000 + std::hash<std::string>()(address) % 1000000, address);
}
std::string bridge(const std::string& address, const std::string& buses, const std::string& below) {
  return fmt::format(R"(<object type="Bridge" gp_index="{}" bridge_type="1-1" depth="1" bridge_pci="0000:[{}]"
                         pci_busid="{}" pci_type="0604 [8086:2030] [0:0] 00">{}</object>)",
                     1000 + std::hash<std::string>()(address) % 1000000, buses, address, below);
}
std::string host_bridge(const std::string& buses, const std::string& below) {
  return fmt::format(
      R"(<object type="Bridge" gp_index="{}" bridge_type="0-1" depth="0" bridge_pci="0000:[{}]">{}</object>)",
      1000 + std::hash<std::string>()(buses) % 1000000, buses, below);
}
// A socket: one core, one NUMA node, and its host bridges.
std::string socket(int index, const std::string& host_bridges) {
  const std::string sets =
      fmt::format(R"(cpuset="{0}" complete_cpuset="{0}" nodeset="{0}" complete_nodeset="{0}")", 1 << index);
  return fmt::format(R"(<object type="Package" os_index="{0}" {1} gp_index="{2}">
    <object type="NUMANode" os_index="{0}" {1} gp_index="{3}" local_memory="1024"/>
    <object type="PU" os_index="{0}" {1} gp_index="{4}"/>{5}</object>)",
                     index, sets, 10 + index, 20 + index, 30 + index, host_bridges);
}
std::string machine(const std::string& sockets) {
  return R"(<?xml version="1.0"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
    <object type="Machine" os_index="0" cpuset="3" complete_cpuset="3" allowed_cpuset="3" nodeset="3"
            complete_nodeset="3" allowed_nodeset="3" gp_index="1">)" +
         sockets + "</object></topology>";
}

// Socket 0: a root port with a switch of two GPUs and of a second switch with two more; another root port of
// the same host bridge; another host bridge. Socket 1: one GPU.
TEST(Topology, PathsFollowThePciTree) {
  const std::string second_switch = bridge("0000:3f:00.0", "40-42",
                                           bridge("0000:40:00.0", "41-41", gpu("0000:41:00.0")) +
                                               bridge("0000:40:04.0", "42-42", gpu("0000:42:00.0")));
  const std::string first_switch = bridge("0000:3b:00.0", "3c-42",
                                          bridge("0000:3c:00.0", "3d-3d", gpu("0000:3d:00.0")) +
                                              bridge("0000:3c:04.0", "3e-3e", gpu("0000:3e:00.0")) +
                                              bridge("0000:3c:08.0", "3f-42", second_switch));
  const PciTree tree(
      machine(socket(0, host_bridge("3a-50", bridge("0000:3a:00.0", "3b-42", first_switch) +
                                                 bridge("0000:3a:02.0", "50-50", gpu("0000:50:00.0"))) +
                            host_bridge("5c-5d", bridge("0000:5c:00.0", "5d-5d", gpu("0000:5d:00.0")))) +
              socket(1, host_bridge("ae-af", bridge("0000:ae:00.0", "af-af", gpu("0000:af:00.0"))))));
  auto path = [&](const std::string& a, const std::string& b) {
    const auto from = tree.find(a), to = tree.find(b);
    if (!from || !to) return GpuPath::unknown;
    EXPECT_EQ(pci_path(*from, *to), pci_path(*to, *from));
    return pci_path(*from, *to);
  };
  EXPECT_EQ(path("0000:3d:00.0", "0000:3d:00.0"), GpuPath::self);
  EXPECT_EQ(path("0000:3d:00.0", "0000:3e:00.0"), GpuPath::one_switch);
  EXPECT_EQ(path("0000:41:00.0", "0000:42:00.0"), GpuPath::one_switch);
  EXPECT_EQ(path("0000:3d:00.0", "0000:41:00.0"), GpuPath::switches);
  EXPECT_EQ(path("0000:3d:00.0", "0000:50:00.0"), GpuPath::host_bridge);
  EXPECT_EQ(path("0000:3d:00.0", "0000:5d:00.0"), GpuPath::node);
  EXPECT_EQ(path("0000:3d:00.0", "0000:af:00.0"), GpuPath::system);

  const auto place = tree.find("00000000:3D:00.0");  // a form used by CUDA and NVML
  ASSERT_TRUE(place);
  EXPECT_EQ(place->address, "0000:3d:00.0");
  EXPECT_EQ(place->numa_node, 0);
  EXPECT_EQ(place->above,
            (std::vector<std::string>{"pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", "0000:3c:00.0"}));
  EXPECT_EQ(tree.find("3d:00.0"), place);
  EXPECT_FALSE(tree.find("0000:99:00.0"));
  EXPECT_FALSE(tree.find("no address"));
}

TEST(Topology, ReadsThisMachinesTree) {
  EXPECT_FALSE(PciTree().find("ffff:ff:1f.7"));
  EXPECT_THROW(PciTree("no XML"), BadInput);
}

TEST(Topology, MatrixIsSymmetricAndUsesNvidiasNames) {
  GpuTopology topology{
      .addresses = {"a", "b", "c"}, .numa_nodes = {0, 0, -1}, .pairs = {}, .nvlink_source = ""};
  topology.pairs = {{0, 1, GpuPath::nvlink, 18, true},
                    {0, 2, GpuPath::system, 0, true},
                    {1, 2, GpuPath::unknown, 0, false}};
  const Table table = topology_table(topology);
  EXPECT_EQ(table[0], (std::vector<std::string>{"", "cuda:0", "cuda:1", "cuda:2", "NUMA"}));
  EXPECT_EQ(table[1], (std::vector<std::string>{"cuda:0", "X", "NV18", "SYS", "0"}));
  EXPECT_EQ(table[2], (std::vector<std::string>{"cuda:1", "NV18", "X", "?", "0"}));
  EXPECT_EQ(table[3], (std::vector<std::string>{"cuda:2", "SYS", "?", "X", "-"}));
  EXPECT_EQ(table_text({{"a", "bb"}, {"ccc", "d"}}, " "), " a    bb\n ccc   d\n");
}

NcclSettings settings(const std::map<std::string, std::string>& environment) {
  return nccl_settings([&](const char* name) {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  });
}

TEST(Topology, NcclTransportFollowsEnvironmentAndDistance) {
  const NcclSettings plain = settings({});
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, false, plain), "P2P/CUMEM");
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, true, plain), "P2P/direct pointer");
  EXPECT_EQ(nccl_transport(GpuPath::switches, true, false, settings({{"NCCL_CUMEM_ENABLE", "0"}})),
            "P2P/IPC");
  EXPECT_EQ(nccl_transport(GpuPath::one_switch, false, false, plain), "SHM");  // not allowed by CUDA
  EXPECT_EQ(nccl_transport(GpuPath::unknown, true, false, plain), "SHM");
  // Up to PXB by default; any distance on AMD machines with two GPUs.
  EXPECT_EQ(nccl_transport(GpuPath::host_bridge, true, false, plain), "SHM");
  NcclSettings amd = plain;
  amd.amd = true;
  amd.gpus = 2;
  EXPECT_EQ(nccl_transport(GpuPath::system, true, false, amd), "P2P/CUMEM");
  amd.gpus = 4;
  EXPECT_EQ(nccl_transport(GpuPath::system, true, false, amd), "SHM");
  for (const char* level : {"SYS", "5"}) {
    EXPECT_EQ(nccl_transport(GpuPath::system, true, false, settings({{"NCCL_P2P_LEVEL", level}})),
              "P2P/CUMEM");
  }
  EXPECT_EQ(nccl_transport(GpuPath::one_switch, true, false, settings({{"NCCL_P2P_LEVEL", "NVL"}})), "SHM");
  EXPECT_EQ(nccl_transport(GpuPath::node, true, false, settings({{"NCCL_P2P_LEVEL", "PHB"}})), "P2P/CUMEM");
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, false, settings({{"NCCL_P2P_DISABLE", "1"}})), "SHM");

  NcclSettings nothing = settings({{"NCCL_P2P_DISABLE", "1"}, {"NCCL_SHM_DISABLE", "1"}});
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, false, nothing), "NET/Socket");
  nothing.infiniband = true;
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, false, nothing), "NET/IB");
  nothing.ib_disable = settings({{"NCCL_IB_DISABLE", "1"}}).ib_disable;
  EXPECT_EQ(nccl_network(nothing), "NET/Socket");
  EXPECT_EQ(nccl_network(settings({{"NCCL_NET", "OFI"}})), "NET/OFI");
}

TEST(Topology, ReadsInterfacesFromSysfs) {
  const TemporaryFolder sys;
  auto write = [&](const std::string& file, const std::string& text) {
    const fs::path path = sys.path(file);
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  };
  write("class/net/lo/operstate", "unknown");
  write("class/net/eth1/operstate", "up");
  write("class/net/eth1/speed", "25000");
  write("class/net/eth0/operstate", "down");
  write("class/net/eth0/speed", "-1");
  write("class/net/bonding_masters", "");  // a file, not an interface
  write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)");
  write("class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
  write("class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
  const Network network = find_network(sys.path());
  ASSERT_EQ(network.interfaces.size(), 2u);
  EXPECT_EQ(network.interfaces[0].name, "eth0");
  EXPECT_TRUE(!network.interfaces[0].up && network.interfaces[0].megabits == -1);
  EXPECT_TRUE(network.interfaces[1].up && network.interfaces[1].megabits == 25000);
  ASSERT_EQ(network.ports.size(), 2u);
  EXPECT_EQ(network.ports[0].rate, "200 Gb/sec (4X HDR)");
  EXPECT_TRUE(network.ports[0].active && !network.ports[1].active && network.infiniband());
  EXPECT_FALSE(find_network("/nowhere").infiniband());
}

// vit_b_32 on a device that takes 100 ms for its batch.
StepCosts costs(double bytes_per_us, double latency_us = 20) {
  StepCosts costs;
  for (const VitParameter& p : vit_parameters(named_model("vit_b_32")))
    costs.tensors.push_back({p.name, p.shape});
  costs.world = 4;
  costs.links.measured = true;
  costs.links.neighbour = costs.links.all_pairs = costs.links.intra_node =
      costs.links.inter_node = {latency_us, bytes_per_us};
  costs.compute_ms = 100;
  costs.optimizer_ms = 2;
  for (const std::string& spec : candidate_specs()) costs.codec_ns[spec] = spec == "fp32" ? 0.004 : 0.01;
  return costs;
}

TEST(Recommend, RecommendsCompressionOnSlowLinksOnly) {
  const Recommendation fast = recommend(costs(200e3, 5));
  EXPECT_FALSE(fast.compress());
  EXPECT_LT(fast.best[0].exposed_ms, 5);
  const Recommendation slow = recommend(costs(125));  // 1 Gb/s
  ASSERT_TRUE(slow.compress());
  const Prediction &plain = slow.best[0], &chosen = slow.best[slow.chosen];
  EXPECT_TRUE(chosen.spec.starts_with("powersgd")) << chosen.spec;
  EXPECT_GT(plain.step_ms, 10 * chosen.step_ms);
  // 3/4 of 353 MB out and in again, at 125 MB/s.
  EXPECT_NEAR(plain.comm_ms, 2 * 0.75 * 4 * 88'224'232 / 125e3, 0.05 * plain.comm_ms);
  EXPECT_NEAR(plain.sent_bytes, 2 * 0.75 * 4 * 88'224'232, 1e4);
  EXPECT_NEAR(plain.step_ms, 102 + plain.exposed_ms, 1e-6);
  EXPECT_GE(slow.one_bucket.step_ms, plain.step_ms);
  // A milder spec suffices for some link in between.
  bool gentle = false;
  for (double rate = 125; rate < 200e3; rate *= 1.5) {
    const Recommendation r = recommend(costs(rate));
    gentle = gentle || r.best[r.chosen].spec == "bf16";
  }
  EXPECT_TRUE(gentle);
}

TEST(Recommend, FasterLinksNeverMakeStepsLonger) {
  for (const std::string& spec : candidate_specs()) {
    for (const char* schedule : {"ring", "two_shot", "tree"}) {
      const std::string text =
          spec + (spec.find(':') == std::string::npos ? ":" : ",") + "schedule=" + schedule;
      for (int64_t mb : {5, 25, 400}) {
        for (bool shared : {false, true}) {
          double before = std::numeric_limits<double>::infinity();
          for (double rate = 50; rate < 1e6; rate *= 3) {
            StepCosts c = costs(rate);
            c.shared_cores = shared;
            c.codec_ns[text] = 0.5;
            const double ms = predict_step(c, text, mb).step_ms;
            EXPECT_LE(ms, before) << text << " " << mb << " MB at " << rate;
            EXPECT_GE(ms, c.compute_ms + c.optimizer_ms) << text;
            before = ms;
          }
        }
      }
    }
  }
}

TEST(Recommend, KernelsOverlapWithBackwardUnlessTheyShareItsCores) {
  StepCosts c = costs(1e9, 0);  // links without cost
  c.codec_ns["bf16"] = 0.5;     // 44 ms in total, which 67 ms of backward can hide
  const Prediction apart = predict_step(c, "bf16", 25);
  EXPECT_NEAR(apart.codec_ms, 0.5e-6 * 88'224'232, 1e-6);
  EXPECT_LT(apart.exposed_ms, 0.25 * apart.codec_ms);
  c.shared_cores = true;
  const double shared_ms = predict_step(c, "bf16", 25).step_ms;
  EXPECT_GE(shared_ms, 102 + apart.codec_ms - 1e-6);
  EXPECT_LE(shared_ms, 102 + 1.25 * apart.codec_ms);
  // A single bucket does not overlap.
  c.shared_cores = false;
  EXPECT_NEAR(predict_step(c, "bf16", 4000).exposed_ms, apart.codec_ms, 0.1);
  c.world = 1;
  EXPECT_EQ(predict_step(c, "bf16", 25).step_ms, 102);
  EXPECT_THROW(predict_step(c, "bf16:round=stochastic", 25), BadInput);
}

// The whole examination, with a model small enough for a test: every rank reaches the same result.
TEST(Recommend, EveryRankReachesTheSameResult) {
  TrainConfig config;
  config.batch_size = 2;
  config.devices.assign(3, Device::host());
  auto comms = Communicator::create_local(config.devices, std::chrono::seconds(60));
  std::vector<RanksReport> reports(3);
  {
    std::vector<std::jthread> threads;
    for (size_t r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] { reports[r] = examine_ranks(*comms[r], config, 3, 0.02); });
    }
  }
  for (const RanksReport& report : reports) {
    EXPECT_EQ(report.links, reports[0].links);
    EXPECT_TRUE(report.links.measured);
    EXPECT_EQ(report.rank_tflops, reports[0].rank_tflops);
    EXPECT_EQ(report.costs.codec_ns, reports[0].costs.codec_ns);
    EXPECT_EQ(report.recommendation.chosen, reports[0].recommendation.chosen);
    ASSERT_TRUE(report.matrix);
    for (int a = 0; a < 3; ++a) {
      for (int b = 0; b < 3; ++b) {
        const LinkMatrix::Link &there = report.matrix->between(a, b), &back = report.matrix->between(b, a);
        EXPECT_EQ(there.latency_us, back.latency_us);
        EXPECT_EQ(there.gb_per_s > 0, a != b);
      }
    }
  }
  EXPECT_GT(reports[0].rank_tflops, 0);
  EXPECT_EQ(reports[0].parameters, parameter_count(config.model));
  for (const auto& [spec, ns] : reports[0].costs.codec_ns) EXPECT_GT(ns, 0) << spec;
  const std::string text = links_text(reports[0]) + recommendation_text(reports[0], config.model);
  for (const char* word : {"rank 2", "GB/s", "compute", "Recommendation: ", "fp32"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " is not in " << text;
  }
}

}  // namespace
}  // namespace gradwire
