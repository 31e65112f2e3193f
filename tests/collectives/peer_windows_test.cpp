// Allreduces over peer memory between threads: programs that run as one kernel, and missing ranks. The kernel
// itself is tested in tests/simt/fused_test.cpp.
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
#include "tests/collectives/group.h"
#include "tests/kernels/hierarchical.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

Schedule carried(int world, Carrier carrier) {
  Schedule s = two_shot(world);
  s.carrier = carrier;
  return s;
}

struct Steps {
  std::vector<std::vector<float>> result, residual;  // [rank], after the last step
  std::vector<uint64_t> bytes_sent;
  bool kernels = true;
};

// Runs several allreduces, each on the previous result, with error feedback. Ranks take unequal time for
// each.
Steps run_steps(Device device, const Schedule& schedule, int64_t count, Program::Options options, int steps) {
  const int world = schedule.world;
  Steps out{.result = std::vector<std::vector<float>>(world),
            .residual = std::vector<std::vector<float>>(world),
            .bytes_sent = std::vector<uint64_t>(world)};
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
    if (program.carrier() != schedule.carrier) out.kernels = false;
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

// Ranks share a GPU in these tests. The driver reads this variable when it starts, after all static variables
// are initialized.
[[maybe_unused]] const int kLoadsEagerly = setenv("CUDA_MODULE_LOADING", "EAGER", 0);

class PeerWindowsTest : public ::testing::TestWithParam<Device> {};
GW_INSTANTIATE_ON_DEVICES(PeerWindowsTest);

TEST_P(PeerWindowsTest, KernelsMatchMessagesBitForBitForEveryWire) {
  const std::vector<int> worlds = thinned({2, 3, 4, 5, 6, 7, 8}), worlds_with_options = {3, 8};
  for (Wire wire : thinned(example_wire_formats(), 8)) {
    for (int world : *wire->options == 0 ? worlds : worlds_with_options) {
      const bool random = wire->stochastic && world % 2 == 1;
      const Program::Options options{
          .what = "test",
          .wire = wire,
          .scale = 1.0f / static_cast<float>(world),
          .rounding = {.mode = random ? Rounding::stochastic : Rounding::nearest, .first_element = 16}};
      const int64_t count = 3 * wire->granularity * (world - 1) + 11;  // uneven chunks
      const Steps messages = run_steps(GetParam(), two_shot(world), count, options, 3);
      for (Carrier carrier : {Carrier::two_shot_kernel, Carrier::one_shot_kernel}) {
        SCOPED_TRACE(fmt::format("{} {} ranks {}", wire->spec(), world,
                                 carrier == Carrier::one_shot_kernel ? "one shot" : "two"));
        const Steps kernels = run_steps(GetParam(), carried(world, carrier), count, options, 3);
        ASSERT_TRUE(kernels.kernels);
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(kernels.result[r], messages.result[r])) << "rank " << r;
          ASSERT_TRUE(same_bits(kernels.residual[r], messages.residual[r])) << "rank " << r;
        }
        if (carrier == Carrier::two_shot_kernel) {
          EXPECT_EQ(kernels.bytes_sent, messages.bytes_sent);
        }
      }
    }
  }
}

// Nodes x ranks per node, 2 to 8 ranks in total; a ring between the nodes if there are more than two.
struct Nodes {
  int nodes, per_node;
  ScheduleKind between = ScheduleKind::two_shot;
};

TEST_P(PeerWindowsTest, NodeKernelsMatchMessagesBitForBitForEveryWire) {
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
        const bool random = wire->stochastic && world % 2 == 1;
        const Program::Options options{
            .what = "test",
            .wire = wire,
            .fp32_intra_node = fp32_inside,
            .scale = 1.0f / static_cast<float>(world),
            .rounding = {.mode = random ? Rounding::stochastic : Rounding::nearest, .first_element = 16}};
        const int64_t count = 3 * wire->granularity * (world - 1) + 11;  // uneven chunks
        Schedule schedule = hierarchical(shape.nodes, shape.per_node, shape.between);
        const Steps messages = run_steps(GetParam(), schedule, count, options, 3);
        schedule.carrier = Carrier::node_windows;
        const Steps windows = run_steps(GetParam(), schedule, count, options, 3);
        ASSERT_TRUE(windows.kernels);
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(windows.result[r], messages.result[r])) << "rank " << r;
          ASSERT_TRUE(same_bits(windows.residual[r], messages.residual[r])) << "rank " << r;
        }
        EXPECT_EQ(windows.bytes_sent, messages.bytes_sent);
      }
    }
  }
}

