// The NCCL transport without a GPU: its calls to NCCL, and its errors.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "runtime/device/graph.h"
#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/collectives/program_runs.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/threads.h"

namespace gradwire {
namespace {

using testing::expect_error;
using testing::expect_has;
using testing::fake_nccl;
using testing::fake_setup;
using testing::FakeComm;
using testing::FakeWorld;
using testing::HostCalls;
using testing::no_errors;
using namespace std::chrono_literals;

// --- one rank per thread ---

struct NcclRank {
  std::unique_ptr<NcclTransport> transport;
  FakeComm* comm = nullptr;
  Stream stream = Stream::create(Device::host(), "test");
};

// Runs a body on every rank. Returns every rank's error, "" for none.
std::vector<std::string> run(int world, const std::function<NcclSetup(int)>& make,
                             const std::function<void(NcclRank&)>& body) {
  return testing::errors_in_threads(world, [&](int r) {
    NcclRank rank;
    NcclSetup s = make(r);
    rank.comm = &testing::fake(s.comm);
    rank.transport = std::make_unique<NcclTransport>(std::move(s));
    struct Drain {  // work in flight uses the transport
      Stream& stream;
      ~Drain() { stream.synchronize(); }
    } drain{rank.stream};
    body(rank);
  });
}
// With the same settings on every rank.
std::vector<std::string> run(FakeWorld& world, std::chrono::milliseconds timeout,
                             const std::function<void(NcclRank&)>& body) {
  return run(
      static_cast<int>(world.comms.size()), [&](int r) { return fake_setup(world[r], timeout); }, body);
}

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
  std::vector<float> data = testing::normal(count, 1000 + transport.rank()), residual(count, 0.0f);
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
    std::vector<Schedule> schedules = {ring(n), two_shot(n), double_tree(n)};
    if (n == 4) schedules.push_back(hierarchical(2, 2));
    for (const Schedule& schedule : schedules) {
      for (Wire wire : {kFp32, kBf16, kFp8}) {
        FakeWorld world(n);
        for (auto& c : world.comms) c->busy_after_group = 3;  // as when NCCL connects in the background
        std::vector<std::vector<float>> got(n), expected(n);
        auto errors = run(world, 20s, [&](NcclRank& r) {
          got[r.transport->rank()] = allreduced(*r.transport, schedule, wire);
        });
        EXPECT_EQ(errors, no_errors(n));
        testing::run_ranks(n, Device::host(), [&](Communicator& comm) {
          expected[comm.rank()] = allreduced(comm.transport(), schedule, wire);
        });
        EXPECT_EQ(got, expected) << n << " ranks, " << name(schedule.kind) << ", " << wire->name;
      }
    }
  }
}

// Every rank exchanges 4 bytes with every other, `steps` times.
void all_to_all(NcclRank& rank, int steps) {
  const int world = rank.transport->world(), me = rank.transport->rank();
  std::vector<int> in(world), out(world, me);
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == me) continue;
    transfers.push_back({Transfer::Kind::send, peer, &out[peer], 4});
    transfers.push_back({Transfer::Kind::receive, peer, &in[peer], 4});
  }
  for (int step = 0; step < steps; ++step) {
    rank.transport->exchange(rank.stream, transfers, {1, fmt::format("step {}", step)});
    rank.stream.synchronize();
    rank.transport->check();
    for (int peer = 0; peer < world; ++peer) {
      if (peer != me && in[peer] != peer) throw Error("wrong data passed check()");
    }
  }
}

TEST(Nccl, ReusesMarks) {
  FakeWorld world(2);
  std::vector<std::shared_ptr<HostCalls>> gpu = {std::make_shared<HostCalls>(),
                                                 std::make_shared<HostCalls>()};
  run(
      2,
      [&](int r) {
        NcclSetup s = fake_setup(world[r]);
        s.gpu = gpu[r];
        return s;
      },
      [](NcclRank& rank) {
        for (int i = 0; i < 40; ++i) {
          all_to_all(rank, 1);
          std::this_thread::sleep_for(5ms);  // lets the watching thread check in between
        }
      });
  EXPECT_LT(gpu[0]->made, 40);
}

