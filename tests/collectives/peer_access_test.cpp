// Allreduces over peer memory between threads: programs that run as one kernel, and missing ranks.
// tests/simt/fused_test.cpp tests the kernel itself.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "collectives/codec/codec.h"
#include "collectives/program/program.h"
#include "collectives/transport/local/local.h"
#include "runtime/device/peers.h"
#include "runtime/util/error.h"
#include "tests/collectives/program_runs.h"
#include "tests/kernels/hierarchical.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

Schedule executed(int world, Execution execution) {
  Schedule s = two_shot(world);
  s.execution = execution;
  return s;
}

struct Steps {
  Values result, residual;  // values after the last step
  std::vector<uint64_t> bytes_sent;
  bool kernels = true;
};

// Runs several allreduces with error feedback, each on the previous result. Ranks take unequal time for each
// allreduce.
Steps run_steps(Device device, const Schedule& schedule, int64_t count, Program::Options options, int steps) {
  const int world = schedule.world;
  Steps out{.result = Values(world), .residual = Values(world), .bytes_sent = std::vector<uint64_t>(world)};
  run_ranks(world, device, [&](Communicator& comm) {
    const int r = comm.rank();
    const Stream stream = Stream::create(device, "test");
    Buffer data = make_buffer<float>(device, count), residual = make_buffer<float>(device, count);
    const std::vector<float> mine = normal(count, 40 + r), kept = normal(count, 140 + r, 0.01f);
    to_device(stream, data.as<float>(), std::span<const float>(mine));
    to_device(stream, residual.as<float>(), std::span<const float>(kept));
    Program::Options with_seed = options;
    with_seed.rounding.seed = 1000 + r;
    with_seed.transfers = r % 2 == 0 ? comm.transfers() : Stream();
    Program program(comm.transport(), schedule, {data.data(), data.data(), residual.as<float>(), count},
                    with_seed);
    if (program.info().execution != schedule.execution) out.kernels = false;
    Buffer workspace(device, program.workspace_bytes());
    program.bind(workspace.data());
    for (int k = 0; k < steps; ++k) {
      if ((r + k) % world == 0) std::this_thread::sleep_for(1ms);
      program.run(stream);
    }
    out.result[r] = to_host(stream, data.as<const float>(), count);
    out.residual[r] = to_host(stream, residual.as<const float>(), count);
    comm.check();
    out.bytes_sent[r] = comm.bytes_sent();
    EXPECT_EQ(comm.bytes_sent(), static_cast<uint64_t>(steps * program.info().bytes_sent));
  });
  return out;
}

void expect_same_bits(const Steps& got, const Values& result, const Values& residual) {
  for (size_t r = 0; r < got.result.size(); ++r) {
    ASSERT_TRUE(same_bits(got.result[r], result[r])) << "rank " << r;
    ASSERT_TRUE(same_bits(got.residual[r], residual[r])) << "rank " << r;
  }
}

// Returns a program's options for a wire, and a number of elements that gives uneven chunks.
std::pair<Program::Options, int64_t> exchange_of(Wire wire, int world, bool fp32_intra_node = false) {
  const bool random = wire->stochastic && world % 2 == 1;
  return {{.what = "test",
           .wire = wire,
           .fp32_intra_node = fp32_intra_node,
           .scale = 1.0f / static_cast<float>(world),
           .rounding = {.mode = random ? Rounding::stochastic : Rounding::nearest, .first_element = 16}},
          3 * wire->granularity * (world - 1) + 11};
}

// Loads kernels eagerly, because ranks share a GPU in these tests. The driver reads the variable when it
// starts, after all static variables are initialized.
[[maybe_unused]] const int kLoadsEagerly = setenv("CUDA_MODULE_LOADING", "EAGER", 0);

class PeerAccessTest : public ::testing::TestWithParam<Device> {};
GW_INSTANTIATE_ON_DEVICES(PeerAccessTest);

TEST_P(PeerAccessTest, KernelsMatchMessagesBitForBitForEveryWire) {
  const std::vector<int> worlds = thinned({2, 3, 4, 5, 6, 7, 8}), worlds_with_options = {3, 8};
  for (Wire wire : thinned(example_wire_formats(), 8)) {
    for (int world : *wire->options == 0 ? worlds : worlds_with_options) {
      const auto [options, count] = exchange_of(wire, world);
      const Steps messages = run_steps(GetParam(), two_shot(world), count, options, 3);
      for (Execution execution : {Execution::two_shot_kernel, Execution::one_shot_kernel}) {
        SCOPED_TRACE(fmt::format("{} {} ranks {}", wire->spec(), world,
                                 execution == Execution::one_shot_kernel ? "one shot" : "two"));
        const Steps kernels = run_steps(GetParam(), executed(world, execution), count, options, 3);
        ASSERT_TRUE(kernels.kernels);
        expect_same_bits(kernels, messages.result, messages.residual);
        if (execution == Execution::two_shot_kernel) {
          EXPECT_EQ(kernels.bytes_sent, messages.bytes_sent);
        }
      }
    }
  }
}