// Programs of several sizes and wires alternate on the memory of their node, and with kernels over the memory
// of all ranks.
TEST_P(PeerWindowsTest, ProgramsShareThePeerMemoryOfTheirNode) {
  run_ranks(4, GetParam(), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Buffer> data, workspaces;
    const std::vector<int64_t> counts = {5000, 700, 12000, 1, 5000, 3};
    for (size_t i = 0; i < counts.size(); ++i) {
      Schedule schedule = i == 4 ? two_shot(4) : hierarchical(2, 2);
      schedule.carrier = i == 4 ? Carrier::two_shot_kernel : Carrier::node_windows;
      data.push_back(make_buffer<float>(comm.device(), counts[i]));
      programs.push_back(std::make_unique<Program>(
          comm.transport(), schedule, ProgramBuffers{data[i].data(), data[i].data(), nullptr, counts[i]},
          Program::Options{.what = fmt::format("{}", i),
                           .wire = i % 2 == 0 ? kFp32 : kBf16,
                           .transfers = comm.transfers(),
                           .beside_others = true}));
      EXPECT_EQ(programs[i]->carrier(), schedule.carrier);
      workspaces.emplace_back(comm.device(), programs[i]->workspace_bytes());
      programs[i]->bind(workspaces[i].data());
    }
    for (int step = 1; step <= 6; ++step) {
      for (size_t i = 0; i < counts.size(); ++i) {
        const std::vector<float> mine(static_cast<size_t>(counts[i]),
                                      static_cast<float>(step * (comm.rank() + 1)));
        to_device(stream, data[i].as<float>(), std::span<const float>(mine));
        if ((comm.rank() + step) % 4 == 0) std::this_thread::sleep_for(1ms);
        programs[i]->run(stream);
      }
      for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(to_host(stream, data[i].as<const float>(), counts[i]),
                  std::vector<float>(static_cast<size_t>(counts[i]), static_cast<float>(step * 10)));
      }
    }
  });
}

// Returns the exchange of run_steps(), for a reference.
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

// The reference of tests/simt/fused_test.cpp equals the result of threads with messages.
TEST_P(PeerWindowsTest, MessagesMatchTheReferenceBitForBit) {
  for (Wire wire : wire_formats()) {
    for (int world : {2, 5}) {
      const int64_t count = 4 * wire->granularity + 40;
      const TwoShot t = problem(wire, world, count);
      const TwoShotResult expected = two_shot_reference(t);
      const Steps messages =
          run_steps(GetParam(), two_shot(world), count, {.what = "test", .wire = wire, .scale = 0.5f}, 1);
      for (int r = 0; r < world; ++r) {
        EXPECT_TRUE(same_bits(messages.result[r], expected.result)) << wire->name << " rank " << r;
        EXPECT_TRUE(same_bits(messages.residual[r], expected.residuals[r])) << wire->name << " rank " << r;
      }
    }
  }
}

// The same for tests/simt/node_windows_test.cpp.
TEST_P(PeerWindowsTest, HierarchicalMessagesMatchTheReferenceBitForBit) {
  for (Wire wire : wire_formats()) {
    for (const auto& [nodes, per_node] : {std::pair{2, 2}, std::pair{2, 3}, std::pair{3, 2}}) {
      const int world = nodes * per_node;
      const int64_t count = 7 * wire->granularity + 40;
      const TwoShot t = problem(wire, world, count);
      const TwoShotResult expected = hierarchical_reference(t, nodes);
      const Steps messages = run_steps(GetParam(), hierarchical(nodes, per_node), count,
                                       {.what = "test", .wire = wire, .scale = 0.5f}, 1);
      for (int r = 0; r < world; ++r) {
        EXPECT_TRUE(same_bits(messages.result[r], expected.result)) << wire->name << " rank " << r;
        EXPECT_TRUE(same_bits(messages.residual[r], expected.residuals[r])) << wire->name << " rank " << r;
      }
    }
  }
}