TEST(Nccl, NamesASilentPeerAndAborts) {
  FakeWorld world(3);
  std::vector<std::thread::id> caller(3);
  auto errors = run(world, 1000ms, [&](NcclRank& rank) {
    caller[rank.transport->rank()] = std::this_thread::get_id();
    if (rank.transport->rank() == 1) {
      all_to_all(rank, 2);
      // Rank 1 is still computing; the others wait for its third exchange.
      while (world[0].aborted == 0 || world[2].aborted == 0) std::this_thread::sleep_for(1ms);
      return;
    }
    try {
      all_to_all(rank, 5);
    } catch (const CommError&) {
      EXPECT_THROW(rank.transport->barrier(), CommError) << "every later call fails";
      throw;
    }
  });
  EXPECT_EQ(errors[1], "");
  for (int r : {0, 2}) {
    expect_has(errors[r], {fmt::format("rank {}", r), "exchange 3", "step 2", "no progress for 1000 ms",
                           "2 receives (8 bytes) from ranks ", "1"});
    EXPECT_EQ(world[r].aborted, 1);
    EXPECT_NE(world[r].aborted_by.load(), caller[r]);
    EXPECT_EQ(world[r].destroyed, 0) << "abort has freed it";
  }
}

TEST(Nccl, NeitherAbortsNorDestroysAnAdoptedCommunicator) {
  FakeWorld world(2);
  auto errors = run(
      2,
      [&](int r) {
        NcclSetup s = fake_setup(world[r], 200ms);
        s.owned = false;
        return s;
      },
      [&](NcclRank& rank) {
        all_to_all(rank, 1);
        if (rank.transport->rank() == 1) return;
        char byte = 0;
        rank.transport->exchange(rank.stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "in vain"});
        while (true) {
          std::this_thread::sleep_for(5ms);
          try {
            rank.transport->check();
          } catch (const CommError&) {
            rank.comm->stop();  // as its owner does
            throw;
          }
        }
      });
  expect_has(errors[0], {"in vain", "no progress", "1 receive (1 bytes) from rank 1"});
  EXPECT_EQ(errors[1], "");
  for (int r : {0, 1}) EXPECT_EQ(world[r].aborted + world[r].destroyed + world[r].finalized, 0);
}

TEST(Nccl, AnErrorThatNcclReportsLaterFailsTheCommunicator) {
  FakeWorld world(2);
  auto errors = run(world, 20s, [&](NcclRank& rank) {
    if (rank.transport->rank() == 1) return;
    char byte = 0;
    rank.transport->exchange(rank.stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "a receive"});
    rank.comm->async = ncclRemoteError;
    rank.stream.synchronize();  // the abort ends it
    rank.transport->check();
  });
  expect_has(errors[0], {"a receive", "remote process exited"});
  EXPECT_EQ(world[0].aborted, 1);
}

TEST(Nccl, AnErrorInsideAGroupStillEndsTheGroup) {
  FakeWorld world(2);
  world[0].send_result = ncclInvalidArgument;
  NcclTransport transport(fake_setup(world[0]));
  Stream stream = Stream::create(Device::host(), "test");
  char byte = 0;
  expect_error<CommError>(
      [&] {
        transport.exchange(stream, {{Transfer::Kind::send, 1, &byte, 1}}, {1, "a send"});
      },
      {"a send", "fake error", "1 send (1 bytes) to rank 1"});
  EXPECT_EQ(testing::fake_group().depth, 0);
  EXPECT_EQ(transport.bytes_sent(), 0u);
}

TEST(Nccl, ConnectingHasADeadline) {
  FakeWorld world(2);
  world[0].busy_after_group = 1 << 30;  // a nonblocking communicator
  NcclTransport transport(fake_setup(world[0], 200ms));
  Stream stream = Stream::create(Device::host(), "test");
  char byte = 0;
  expect_error<CommError>(
      [&] {
        transport.exchange(stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "the first"});
      },
      {"the first", "no progress for 200 ms while connecting", "from rank 1"});
  world[0].busy = 0;
  stream.synchronize();
}