// A number of nodes and of ranks per node, 2 to 8 ranks in total, and the schedule between the nodes: a ring
// if there are more than two nodes.
struct Nodes {
  int nodes, per_node;
  ScheduleKind between = ScheduleKind::two_shot;
};

TEST_P(PeerAccessTest, NodeKernelsMatchMessagesBitForBitForEveryWire) {
#ifdef GRADWIRE_SANITIZED
  const std::vector<Nodes> shapes = {{1, 3}, {2, 2}}, more = {{3, 2}, {4, 2, ScheduleKind::ring}};
#else
  const std::vector<Nodes> shapes = {{1, 2}, {1, 3}, {2, 2}, {1, 5}, {3, 2}, {1, 7}, {2, 4}},
                           more = {{2, 3}, {4, 2}, {3, 2, ScheduleKind::ring}, {4, 2, ScheduleKind::ring}};
#endif
  for (Wire wire : thinned(example_wire_formats(), 8)) {
    const bool plain = wire == kFp32 || wire == kBf16 || wire == kFp8;
    std::vector<Nodes> all = *wire->options == 0 ? shapes : std::vector{shapes[2 % shapes.size()]};
    if (plain) all.insert(all.end(), more.begin(), more.end());
    for (const Nodes& shape : all) {
      const int world = shape.nodes * shape.per_node;
      for (bool fp32_inside : {false, true}) {
        if (fp32_inside && (wire->exact || (!plain && world != 4))) continue;
        SCOPED_TRACE(fmt::format("{} {} nodes of {}{}, {} between", wire->spec(), shape.nodes, shape.per_node,
                                 fp32_inside ? ", FP32 inside" : "", name(shape.between)));
        const auto [options, count] = exchange_of(wire, world, fp32_inside);
        Schedule schedule = hierarchical(shape.nodes, shape.per_node, shape.between);
        const Steps messages = run_steps(GetParam(), schedule, count, options, 3);
        schedule.execution = Execution::node_peer_access;
        const Steps windows = run_steps(GetParam(), schedule, count, options, 3);
        ASSERT_TRUE(windows.kernels);
        expect_same_bits(windows, messages.result, messages.residual);
        EXPECT_EQ(windows.bytes_sent, messages.bytes_sent);
      }
    }
  }
}

// Alternates programs of several sizes, layouts and formats on the memory of all ranks, and on the memory of
// the ranks' node.
TEST_P(PeerAccessTest, ProgramsSharePeerMemory) {
  struct Case {
    int64_t count;
    Execution execution;
    Wire wire = kFp32;
  };
  const std::vector<Case> cases = {
      {5000, Execution::node_peer_access},    {700, Execution::node_peer_access, kBf16},
      {5000, Execution::one_shot_kernel},     {12000, Execution::node_peer_access},
      {700, Execution::two_shot_kernel},      {1, Execution::node_peer_access, kBf16},
      {1, Execution::one_shot_kernel},        {5000, Execution::two_shot_kernel},
      {3, Execution::node_peer_access, kBf16}};
  run_ranks(4, GetParam(), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Buffer> data, workspaces;
    for (const Case& c : cases) {
      Schedule schedule = c.execution == Execution::node_peer_access ? hierarchical(2, 2) : two_shot(4);
      schedule.execution = c.execution;
      void* const values = data.emplace_back(make_buffer<float>(comm.device(), c.count)).data();
      programs.push_back(std::make_unique<Program>(
          comm.transport(), schedule, ProgramBuffers{values, values, nullptr, c.count},
          Program::Options{
              .what = "test", .wire = c.wire, .transfers = comm.transfers(), .beside_others = true}));
      EXPECT_EQ(programs.back()->info().execution, c.execution);
      programs.back()->bind(
          workspaces.emplace_back(comm.device(), programs.back()->workspace_bytes()).data());
    }
    for (int step = 1; step <= 6; ++step) {
      for (size_t i = 0; i < cases.size(); ++i) {
        const std::vector<float> mine(cases[i].count, static_cast<float>(step * (comm.rank() + 1)));
        to_device(stream, data[i].as<float>(), std::span<const float>(mine));
        if ((comm.rank() + step) % 4 == 0) std::this_thread::sleep_for(1ms);
        programs[i]->run(stream);
      }
      for (size_t i = 0; i < cases.size(); ++i) {
        EXPECT_EQ(to_host(stream, data[i].as<const float>(), cases[i].count),
                  std::vector<float>(static_cast<size_t>(cases[i].count), static_cast<float>(step * 10)));
      }
    }
  });
}

