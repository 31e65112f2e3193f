// The NCCL transport without a GPU: which NCCL functions it calls, the number of calls, and smaller groups.
// nccl_failures_test.cpp tests its errors.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "runtime/device/graph.h"
#include "tests/collectives/nccl_ranks.h"
#include "tests/collectives/program_runs.h"
#include "tests/support/expect.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

TEST(Nccl, AnExchangeIsOneGroupInTheOrderGiven) {
  FakeWorld world(3);
  char buffer[64] = {};
  const std::vector<Transfer> transfers = {{Transfer::Kind::send, 2, buffer, 4},
                                           {Transfer::Kind::receive, 1, buffer + 8, 16},
                                           {Transfer::Kind::send, 1, buffer, 0},
                                           {Transfer::Kind::send, 2, buffer + 4, 2},
                                           {Transfer::Kind::receive, 1, buffer + 32, 1}};
  world[0].send_result = ncclSuccess;
  {
    NcclTransport transport(fake_setup(world[0]));
    Stream stream = Stream::create(Device::host(), "test");
    transport.exchange(stream, transfers, {1, "mixed"});
    transport.exchange(stream, {}, {1, "nothing"});
    EXPECT_EQ(world[0].log, " s2:4 r1:16 s2:2 r1:1");
    EXPECT_EQ(world[0].groups, 1);
    EXPECT_EQ(transport.bytes_sent(), 6u);
    EXPECT_THROW(transport.exchange(stream, {{Transfer::Kind::send, 0, buffer, 1}}, {1, "self"}), BadInput);
    EXPECT_THROW(transport.exchange(stream, {{Transfer::Kind::send, 3, buffer, 1}}, {1, "out"}), BadInput);
    world[0].stop();  // no rank sends
    stream.synchronize();
  }
  EXPECT_EQ(world[0].finalized, 1);
  EXPECT_EQ(world[0].destroyed, 1);
  EXPECT_EQ(world[0].aborted, 0);
}

std::vector<float> allreduced(Transport& transport, const Schedule& schedule, Wire wire) {
  const int64_t count = 1027;
  std::vector<float> data = normal(count, 1000 + transport.rank()), residual(count, 0.0f);
  Stream stream = Stream::create(Device::host(), "test"), transfers = Stream::create(Device::host(), "move");
  Program program(transport, schedule, {data.data(), data.data(), residual.data(), count},
                  {.what = "test", .wire = wire, .transfers = transfers, .slice_bytes = 512});
  Buffer workspace(Device::host(), program.workspace_bytes());
  program.bind(workspace.data());
  for (int step = 0; step < 3; ++step) program.run(stream);
  stream.synchronize();
  transfers.synchronize();
  transport.check();
  data.insert(data.end(), residual.begin(), residual.end());
  return data;
}

TEST(Nccl, SchedulesAndWiresGiveTheSameBitsAsThreads) {
  for (int n : {2, 3, 4}) {
    for (const Schedule& schedule : allreduces(n)) {
      for (Wire wire : {kFp32, kBf16, wire_format("fp8")}) {
        FakeWorld world(n);
        // NCCL is busy like this while connecting in the background
        for (auto& c : world.comms) c->busy_after_group = 3;
        std::vector<std::vector<float>> got(n), expected(n);
        auto errors = run_nccl(world, 20s, [&](NcclRank& r) {
          got[r.transport->rank()] = allreduced(*r.transport, schedule, wire);
        });
        EXPECT_EQ(errors, no_errors(n));
        run_ranks(n, Device::host(), [&](Communicator& comm) {
          expected[comm.rank()] = allreduced(comm.transport(), schedule, wire);
        });
        EXPECT_EQ(got, expected) << n << " ranks, " << name(schedule.kind) << ", " << wire->name;
      }
    }
  }
}

TEST(Nccl, ReusesMarks) {
  FakeWorld world(2);
  std::vector<std::shared_ptr<HostCalls>> gpu = {std::make_shared<HostCalls>(),
                                                 std::make_shared<HostCalls>()};
  run_nccl(
      2,
      [&](int r) {
        NcclSetup s = fake_setup(world[r]);
        s.gpu = gpu[r];
        return s;
      },
      [](NcclRank& rank) {
        for (int i = 0; i < 40; ++i) {
          all_to_all(rank, 1);
          std::this_thread::sleep_for(5ms);  // lets the watching thread check between exchanges
        }
      });
  EXPECT_LT(gpu[0]->made, 40);
}

