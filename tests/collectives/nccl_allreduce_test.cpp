// schedule=nccl without a GPU. Additions between threads (fake_nccl.h) replace NCCL's allreduce. Tests the
// transport's calls and counts, which groups may use NCCL's allreduce, and what happens when a rank does not
// arrive.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "collectives/communicator/communicator.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/collectives/program_runs.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/expect.h"
#include "tests/support/threads.h"

namespace gradwire::testing {
namespace {

// Runs a body on every rank over the fake NCCL. Returns every rank's error, or "" for success.
std::vector<std::string> over_nccl(FakeWorld& world, std::chrono::milliseconds timeout,
                                   const std::function<void(Communicator&)>& body) {
  return errors_in_threads(static_cast<int>(world.comms.size()), [&](int rank) {
    Communicator comm(std::make_unique<NcclTransport>(fake_setup(world[rank], timeout)));
    body(comm);
  });
}

double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double off = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    off += (a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
    size += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(off / size);
}

// Runs three allreduces, each on the previous result. Returns the last result.
std::vector<float> allreduced(Communicator& comm, const Schedule& schedule, float scale, bool transfers) {
  const int64_t count = 1027;
  std::vector<float> data = normal(count, 1000 + comm.rank());
  const Stream stream = Stream::create(Device::host(), "test");
  Program program(comm.transport(), schedule, {data.data(), data.data(), nullptr, count},
                  {.what = "test",
                   .scale = scale,
                   .transfers = transfers ? comm.transfers() : Stream(),
                   .beside_others = transfers,
                   .slice_bytes = 512});
  Buffer workspace(Device::host(), program.workspace_bytes());
  program.bind(workspace.data());
  const uint64_t before = comm.bytes_sent();
  for (int step = 0; step < 3; ++step) program.run(stream);
  stream.synchronize();
  comm.check();
  EXPECT_EQ(comm.bytes_sent() - before, static_cast<uint64_t>(3 * program.info().bytes_sent));
  if (schedule.kind == ScheduleKind::nccl) {
    EXPECT_EQ(program.info().schedule, "nccl");
    EXPECT_EQ(program.info().bytes_sent, 4 * elements_sent(ring(comm.world()), comm.rank(), count));
    EXPECT_EQ(program.info().slices, 1);
  }
  return data;
}

TEST(NcclAllreduce, IsOneCallWithTheSameSumOnAllRanks) {
  for (int n : {2, 3, 5, 8}) {
    for (const float scale : {1.0f, 1.0f / static_cast<float>(n), 0.3f}) {
      for (bool transfers : {false, true}) {
        SCOPED_TRACE(fmt::format("{} ranks, scale {}, transfers {}", n, scale, transfers));
        FakeWorld world(n);
        std::vector<std::vector<float>> got(n), expected(n);
        EXPECT_EQ(over_nccl(world, 20s,
                            [&](Communicator& comm) {
                              got[comm.rank()] = allreduced(comm, nccl_allreduce(n), scale, transfers);
                            }),
                  no_errors(n));
        for (int r = 0; r < n; ++r) {
          EXPECT_EQ(world[r].all_reduces, 3);
          EXPECT_EQ(world[r].groups, 0);
          EXPECT_TRUE(same_bits(got[r], got[0])) << "rank " << r;
        }
        run_ranks(n, Device::host(), [&](Communicator& comm) {
          expected[comm.rank()] = allreduced(comm, two_shot(n), scale, transfers);
        });
        EXPECT_LT(relative_distance(got[0], expected[0]), 1e-6);
      }
    }
  }
}

TEST(NcclAllreduce, AddsBf16BuffersInFp32) {
  FakeWorld world(3);
  EXPECT_EQ(over_nccl(world, 20s,
                      [](Communicator& comm) {
                        const Stream stream = Stream::create(Device::host(), "test");
                        std::vector<uint16_t> data(999, 0x3f80);  // each element is 1
                        Program program(
                            comm.transport(), nccl_allreduce(3),
                            {.in = data.data(), .out = data.data(), .count = 999, .dtype = DType::bf16},
                            {.what = "test"});
                        run_once(program, stream);
                        EXPECT_EQ(data, std::vector<uint16_t>(999, 0x4040));  // each element is 3
                      }),
            no_errors(3));
}

// Tests codecs with FP32 sums: the bucket itself, PowerSGD's P and Q, random-k's values. None of these codecs
// sends a message.
TEST(NcclAllreduce, ReducersHaveTheSameAverageOnAllRanks) {
  const std::vector<std::pair<std::string, int>> specs = {{"fp32:schedule=nccl", 1},
                                                          {"powersgd:rank=2,schedule=nccl", 2},
                                                          {"powersgd:rank=2,alternate=on,schedule=nccl", 1},
                                                          {"randk:ratio=0.1,schedule=nccl", 1}};
  for (const auto& [spec, calls] : specs) {
    SCOPED_TRACE(spec);
    constexpr int kWorld = 3, kSteps = 4;
    FakeWorld world(kWorld);
    std::vector<std::vector<float>> got(kWorld), expected(kWorld);
    std::vector<int> buckets(kWorld);
    const auto train = [](Communicator& comm, const std::string& text, int* count) {
      Rank rank(comm, text, model(), 4096, 0);
      std::vector<float> last;
      for (int step = 0; step < kSteps; ++step) {
        std::vector<std::vector<float>> gradients;
        for (const GradientTensor& t : model()) {
          gradients.push_back(normal(count_of(t), 100 * step + 10 * comm.rank() + 1));
        }
        last = rank.step(gradients);
      }
      comm.check();
      if (count != nullptr) *count = rank.reducer.buckets();
      EXPECT_EQ(rank.reducer.schedule(), text.find("nccl") != std::string::npos ? "nccl" : "two_shot");
      return last;
    };
    EXPECT_EQ(
        over_nccl(world, 20s,
                  [&](Communicator& comm) { got[comm.rank()] = train(comm, spec, &buckets[comm.rank()]); }),
        no_errors(kWorld));
    std::string other = spec;
    other.replace(other.find("nccl"), 4, "two_shot");
    run_ranks(kWorld, Device::host(),
              [&](Communicator& comm) { expected[comm.rank()] = train(comm, other, nullptr); });
    for (int r = 0; r < kWorld; ++r) {
      EXPECT_TRUE(same_bits(got[r], got[0])) << "rank " << r;
      EXPECT_EQ(world[r].groups, 0);
      EXPECT_GE(world[r].all_reduces, kSteps * calls);
      EXPECT_LE(world[r].all_reduces, kSteps * 3 * buckets[r]);  // PowerSGD may send Q in two halves
    }
    EXPECT_LT(relative_distance(got[0], expected[0]), 1e-4);
  }
}

TEST(NcclAllreduce, ReportsAMissingRankAtTheDeadline) {
  for (bool connected : {false, true}) {
    for (bool stuck : {false, true}) {
      SCOPED_TRACE(fmt::format("connected {}, stuck in NCCL {}", connected, stuck));
      FakeWorld world(3);
      const auto errors = over_nccl(world, 300ms, [&](Communicator& comm) {
        const Stream stream = Stream::create(Device::host(), "test");
        std::vector<float> data(100, 1.0f);
        Program program(comm.transport(), nccl_allreduce(3), {data.data(), data.data(), nullptr, 100},
                        {.what = "gradients"});
        program.bind(nullptr);
        if (connected) {
          program.run(stream);
          stream.synchronize();
        }
        if (comm.rank() == 1) {
          while (world[0].aborted == 0 || world[2].aborted == 0) std::this_thread::sleep_for(1ms);
          return;
        }
        world[comm.rank()].stuck = stuck;
        program.run(stream);
        stream.synchronize();
        comm.check();
        ADD_FAILURE() << "rank " << comm.rank() << " did not learn of the failure";
      });
      EXPECT_EQ(errors[1], "");
      for (int r : {0, 2}) {
        expect_has(errors[r], {fmt::format("rank {}", r), "allreduce of gradients", "no progress for 300 ms",
                               "2 receives (", "bytes) from ranks "});
      }
    }
  }
}

TEST(NcclAllreduce, UnsupportedUsesAreRejectedWithTheRemedy) {
  run_ranks(2, Device::host(), [](Communicator& comm) {
    float data[8] = {};
    expect_error<BadInput>(
        [&] {
          Program(comm.transport(), nccl_allreduce(2), {data, data, nullptr, 8}, {.what = "gradients"});
        },
        {"gradients", "schedule=nccl", "over the local transport", "torchrun", "schedule=auto"});
    expect_error<BadInput>(
        [&] {
          Reducer(comm, CompressionSpec::parse("fp32:schedule=nccl"), {{"a", {8}}}, {});
        },
        {"bucket 1 of 1", "schedule=nccl", "over the local transport"});
    expect_error<BadInput>(
        [&] {
          Reducer(comm, CompressionSpec::parse("fp32:schedule=nccl"), {{"a", {8}}}, {.sharded = true});
        },
        {"schedule=nccl is NCCL's allreduce", "reduce-scatter", "schedule=auto"});
  });
  FakeWorld two(2);
  NcclTransport transport(fake_setup(two[0]));
  float data[8] = {};
  expect_error<BadInput>(
      [&] {
        Program(transport, nccl_allreduce(2), {data, data, nullptr, 8}, {.what = "gradients", .wire = kBf16});
      },
      {"gradients", "schedule=nccl adds FP32, not bf16"});
}

// --- the planner ---

constexpr int64_t kLittle = 1000, kMuch = 25'000'000 / 4;

LinkCosts costs_with(LinkCosts::Pattern library) {
  LinkCosts costs;
  costs.neighbour = costs.all_pairs = costs.intra_node = costs.inter_node = {50, 1000};
  costs.measured = costs.library_measured = true;
  costs.library = library;
  return costs;
}

SchedulePlanner::Choice choose(const std::string& spec, int world, const LinkCosts& costs, int64_t count,
                               Wire wire) {
  return SchedulePlanner(CompressionSpec::parse(spec), Collective::allreduce, world, 0, costs, kSliceBytes)
      .choose(count, wire);
}

TEST(NcclAllreduce, AutoChoosesItWhenMeasuredMuchFaster) {
  const LinkCosts fast = costs_with({20, 5000});
  const auto choice = choose("fp32", 4, fast, kMuch, kFp32);
  EXPECT_EQ(choice.schedule.kind, ScheduleKind::nccl);
  EXPECT_NEAR(choice.predicted_us, 20 + 1.5 * 25e6 / 5000, 1);
  expect_has(choice.reason, {"fastest: 7.52 ms predicted", "two_shot 37"});
  EXPECT_EQ(choose("powersgd:rank=4", 4, fast, kMuch, kFp32).schedule.kind, ScheduleKind::nccl);
  EXPECT_EQ(choose("bf16", 4, fast, kMuch, kBf16).schedule.kind, ScheduleKind::two_shot);
  EXPECT_EQ(choose("fp32", 2, fast, kMuch, kFp32).schedule.kind, ScheduleKind::two_shot);
  // Within 20 %, the planner chooses the schedule that adds in rank order.
  EXPECT_EQ(choose("fp32", 4, costs_with({90, 1100}), kMuch, kFp32).schedule.kind, ScheduleKind::two_shot);
  // These links have a high latency and a high bandwidth.
  const LinkCosts late = costs_with({500, 5000});
  EXPECT_EQ(choose("fp32", 4, late, kLittle, kFp32).schedule.kind, ScheduleKind::two_shot);
  EXPECT_EQ(choose("fp32", 4, late, kMuch, kFp32).schedule.kind, ScheduleKind::nccl);
  LinkCosts unknown = fast;
  unknown.library_measured = false;
  EXPECT_EQ(choose("fp32", 4, unknown, kMuch, kFp32).schedule.kind, ScheduleKind::two_shot);

  for (Collective half : {Collective::reduce_scatter, Collective::all_gather, Collective::broadcast}) {
    EXPECT_NE(
        SchedulePlanner(CompressionSpec(), half, 4, 0, fast, kSliceBytes).choose(kMuch, kFp32).schedule.kind,
        ScheduleKind::nccl);
    EXPECT_THROW(SchedulePlanner(CompressionSpec::parse("fp32:schedule=nccl"), half, 4, 0, fast, kSliceBytes),
                 BadInput);
  }
}

// Compares predictions with numbers published for 8x H200 and NCCL 2.27.7: a bus bandwidth of 219.89 GB/s at
// 16 MiB and of 463.58 GB/s at 1 GiB.
TEST(NcclAllreduce, PredictsItFromPublishedNumbersIfUnmeasured) {
  for (const auto& [bytes, gb_per_s, off] :
       {std::tuple{16e6 * 1.048576, 219.89, 0.3}, std::tuple{1073.741824e6, 463.58, 0.05}}) {
    const double published_us = 1.75 * bytes / gb_per_s / 1e3;
    const auto choice = choose("fp32:schedule=nccl", 8, {}, static_cast<int64_t>(bytes / 4), kFp32);
    EXPECT_NEAR(choice.predicted_us / published_us, 1, off);
    EXPECT_EQ(choice.reason, "requested");
  }
}

TEST(NcclAllreduce, MeasuresItsCostWithTheLinks) {
  FakeWorld world(3);
  std::vector<LinkCosts> costs(3);
  EXPECT_EQ(over_nccl(world, 20s,
                      [&](Communicator& comm) {
                        const Stream stream = Stream::create(Device::host(), "test");
                        costs[comm.rank()] = comm.link_costs(stream, ScheduleKind::automatic);
                      }),
            no_errors(3));
  for (const LinkCosts& c : costs) {
    EXPECT_EQ(c, costs[0]);
    EXPECT_TRUE(c.library_measured);
    EXPECT_GT(c.library.latency_us, 0);
    EXPECT_GT(c.library.bytes_per_us, 0);
  }
  EXPECT_GT(world[0].all_reduces, 0);
  expect_has(costs[0].to_string(), {"NCCL's allreduce"});
  // Costs measured over NCCL, for example from a checkpoint, do not apply to another transport.
  auto alone = Communicator::create_single(Device::host());
  alone->set_link_costs(costs[0]);
  EXPECT_FALSE(alone->link_costs(Stream::immediate_host(), ScheduleKind::automatic).library_measured);
}

}  // namespace
}  // namespace gradwire::testing