TEST_P(PeerWindowsTest, WidensBf16Buffers) {
  const int64_t count = 999;
  for (Carrier carrier : {Carrier::messages, Carrier::two_shot_kernel, Carrier::one_shot_kernel}) {
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      const Stream stream = Stream::create(comm.device(), "test");
      Buffer data = make_buffer<uint16_t>(comm.device(), count);
      const std::vector<uint16_t> ones(count, 0x3f80);
      to_device(stream, data.as<uint16_t>(), std::span<const uint16_t>(ones));
      Program program(comm.transport(), carried(3, carrier),
                      {.in = data.data(), .out = data.data(), .count = count, .dtype = DType::bf16},
                      {.what = "test"});
      Buffer workspace(comm.device(), program.workspace_bytes());
      program.bind(workspace.data());
      program.run(stream);
      EXPECT_EQ(to_host(stream, data.as<const uint16_t>(), count), std::vector<uint16_t>(count, 0x4040));
    });
  }
}

// Programs whose memory has different sizes and layouts alternate.
TEST_P(PeerWindowsTest, ProgramsSharePeerMemory) {
  const int world = 3;
  run_ranks(world, GetParam(), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Buffer> data;
    const std::vector<int64_t> counts = {5000, 700, 5000, 12000, 1};
    for (size_t i = 0; i < counts.size(); ++i) {
      data.push_back(make_buffer<float>(comm.device(), counts[i]));
      programs.push_back(std::make_unique<Program>(
          comm.transport(), carried(world, i % 2 == 0 ? Carrier::one_shot_kernel : Carrier::two_shot_kernel),
          ProgramBuffers{data[i].data(), data[i].data(), nullptr, counts[i]},
          Program::Options{
              .what = fmt::format("{}", i), .transfers = comm.transfers(), .beside_others = true}));
      programs.back()->bind(nullptr);
    }
    for (int step = 1; step <= 4; ++step) {
      for (size_t i = 0; i < counts.size(); ++i) {
        const std::vector<float> mine(static_cast<size_t>(counts[i]),
                                      static_cast<float>(step * (comm.rank() + 1)));
        to_device(stream, data[i].as<float>(), std::span<const float>(mine));
        programs[i]->run(stream);
      }
      for (size_t i = 0; i < counts.size(); ++i) {
        EXPECT_EQ(to_host(stream, data[i].as<const float>(), counts[i]),
                  std::vector<float>(static_cast<size_t>(counts[i]), static_cast<float>(step * 6)));
      }
    }
  });
}

TEST(PeerWindows, NamesAMissingRankOnAllRanks) {
  const int world = 3;
  std::vector<std::string> errors(world);
  run_ranks(world, Device::host(), 200ms, [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<float> data(1000, 1.0f);
    Program program(comm.transport(), carried(world, Carrier::two_shot_kernel),
                    {data.data(), data.data(), nullptr, 1000}, {.what = "gradients"});
    program.bind(nullptr);
    if (comm.rank() == 1) return;
    try {
      program.run(stream);
      stream.synchronize();
    } catch (const CommError& error) {
      errors[comm.rank()] = error.what();
    }
    EXPECT_THROW(comm.check(), CommError);
  });
  for (int r : {0, 2}) {
    for (const char* part : {"allreduce of gradients", "waited 200 ms for rank 1 at its barrier 1"})
      EXPECT_NE(errors[r].find(part), std::string::npos) << errors[r];
  }
}

TEST(PeerWindows, NamesAMissingRankInsideItsNode) {
  std::vector<std::string> errors(4);
  // Rank 3 has reported its missing neighbour. Until then, the other node does not wait for it.
  std::atomic<bool> told = false;
  run_ranks(4, Device::host(), 1s, [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<float> data(1000, 1.0f);
    Schedule schedule = hierarchical(2, 2);
    schedule.carrier = Carrier::node_windows;
    Program program(comm.transport(), schedule, {data.data(), data.data(), nullptr, 1000},
                    {.what = "gradients"});
    Buffer workspace(comm.device(), program.workspace_bytes());
    program.bind(workspace.data());
    if (comm.rank() == 2) return;
    while (comm.rank() < 2 && !told) std::this_thread::sleep_for(1ms);
    try {
      program.run(stream);
      stream.synchronize();
    } catch (const CommError& error) {
      errors[comm.rank()] = error.what();
    }
    if (comm.rank() == 3) told = true;
    EXPECT_THROW(comm.check(), CommError);
  });
  for (int r : {0, 1, 3}) expect_has(errors[r], {"allreduce of gradients"});
  expect_has(errors[3], {"waited 1000 ms for rank 2 at its barrier 1"});
}