// Returns the inputs of run_steps() in the form that the references take.
TwoShot problem(Wire wire, int world, int64_t count) {
  TwoShot t;
  t.wire = wire;
  t.scale = 0.5f;
  for (int r = 0; r < world; ++r) {
    t.inputs.push_back(normal(count, 40 + r));
    t.residuals.push_back(normal(count, 140 + r, 0.01f));
    t.seeds.push_back(1000 + r);
  }
  for (int c = 0; c < world; ++c) t.begin.push_back(chunk_range(count, world, c, wire->granularity).begin);
  t.begin.push_back(count);
  return t;
}

// Expects the references of tests/simt/fused_test.cpp and node_peer_access_test.cpp to equal the results of
// threads that exchange messages.
TEST_P(PeerAccessTest, MessagesMatchTheReferencesBitForBit) {
  for (Wire wire : wire_formats()) {
    SCOPED_TRACE(wire->name);
    const Program::Options options{.what = "test", .wire = wire, .scale = 0.5f};
    for (int world : {2, 5}) {
      const int64_t count = 4 * wire->granularity + 40;
      const TwoShotResult expected = two_shot_reference(problem(wire, world, count));
      expect_same_bits(run_steps(GetParam(), two_shot(world), count, options, 1),
                       Values(world, expected.result), expected.residuals);
    }
    for (const auto& [nodes, per_node] : {std::pair{2, 2}, std::pair{2, 3}, std::pair{3, 2}}) {
      const int64_t count = 7 * wire->granularity + 40;
      const TwoShotResult expected = hierarchical_reference(problem(wire, nodes * per_node, count), nodes);
      expect_same_bits(run_steps(GetParam(), hierarchical(nodes, per_node), count, options, 1),
                       Values(nodes * per_node, expected.result), expected.residuals);
    }
  }
}

TEST_P(PeerAccessTest, WidensBf16Buffers) {
  const int64_t count = 999;
  for (Execution execution : {Execution::messages, Execution::two_shot_kernel, Execution::one_shot_kernel}) {
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      const Stream stream = Stream::create(comm.device(), "test");
      Buffer data = make_buffer<uint16_t>(comm.device(), count);
      const std::vector<uint16_t> ones(count, 0x3f80);
      to_device(stream, data.as<uint16_t>(), std::span<const uint16_t>(ones));
      Program program(comm.transport(), executed(3, execution),
                      {.in = data.data(), .out = data.data(), .count = count, .dtype = DType::bf16},
                      {.what = "test"});
      run_once(program, stream);
      EXPECT_EQ(to_host(stream, data.as<const uint16_t>(), count), std::vector<uint16_t>(count, 0x4040));
    });
  }
}

// Runs an allreduce of 1000 ones. All ranks prepare the call together. Then each rank makes the call unless
// its `starts` returns false.
void allreduce_ones(
    Communicator& comm, const Schedule& schedule, const std::string& what = "gradients",
    const std::function<bool()>& starts = [] { return true; }) {
  const Stream stream = Stream::create(comm.device(), "test");
  std::vector<float> data(1000, 1.0f);
  Program program(comm.transport(), schedule, {data.data(), data.data(), nullptr, 1000}, {.what = what});
  if (starts()) run_once(program, stream);
}

TEST(PeerAccess, NamesAMissingRankOnAllRanks) {
  std::vector<std::string> errors(3);
  run_ranks(3, Device::host(), 200ms, [&](Communicator& comm) {
    const int r = comm.rank();
    errors[r] = error_of([&] {
      allreduce_ones(comm, executed(3, Execution::two_shot_kernel), "gradients", [&] { return r != 1; });
    });
    if (r != 1) {
      EXPECT_THROW(comm.check(), CommError);
    }
  });
  for (int r : {0, 2})
    expect_has(errors[r], {"allreduce of gradients", "waited 200 ms for rank 1 at its barrier 1"});
}

TEST(PeerAccess, NamesAMissingRankInsideItsNode) {
  std::vector<std::string> errors(4);
  // Whether rank 3 has reported its missing neighbour. Until then, the other node does not wait for rank 3.
  std::atomic<bool> told = false;
  Schedule schedule = hierarchical(2, 2);
  schedule.execution = Execution::node_peer_access;
  run_ranks(4, Device::host(), 1s, [&](Communicator& comm) {
    const int r = comm.rank();
    errors[r] = error_of([&] {
      allreduce_ones(comm, schedule, "gradients", [&] {
        while (r < 2 && !told) std::this_thread::sleep_for(1ms);
        return r != 2;
      });
    });
    if (r == 2) return;
    if (r == 3) told = true;
    EXPECT_THROW(comm.check(), CommError);
  });
  for (int r : {0, 1, 3}) expect_has(errors[r], {"allreduce of gradients"});
  expect_has(errors[3], {"waited 1000 ms for rank 2 at its barrier 1"});
}

