// What `gradwire doctor` concludes: paths between GPUs from sysfs trees made here, NCCL's choice, network
// interfaces, and predictions from given costs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <thread>

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

// A sysfs tree made for a test.
class Sysfs {
 public:
  std::string root() const { return folder_.path(); }
  void write(const std::string& file, const std::string& text) const {
    const fs::path path = folder_.path(file);
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  // A PCI device below `bridges` ("pci0000:3a/0000:3a:00.0/..."), linked as the kernel does it.
  void add(const std::string& bridges, const std::string& address, int numa_node) const {
    write(fmt::format("devices/{}/{}/numa_node", bridges, address), fmt::to_string(numa_node));
    fs::create_directories(folder_.path("bus/pci/devices"));
    fs::create_directory_symlink("../../../devices/" + bridges + "/" + address,
                                 folder_.path("bus/pci/devices/" + address));
  }
  GpuPath path(const std::string& a, const std::string& b) const {
    const auto from = find_pci_place(root(), a), to = find_pci_place(root(), b);
    EXPECT_TRUE(from && to) << a << " " << b;
    const GpuPath there = pci_path(*from, *to);
    EXPECT_EQ(there, pci_path(*to, *from));
    return there;
  }

 private:
  TemporaryFolder folder_;
};

// Two sockets. Socket 0: a root port with a switch of two GPUs, one of which is behind a second switch as
// well; another root port of the same host bridge; another host bridge. Socket 1: one GPU.
TEST(Topology, PathsFollowTheTree) {
  const Sysfs sys;
  const std::string port = "pci0000:3a/0000:3a:00.0", upstream = port + "/0000:3b:00.0";
  sys.add(upstream + "/0000:3c:00.0", "0000:3d:00.0", 0);
  sys.add(upstream + "/0000:3c:04.0", "0000:3e:00.0", 0);
  sys.add(upstream + "/0000:3c:08.0/0000:3f:00.0/0000:40:00.0", "0000:41:00.0", 0);
  sys.add(upstream + "/0000:3c:08.0/0000:3f:00.0/0000:40:04.0", "0000:42:00.0", 0);
  sys.add("pci0000:3a/0000:3a:02.0", "0000:50:00.0", 0);
  sys.add("pci0000:5c/0000:5c:00.0", "0000:5d:00.0", 0);
  sys.add("pci0000:ae/0000:ae:00.0", "0000:af:00.0", 1);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:3d:00.0"), GpuPath::self);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:3e:00.0"), GpuPath::one_switch);
  EXPECT_EQ(sys.path("0000:41:00.0", "0000:42:00.0"), GpuPath::one_switch);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:41:00.0"), GpuPath::switches);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:50:00.0"), GpuPath::host_bridge);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:5d:00.0"), GpuPath::node);
  EXPECT_EQ(sys.path("0000:3d:00.0", "0000:af:00.0"), GpuPath::system);

  const auto place = find_pci_place(sys.root(), "00000000:3D:00.0");  // as CUDA and NVML write it
  ASSERT_TRUE(place);
  EXPECT_EQ(place->address, "0000:3d:00.0");
  EXPECT_EQ(place->numa_node, 0);
  EXPECT_EQ(place->above,
            (std::vector<std::string>{"pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", "0000:3c:00.0"}));
  EXPECT_FALSE(find_pci_place(sys.root(), "0000:99:00.0"));
  EXPECT_FALSE(find_pci_place("/nowhere", "0000:3d:00.0"));
}

TEST(Topology, TheMatrixIsSymmetricAndHasNvidiasNames) {
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

TEST(Topology, NcclTakesWhatTheEnvironmentAndTheDistanceAllow) {
  const NcclSettings plain = settings({});
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, false, plain), "P2P/CUMEM");
  EXPECT_EQ(nccl_transport(GpuPath::nvlink, true, true, plain), "P2P/direct pointer");
  EXPECT_EQ(nccl_transport(GpuPath::switches, true, false, settings({{"NCCL_CUMEM_ENABLE", "0"}})),
            "P2P/IPC");
  EXPECT_EQ(nccl_transport(GpuPath::one_switch, false, false, plain), "SHM");  // CUDA does not let it
  EXPECT_EQ(nccl_transport(GpuPath::unknown, true, false, plain), "SHM");
  // By default up to PXB; AMD machines with two GPUs all the way.
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

TEST(Topology, InterfacesAreThoseOfSysfs) {
  const Sysfs sys;
  sys.write("class/net/lo/operstate", "unknown");
  sys.write("class/net/eth1/operstate", "up");
  sys.write("class/net/eth1/speed", "25000");
  sys.write("class/net/eth0/operstate", "down");
  sys.write("class/net/eth0/speed", "-1");
  sys.write("class/net/bonding_masters", "");  // a file, no interface
  sys.write("class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE");
  sys.write("class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)");
  sys.write("class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand");
  sys.write("class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
  const Network network = find_network(sys.root());
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

TEST(Recommend, NothingOnAFastLinkAndCompressionOnASlowOne) {
  const Recommendation fast = recommend(costs(200e3, 5));
  EXPECT_FALSE(fast.compress());
  EXPECT_LT(fast.best[0].exposed_ms, 5);
  const Recommendation slow = recommend(costs(125));  // 1 Gb/s
  ASSERT_TRUE(slow.compress());
  const Prediction &plain = slow.best[0], &chosen = slow.best[slow.chosen];
  EXPECT_TRUE(chosen.spec.starts_with("powersgd")) << chosen.spec;
  EXPECT_GT(plain.step_ms, 10 * chosen.step_ms);
  // 3/4 of 353 MB out and in again, over 125 MB/s.
  EXPECT_NEAR(plain.comm_ms, 2 * 0.75 * 4 * 88'224'232 / 125e3, 0.05 * plain.comm_ms);
  EXPECT_NEAR(plain.sent_bytes, 2 * 0.75 * 4 * 88'224'232, 1e4);
  EXPECT_NEAR(plain.step_ms, 102 + plain.exposed_ms, 1e-6);
  EXPECT_GE(slow.one_bucket.step_ms, plain.step_ms);
  // For some link in between, a milder spec is enough.
  bool gentle = false;
  for (double rate = 125; rate < 200e3; rate *= 1.5) {
    const Recommendation r = recommend(costs(rate));
    gentle = gentle || r.best[r.chosen].spec == "bf16";
  }
  EXPECT_TRUE(gentle);
}

TEST(Recommend, AFasterLinkNeverMakesAStepLonger) {
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
  StepCosts c = costs(1e9, 0);  // links that cost nothing
  c.codec_ns["bf16"] = 0.5;     // 44 ms in all, which 67 ms of backward can hide
  const Prediction apart = predict_step(c, "bf16", 25);
  EXPECT_NEAR(apart.codec_ms, 0.5e-6 * 88'224'232, 1e-6);
  EXPECT_LT(apart.exposed_ms, 0.25 * apart.codec_ms);
  c.shared_cores = true;
  const double shared_ms = predict_step(c, "bf16", 25).step_ms;
  EXPECT_GE(shared_ms, 102 + apart.codec_ms - 1e-6);
  EXPECT_LE(shared_ms, 102 + 1.25 * apart.codec_ms);
  // One bucket overlaps with nothing.
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