TEST(PeerWindows, AbortEndsTheWait) {
  run_ranks(2, Device::host(), 60s, [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<float> data(1000, 1.0f);
    Program program(comm.transport(), carried(2, Carrier::one_shot_kernel),
                    {data.data(), data.data(), nullptr, 1000}, {.what = "gradients"});
    program.bind(nullptr);
    if (comm.rank() == 1) {
      comm.abort("the disk is full");
      return;
    }
    try {
      program.run(stream);
      stream.synchronize();
      ADD_FAILURE() << "it ended";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("the disk is full"), std::string::npos) << error.what();
    }
  });
}

TEST(PeerWindows, ReportsRanksThatDisagree) {
  EXPECT_THROW(run_ranks(2, Device::host(), 20s,
                         [&](Communicator& comm) {
                           const Stream stream = Stream::create(comm.device(), "test");
                           std::vector<float> data(1000, 1.0f);
                           Program program(comm.transport(), carried(2, Carrier::two_shot_kernel),
                                           {data.data(), data.data(), nullptr, 1000},
                                           {.what = comm.rank() == 0 ? "this" : "that"});
                           program.bind(nullptr);
                           program.run(stream);
                           stream.synchronize();
                         }),
               CommError);
}

// Whichever rank arrives first. The deadline is far beyond the test's time limit.
TEST(PeerWindows, FailsOnAllRanksWhenOneRankRequestsPeerMemory) {
  for (int alone : {0, 2}) {
    for (int late : {0, 2}) {
      std::vector<std::string> errors(3);
      run_ranks(3, Device::host(), std::chrono::hours(1), [&](Communicator& comm) {
        const Stream stream = Stream::create(comm.device(), "test");
        std::vector<float> data(1000, 1.0f);
        const ProgramBuffers buffers{data.data(), data.data(), nullptr, 1000};
        const auto call_with = [&](Carrier carrier) {
          Program program(comm.transport(), carried(3, carrier), buffers, {.what = "the gradients"});
          Buffer workspace(comm.device(), program.workspace_bytes());
          program.bind(workspace.data());
          program.run(stream);
          stream.synchronize();
        };
        try {
          call_with(Carrier::messages);
          call_with(Carrier::two_shot_kernel);
          if (comm.rank() == late) std::this_thread::sleep_for(20ms);
          call_with(comm.rank() == alone ? Carrier::two_shot_kernel : Carrier::messages);
        } catch (const CommError& error) {
          errors[static_cast<size_t>(comm.rank())] = error.what();
        }
      });
      for (const std::string& error : errors) {
        expect_has(error, {fmt::format("after 2 calls rank {} opens windows, as transport=lsa needs", alone),
                           "makes call 3, allreduce of the gradients", "give all ranks the same spec"});
      }
    }
  }
}

TEST(PeerWindows, OnlyATwoShotAllreduceOfAllRanksIsOneKernel) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    float data[8] = {};
    Schedule schedule = ring(2);
    schedule.carrier = Carrier::two_shot_kernel;
    EXPECT_THROW(Program(comm.transport(), schedule, {data, data, nullptr, 8}, {.what = "test"}), BadInput);
  });
}

// --- spec and planner ---

TEST(TransportLsa, IsAnOptionOfASpec) {
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=lsa").lsa, Lsa::on);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=messages").lsa, Lsa::off);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=auto").lsa, Lsa::automatic);
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=auto").to_string(), "bf16:transport=auto");
  EXPECT_EQ(CompressionSpec::parse("powersgd:rank=2,transport=lsa").to_string(),
            "powersgd:rank=2,transport=lsa");
  EXPECT_EQ(CompressionSpec::parse("bf16:transport=messages").to_string(), "bf16");
  EXPECT_EQ(CompressionSpec::parse("bf16:schedule=hierarchical,transport=lsa,intra_node=fp32").lsa, Lsa::on);
  for (const char* schedule : {"ring", "tree", "nccl"}) {
    for (const char* transport : {"lsa", "auto"}) {
      EXPECT_THROW(CompressionSpec::parse(fmt::format("bf16:transport={},schedule={}", transport, schedule)),
                   BadInput);
    }
  }
}