// NCCL waits for the peer inside the call. The watching thread ends it: by a revocation, so that the abort
// does not free memory in use by the call, or by the abort alone if NCCL does not support revocation.
TEST(Nccl, CallsThatBlockInsideNcclHaveADeadline) {
  for (const bool old : {false, true}) {
    for (const bool connected : {false, true}) {
      SCOPED_TRACE(fmt::format("old {}, connected {}", old, connected));
      NcclApi api = fake_nccl();
      if (old) api.revoke = nullptr;
      FakeWorld world(2);
      NcclSetup s = fake_setup(world[0], 300ms);
      s.api = &api;
      NcclTransport transport(std::move(s));
      Stream stream = Stream::create(Device::host(), "test");
      char byte = 0;
      const std::vector<Transfer> sends = {{Transfer::Kind::send, 1, &byte, 1}};
      if (connected) transport.exchange(stream, sends, {1, "the first"});
      world[0].stuck = true;
      expect_error<CommError>(
          [&] {
            transport.exchange(stream, sends, {2, "the stuck one"});
          },
          {"the stuck one", "no progress for 300 ms", connected ? "inside NCCL" : "connecting",
           "1 send (1 bytes) to rank 1"});
      while (world[0].aborted == 0) std::this_thread::sleep_for(1ms);
      EXPECT_EQ(world[0].revoked, old ? 0 : 1);
      EXPECT_THROW(transport.exchange(stream, sends, {3, "later"}), CommError);
      stream.synchronize();
    }
  }
}