TEST(PeerAccess, AbortEndsTheWait) {
  run_ranks(2, Device::host(), 60s, [&](Communicator& comm) {
    const std::string error = error_of([&] {
      allreduce_ones(comm, executed(2, Execution::one_shot_kernel), "gradients", [&] {
        if (comm.rank() == 1) comm.abort("the disk is full");
        return comm.rank() == 0;
      });
    });
    if (comm.rank() == 0) expect_has(error, {"the disk is full"});
  });
}

TEST(PeerAccess, ReportsRanksThatDisagree) {
  EXPECT_THROW(run_ranks(2, Device::host(), 20s,
                         [](Communicator& comm) {
                           allreduce_ones(comm, executed(2, Execution::two_shot_kernel),
                                          comm.rank() == 0 ? "this" : "that");
                         }),
               CommError);
}

// Tests several orders of arrival. The deadline is far beyond the test's time limit.
TEST(PeerAccess, FailsOnAllRanksWhenOneRankRequestsPeerMemory) {
  for (int alone : {0, 2}) {
    for (int late : {0, 2}) {
      std::vector<std::string> errors(3);
      run_ranks(3, Device::host(), std::chrono::hours(1), [&](Communicator& comm) {
        errors[comm.rank()] = error_of([&] {
          allreduce_ones(comm, executed(3, Execution::messages));
          allreduce_ones(comm, executed(3, Execution::two_shot_kernel));
          if (comm.rank() == late) std::this_thread::sleep_for(20ms);
          allreduce_ones(
              comm, executed(3, comm.rank() == alone ? Execution::two_shot_kernel : Execution::messages));
        });
      });
      for (const std::string& error : errors) {
        expect_has(error,
                   {fmt::format("after 2 calls rank {} maps peer memory, as transport=peer needs", alone),
                    "makes call 3, allreduce of gradients", "give all ranks the same spec"});
      }
    }
  }
}

TEST(PeerAccess, OnlyATwoShotAllreduceOfAllRanksIsOneKernel) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    float data[8] = {};
    Schedule schedule = ring(2);
    schedule.execution = Execution::two_shot_kernel;
    EXPECT_THROW(Program(comm.transport(), schedule, {data, data, nullptr, 8}, {.what = "test"}), BadInput);
  });
}

// Checks the number of thread blocks on a small GPU. Blocks of all ranks on a device wait for each other, so
// all must be co-resident.
TEST(PeerAccess, RanksOnASmallGpuHaveOnlyCoResidentBlocks) {
  for (int multiprocessors : {1, 14, 60, 132}) {
    for (int ranks : {1, 2, 3, 8}) {
      const int blocks = peer_blocks(multiprocessors, ranks);
      EXPECT_GE(blocks, 1);
      EXPECT_LE(blocks * ranks, std::max({ranks, std::min(multiprocessors, kMostPeerBlocks)}));
    }
  }
  EXPECT_EQ(peer_blocks(132, 1), kMostPeerBlocks);
  EXPECT_EQ(peer_blocks(108, 1), 27) << "an A100";
  EXPECT_EQ(peer_blocks(28, 2), 3) << "two sevenths of an H100";
  EXPECT_EQ(peer_blocks(0, 4), kMostPeerBlocks / 4) << "on the host";
}

TEST(PeerAccess, RanksThatShareAGpuNeedEagerLoading) {
  const Device first = Device::cuda(0), second = Device::cuda(1), host = Device::host();
  expect_has(sharing_obstacle({first, second, second}, true, false),
             {"2 ranks share cuda:1", "CUDA_MODULE_LOADING=EAGER"});
  EXPECT_EQ(sharing_obstacle({first, second, second}, false, false), "");
  EXPECT_EQ(sharing_obstacle({first, second}, true, false), "");
  EXPECT_EQ(sharing_obstacle({host, host}, true, false), "");
}

TEST(PeerAccess, RanksThatAreThreadsNeedLaunchesThatReturn) {
  const Device first = Device::cuda(0), second = Device::cuda(1), host = Device::host();
  expect_has(sharing_obstacle({first, second}, false, true),
             {"CUDA_LAUNCH_BLOCKING=1", "a process for each"});
  EXPECT_EQ(sharing_obstacle({first}, false, true), "");
  EXPECT_EQ(sharing_obstacle({host, host}, false, true), "");
}

}  // namespace
}  // namespace gradwire::testing