SchedulePlanner::Choice choose(int world, int64_t count, Wire wire, const std::string& obstacle = "") {
  ScheduleRequest request = schedule_request(CompressionSpec::parse("bf16:transport=lsa"));
  request.lsa_obstacle = obstacle;
  LinkCosts costs;
  costs.peer_memory = {.latency_us = 4, .bytes_per_us = 300e3};
  return SchedulePlanner(request, world, 0, costs, kSliceBytes).choose(count, wire);
}

TEST(TransportLsa, ReducesSmallBuffersInOneShotAndLargeOnesInTwo) {
  for (Wire wire : {kFp32, kBf16}) {
    EXPECT_EQ(choose(8, 1000, wire).schedule.carrier, Carrier::one_shot_kernel);
    EXPECT_EQ(choose(8, 10'000'000, wire).schedule.carrier, Carrier::two_shot_kernel);
  }
  EXPECT_LT(choose(8, 1000, kBf16).predicted_us, choose(8, 10'000'000, kBf16).predicted_us);
  EXPECT_EQ(choose(8, 1000, kBf16).schedule.rounds, two_shot(8).rounds);
}

// Peer memory inside nodes, messages between them. Rounds inside nodes cost as much as peer memory.
TEST(TransportLsa, HierarchicalSchedulesReadMemoryInsideNodes) {
  LinkCosts costs;
  costs.measured = true;
  costs.intra_node = {30, 5000};
  costs.inter_node = {50, 1000};
  costs.peer_memory = {4, 300e3};
  const auto plan = [&](const std::string& spec, const std::string& obstacle, int per_node) {
    ScheduleRequest request = schedule_request(CompressionSpec::parse(spec));
    request.lsa_obstacle = obstacle;
    return SchedulePlanner(request, 8, per_node, costs, 0).choose(1'000'000, kFp32);
  };
  const auto messages = plan("fp32:schedule=hierarchical", "", 4);
  const auto memory = plan("fp32:schedule=hierarchical,transport=lsa", "", 4);
  EXPECT_EQ(memory.schedule.carrier, Carrier::node_windows);
  EXPECT_EQ(memory.schedule.rounds, messages.schedule.rounds);
  expect_has(memory.reason, {"asked for, 2 nodes of 4, inside which memory is read"});
  // Two rounds of 3/4 of 4 MB inside nodes.
  EXPECT_NEAR(messages.predicted_us - memory.predicted_us, 2 * (30 - 4) + 6e6 / 5000 - 6e6 / 300e3, 1);
  const auto without = plan("fp32:schedule=hierarchical,transport=lsa", "no NVLink", 4);
  EXPECT_EQ(without.schedule.carrier, Carrier::messages);
  expect_has(without.reason, {"messages inside nodes, too: no NVLink"});
  EXPECT_EQ(plan("fp32:schedule=hierarchical,transport=lsa", "", 1).schedule.carrier, Carrier::messages);
}