// The host's work for an exchange between connected peers: one group and two marks. With a nonblocking
// communicator, NCCL creates a thread for each group, and the host must poll for its end.
TEST(Nccl, AnExchangeCostsOneGroupAndTwoMarks) {
  constexpr int kSteps = 50;
  for (const int busy : {0, 3}) {
    FakeWorld world(2);
    std::vector<int> asked(2), began(2);
    std::vector<std::shared_ptr<HostCalls>> gpu = {std::make_shared<HostCalls>(),
                                                   std::make_shared<HostCalls>()};
    std::atomic<int64_t> slept_us{0};
    std::array<std::atomic<bool>, 2> met{};  // before that, a rank may sleep until its peer connects
    auto errors = run(
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
          int before = 0;  // calls made by check()
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

// The number of groups of an allreduce of one bucket in one slice: two for a two-shot, one per round for a
// ring.
TEST(Nccl, AStepMakesOneGroupPerRound) {
  const int n = 8;
  for (const Schedule& schedule : {two_shot(n), ring(n)}) {
    FakeWorld world(n);
    auto errors = run(world, 20s, [&](NcclRank& rank) {
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
  auto errors = run(world, 500ms, [&](NcclRank& rank) {
    const int me = rank.transport->rank();
    int in = -1, out = me;
    const std::vector<Transfer> transfers = {{Transfer::Kind::send, 1 - me, &out, 4},
                                             {Transfer::Kind::receive, 1 - me, &in, 4}};
    const ExchangeLabel first{1, "the first"}, label{2, "the captured one"};
    rank.transport->exchange(rank.stream, transfers, first);
    rank.stream.synchronize();
    const Graph graph =
        Graph::capture(rank.stream, [&] { rank.transport->exchange(rank.stream, transfers, label); });
    for (int launch = 0; launch < 20; ++launch) {  // longer in total than the deadline
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
    graph.launch();  // one rank alone
    rank.stream.synchronize();
    rank.transport->check();
  });
  expect_has(errors[0], {"the captured one", "no progress for 500 ms", "1 receive (4 bytes) from rank 1"});
  EXPECT_EQ(errors[1], "");
}

TEST(Nccl, AbortEndsPendingExchangesWithItsReason) {
  FakeWorld world(2);
  NcclTransport transport(fake_setup(world[0]));
  Stream stream = Stream::create(Device::host(), "test");
  char byte = 0;
  transport.exchange(stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "pending"});
  transport.abort("the disk is full");
  stream.synchronize();
  expect_error<CommError>([&] { transport.check(); }, {"rank 0 gave up: the disk is full"});
}

TEST(Nccl, PartsOutliveTheirParentGroup) {
  FakeWorld world(5);
  auto errors = run(world, 1000ms, [&](NcclRank& rank) {
    // Odd ranks in descending order; even ranks except the last, which joins no part.
    const int r = rank.transport->rank();
    const std::vector<int> members = r == 4       ? std::vector<int>{}
                                     : r % 2 == 1 ? std::vector{3, 1}
                                                  : std::vector{0, 2};
    std::unique_ptr<Transport> part = rank.transport->split(members);
    all_to_all(rank, 1);  // the parent group works while its parts exist
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

TEST(Nccl, RejectsSplittingAFailedGroup) {
  FakeWorld world(2);
  NcclTransport transport(fake_setup(world[0]));
  transport.abort("the disk is full");
  expect_error<CommError>([&] { transport.split({0, 1}); }, {"the disk is full"});
}

// --- with a store ---

struct Store {
  NcclSetup setup_with(FakeComm& comm, std::chrono::milliseconds timeout) const {
    NcclSetup s = fake_setup(comm, timeout);
    s.group = std::make_unique<Membership>(
        GroupOptions{"file://" + folder.path("store"), comm.rank, comm.world, timeout});
    return s;
  }
  testing::TemporaryFolder folder;
};

TEST(Nccl, ReportsDifferingCallsBeforeAnyExchange) {
  FakeWorld world(3);
  Store store;
  auto errors = run(
      3, [&](int r) { return store.setup_with(world[r], 10s); },
      [&](NcclRank& rank) {
        const Call same{11, "allreduce of bucket 1"};
        const Call other{rank.transport->rank() == 1 ? 13u : 12u,
                         rank.transport->rank() == 1 ? "allreduce, bf16" : "allreduce, fp32"};
        rank.transport->begin_call(rank.stream, same);
        rank.transport->begin_call(rank.stream, same);
        rank.transport->begin_call(rank.stream, other);
      });
  for (int r : {1, 2}) expect_has(errors[r], {"ranks disagree", "call 3", "bf16"});
  expect_has(errors[1] + errors[2], {"fp32"});
  for (int r = 0; r < 3; ++r) EXPECT_EQ(world[r].groups, 0);
}

TEST(Nccl, EveryRankReportsTheFailedRank) {
  FakeWorld world(3);
  Store store;
  auto errors = run(
      3, [&](int r) { return store.setup_with(world[r], r == 0 ? 1000ms : 20s); },
      [&](NcclRank& rank) {
        rank.transport->barrier();
        if (rank.transport->rank() == 1) {
          all_to_all(rank, 1);
          while (true) {
            std::this_thread::sleep_for(1ms);
            rank.transport->check();
          }
        } else {
          all_to_all(rank, 2);
        }
      });
  expect_has(errors[0], {"exchange 2", "no progress for 1000 ms", "rank 1 is not in an exchange"});
  for (int r : {1, 2}) expect_has(errors[r], {"rank 0", "step 1", "no progress for 1000 ms"});
}

TEST(Nccl, ReportsAFailedJoin) {
  NcclApi api = fake_nccl();
  static FakeWorld one(1), slow(1);
  static std::atomic<bool> hang{false};
  api.init_rank = [](ncclComm_t* comm, int world, ncclUniqueId, int rank, ncclConfig_t* config) {
    EXPECT_EQ(config->blocking, 1);
    if (hang) {
      while (hang) std::this_thread::sleep_for(1ms);
      *comm = slow[0].handle();
      return ncclSuccess;
    }
    one[0].world = world;
    one[0].rank = rank;
    one[0].busy = 5;
    *comm = one[0].handle();
    return ncclInProgress;
  };
  const auto later = SteadyClock::now() + 10s;
  const auto gpu = std::make_shared<HostCalls>();
  ncclComm_t comm = init_nccl(api, gpu, 0, 2, {}, later);
  ASSERT_NE(comm, nullptr);
  testing::fake(comm).async = ncclRemoteError;
  EXPECT_THROW(init_nccl(api, gpu, 0, 2, {}, later), CommError);
  EXPECT_EQ(testing::fake(comm).aborted, 1);
  hang = true;  // NCCL waits for a rank that does not arrive
  expect_error<CommError>([&] { init_nccl(api, gpu, 0, 2, {}, SteadyClock::now() + 100ms); },
                          {"rank 0 of 2", "no progress until the deadline"});
  hang = false;  // the rank arrives after the deadline
  while (slow[0].aborted == 0) std::this_thread::sleep_for(1ms);
}

}  // namespace
}  // namespace gradwire