// Checks the host's work for an exchange between connected peers: one group and two marks. With a nonblocking
// communicator, NCCL creates a thread for each group, and the host must poll until the group ends.
TEST(Nccl, AnExchangeCostsOneGroupAndTwoMarks) {
  constexpr int kSteps = 50;
  for (const int busy : {0, 3}) {
    FakeWorld world(2);
    std::vector<int> asked(2), began(2);
    std::vector<std::shared_ptr<HostCalls>> gpu = {std::make_shared<HostCalls>(),
                                                   std::make_shared<HostCalls>()};
    std::atomic<int64_t> slept_us{0};
    std::array<std::atomic<bool>, 2> met{};  // [rank]: connected; until then, a rank may sleep
    auto errors = run_nccl(
        2,
        [&](int r) {
          NcclSetup s = fake_setup(world[r]);
          s.gpu = gpu[r];
          s.pause = [&slept_us, &met, r](std::chrono::microseconds time) {
            if (met[r]) slept_us += time.count();
          };
          world[r].busy_after_group = busy;
          return s;
        },
        [&](NcclRank& rank) {
          const int me = rank.transport->rank();
          all_to_all(rank, 1);
          EXPECT_EQ(world[me].groups, 1);
          began[me] = gpu[me]->threads;
          int before = 0;  // number of calls that check() made before the exchange
          {
            std::lock_guard lock(world[me].wire->mutex);
            before = world[me].asked[std::this_thread::get_id()];
          }
          std::vector<int> in(1), out(1);
          const std::vector<Transfer> transfers = {{Transfer::Kind::send, 1 - me, out.data(), 4},
                                                   {Transfer::Kind::receive, 1 - me, in.data(), 4}};
          met[me] = true;
          for (int step = 0; step < kSteps; ++step)
            rank.transport->exchange(rank.stream, transfers, {1, "a step"});
          met[me] = false;
          {
            std::lock_guard lock(world[me].wire->mutex);
            asked[me] = world[me].asked[std::this_thread::get_id()] - before;
          }
          rank.stream.synchronize();
        });
    for (int r : {0, 1}) {
      EXPECT_EQ(errors[r], "");
      EXPECT_EQ(world[r].groups, kSteps + 1);
      EXPECT_EQ(world[r].sends, kSteps + 1);
      EXPECT_EQ(world[r].receives, kSteps + 1);
      EXPECT_EQ(world[r].threads, busy > 0 ? kSteps + 1 : 0);
      EXPECT_EQ(asked[r], busy * kSteps + (busy > 0 ? kSteps : 0));
      EXPECT_LE(began[r], 2) << "the watching thread, and one to connect to the peer";
      EXPECT_LE(gpu[r]->threads, began[r] + 2) << "only the watching thread, and one to finalize";
    }
    if (busy == 0) {
      EXPECT_EQ(slept_us, 0);
    }
  }
}

// Checks the number of groups of an allreduce of one bucket in one slice: two groups for a two-shot, one
// group per round for a ring.
TEST(Nccl, AStepMakesOneGroupPerRound) {
  const int n = 8;
  for (const Schedule& schedule : {two_shot(n), ring(n)}) {
    FakeWorld world(n);
    auto errors = run_nccl(world, 20s, [&](NcclRank& rank) {
      const int64_t count = 1024;
      std::vector<float> data(count, 1.0f);
      Program program(*rank.transport, schedule, {data.data(), data.data(), nullptr, count},
                      {.what = "test", .wire = kBf16});
      Buffer workspace(Device::host(), program.workspace_bytes());
      program.bind(workspace.data());
      for (int step = 0; step < 3; ++step) program.run(rank.stream);
      rank.stream.synchronize();
    });
    const bool ring = schedule.kind == ScheduleKind::ring;
    for (int r = 0; r < n; ++r) {
      EXPECT_EQ(errors[r], "");
      EXPECT_EQ(world[r].groups, 3 * (ring ? 2 * (n - 1) : 2));
      EXPECT_EQ(world[r].sends, 3 * 2 * (n - 1));
      EXPECT_EQ(world[r].receives, 3 * 2 * (n - 1));
      EXPECT_EQ(world[r].threads, 0);
    }
  }
}

TEST(Nccl, WatchesACapturedExchangeInEachLaunch) {
  FakeWorld world(2);
  auto errors = run_nccl(world, 500ms, [&](NcclRank& rank) {
    const int me = rank.transport->rank();
    int in = -1, out = me;
    const std::vector<Transfer> transfers = {{Transfer::Kind::send, 1 - me, &out, 4},
                                             {Transfer::Kind::receive, 1 - me, &in, 4}};
    const ExchangeLabel first{1, "the first"}, label{2, "the captured one"};
    rank.transport->exchange(rank.stream, transfers, first);
    rank.stream.synchronize();
    const Graph graph =
        Graph::capture(rank.stream, [&] { rank.transport->exchange(rank.stream, transfers, label); });
    for (int launch = 0; launch < 20; ++launch) {  // all launches together take longer than the deadline
      in = -1;
      graph.launch();
      rank.stream.synchronize();
      rank.transport->check();
      EXPECT_EQ(in, 1 - me);
      std::this_thread::sleep_for(30ms);
    }
    if (me == 1) {
      while (world[0].aborted == 0) std::this_thread::sleep_for(1ms);
      return;
    }
    graph.launch();  // the other rank does not launch its graph
    rank.stream.synchronize();
    rank.transport->check();
  });
  expect_has(errors[0], {"the captured one", "no progress for 500 ms", "1 receive (4 bytes) from rank 1"});
  EXPECT_EQ(errors[1], "");
}

TEST(Nccl, PartsOutliveTheirParentGroup) {
  FakeWorld world(5);
  auto errors = run_nccl(world, 1000ms, [&](NcclRank& rank) {
    // The odd ranks form a part in descending order. The even ranks form another part, except the last rank,
    // which joins no part.
    const int r = rank.transport->rank();
    const std::vector<int> members = r == 4       ? std::vector<int>{}
                                     : r % 2 == 1 ? std::vector{3, 1}
                                                  : std::vector{0, 2};
    std::unique_ptr<Transport> part = rank.transport->split(members);
    all_to_all(rank, 1);  // the parent group still works while its parts exist
    EXPECT_EQ(part == nullptr, r == 4);
    if (part == nullptr) return;
    NcclRank mine;
    mine.transport.reset(dynamic_cast<NcclTransport*>(part.release()));
    EXPECT_EQ(mine.transport->world(), 2);
    EXPECT_EQ(mine.transport->rank(), members[0] == r ? 0 : 1);
    rank.transport.reset();
    all_to_all(mine, 2);
    mine.transport->barrier();
  });
  EXPECT_EQ(errors, no_errors(5));
}

}  // namespace
}  // namespace gradwire::testing