// Between GPUs, a kernel of few thread blocks encodes more slowly than the kernels of messages, which use the
// whole GPU, and it has few bytes of a small wire in flight.
TEST(TransportLsa, AutoChoosesMessagesWhenTheKernelIsSlowerThanTheLinks) {
  LinkCosts costs;
  costs.measured = true;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = {30, 200e3};
  costs.peer_memory = {4, 340e3};
  const auto carrier = [&](const char* format, int64_t count, double read_us) {
    costs.peer_read_us = read_us;
    const Wire wire = wire_format(format);
    return SchedulePlanner(schedule_request(CompressionSpec::parse(
                               fmt::format("{}:transport=auto,schedule=two_shot", format))),
                           8, 0, costs, 0)
        .choose(count, wire)
        .schedule.carrier;
  };
  for (const char* format : {"fp32", "bf16", "fp8", "int8", "int4", "sign"}) {
    EXPECT_NE(carrier(format, 10'000, 1), Carrier::messages) << format;
  }
  for (const char* format : {"fp32", "bf16"})
    EXPECT_EQ(carrier(format, 25'000'000, 1), Carrier::two_shot_kernel) << format;
  for (const char* format : {"int8", "int4", "sign"})
    EXPECT_EQ(carrier(format, 25'000'000, 1), Carrier::messages) << format;
  EXPECT_EQ(carrier("int8", 25'000'000, 0), Carrier::two_shot_kernel) << "between host threads";
  EXPECT_EQ(carrier("bf16", 25'000'000, 20), Carrier::messages) << "slow reads";
}

// With planted costs, a kernel loses to messages where its memory has low bandwidth or a slow barrier, and
// messages are faster.
TEST(TransportLsa, AutoComparesMemoryWithMessages) {
  LinkCosts costs;
  costs.measured = true;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = {30, 20e3};
  const auto plan = [&](const std::string& spec, int64_t count, LinkCosts::Pattern memory, int per_node = 0) {
    LinkCosts with = costs;
    with.peer_memory = memory;
    return SchedulePlanner(schedule_request(CompressionSpec::parse(spec)), 8, per_node, with, 0)
        .choose(count, kFp32);
  };
  constexpr int64_t kLittle = 1000, kMuch = 6'000'000;
  const LinkCosts::Pattern fast{4, 300e3}, far{4, 2e3}, late{400, 300e3};
  for (const char* spec : {"fp32:transport=auto", "fp32:schedule=two_shot,transport=auto"}) {
    for (int64_t count : {kLittle, kMuch}) {
      const auto choice = plan(spec, count, fast);
      EXPECT_NE(choice.schedule.carrier, Carrier::messages);
      expect_has(choice.reason, {"in one kernel", "predicted", "by messages"});
    }
    EXPECT_NE(plan(spec, kLittle, far).schedule.carrier, Carrier::messages);
    const auto much = plan(spec, kMuch, far);
    EXPECT_EQ(much.schedule.carrier, Carrier::messages);
    expect_has(much.reason, {"; in one kernel 21 ms"});  // 2 x 7/8 of 24 MB at 2 GB/s
    EXPECT_EQ(plan(spec, kLittle, late).schedule.carrier, Carrier::messages);
    EXPECT_NE(plan(spec, kMuch, late).schedule.carrier, Carrier::messages);
  }
  // If requested, peer memory is used in any case, and the reason gives the time of messages.
  const auto forced = plan("fp32:transport=lsa", kMuch, far);
  EXPECT_EQ(forced.schedule.carrier, Carrier::two_shot_kernel);
  expect_has(forced.reason,
             {"in two shots; 21 ms predicted", "by messages 2.16 ms"});  // 2 x 30 us, 42 MB at 20 GB/s

  const std::string nodes = "fp32:schedule=hierarchical,transport=auto";
  EXPECT_EQ(plan(nodes, kMuch, fast, 4).schedule.carrier, Carrier::node_windows);
  expect_has(plan(nodes, kMuch, fast, 4).reason,
             {"2 nodes of 4, inside which memory is read", "by messages"});
  EXPECT_EQ(plan(nodes, kMuch, far, 4).schedule.carrier, Carrier::messages);
  expect_has(plan(nodes, kMuch, far, 4).reason, {"with memory that is read inside nodes"});
  EXPECT_EQ(plan("fp32:transport=auto", kMuch, fast).schedule.rounds, two_shot(8).rounds);
}

TEST(TransportLsa, SendsMessagesAndGivesTheReasonWithoutPeerMemory) {
  const auto choice = choose(8, 1000, kBf16, "GPUs of several machines");
  EXPECT_EQ(choice.schedule.carrier, Carrier::messages);
  EXPECT_NE(choice.reason.find("not in one kernel: GPUs of several machines"), std::string::npos)
      << choice.reason;
}

// Blocks of all ranks on a device wait for each other.
TEST(PeerWindows, RanksOnASmallGpuHaveOnlyCoResidentBlocks) {
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

TEST(PeerWindows, RanksThatShareAGpuNeedEagerLoading) {
  const Device first = Device::cuda(0), second = Device::cuda(1), host = Device::host();
  expect_has(sharing_obstacle({first, second, second}, true),
             {"2 ranks share cuda:1", "CUDA_MODULE_LOADING=EAGER"});
  EXPECT_EQ(sharing_obstacle({first, second, second}, false), "");
  EXPECT_EQ(sharing_obstacle({first, second}, true), "");
  EXPECT_EQ(sharing_obstacle({host, host}, true), "");
}

}  // namespace
}  // namespace gradwire::testing
