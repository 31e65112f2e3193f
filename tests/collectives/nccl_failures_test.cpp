// The NCCL transport without a GPU: silent peers, stuck calls, aborts, and failures reported by other ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/collectives/nccl_ranks.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

TEST(NcclFailures, NamesASilentPeerAndAborts) {
  FakeWorld world(3);
  std::vector<std::thread::id> caller(3);
  auto errors = run_nccl(world, 1000ms, [&](NcclRank& rank) {
    caller[rank.transport->rank()] = std::this_thread::get_id();
    if (rank.transport->rank() == 1) {
      all_to_all(rank, 2);
      // Rank 1 is still computing while the other ranks wait for rank 1's third exchange.
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

TEST(NcclFailures, NeitherAbortsNorDestroysAnAdoptedCommunicator) {
  FakeWorld world(2);
  auto errors = run_nccl(
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
            rank.comm->stop();  // the communicator's owner would stop it
            throw;
          }
        }
      });
  expect_has(errors[0], {"in vain", "no progress", "1 receive (1 bytes) from rank 1"});
  EXPECT_EQ(errors[1], "");
  for (int r : {0, 1}) EXPECT_EQ(world[r].aborted + world[r].destroyed + world[r].finalized, 0);
}

TEST(NcclFailures, AnErrorThatNcclReportsLaterFailsTheCommunicator) {
  FakeWorld world(2);
  auto errors = run_nccl(world, 20s, [&](NcclRank& rank) {
    if (rank.transport->rank() == 1) return;
    char byte = 0;
    rank.transport->exchange(rank.stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "a receive"});
    rank.comm->async = ncclRemoteError;
    rank.stream.synchronize();  // the abort ends the receive
    rank.transport->check();
  });
  expect_has(errors[0], {"a receive", "remote process exited"});
  EXPECT_EQ(world[0].aborted, 1);
}

TEST(NcclFailures, AnErrorInsideAGroupStillEndsTheGroup) {
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
  EXPECT_EQ(fake_group().depth, 0);
  EXPECT_EQ(transport.bytes_sent(), 0u);
}

TEST(NcclFailures, ConnectingHasADeadline) {
  FakeWorld world(2);
  world[0].busy_after_group = 1 << 30;  // makes the communicator nonblocking and always busy
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

// Tests calls in which NCCL waits for a peer. The watching thread ends such a call by a revocation, so that
// the abort does not free memory in use by the call. If NCCL does not support revocation, the thread ends the
// call by the abort alone.
TEST(NcclFailures, CallsThatBlockInsideNcclHaveADeadline) {
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

TEST(NcclFailures, AbortEndsPendingExchangesWithItsReason) {
  FakeWorld world(2);
  NcclTransport transport(fake_setup(world[0]));
  Stream stream = Stream::create(Device::host(), "test");
  char byte = 0;
  transport.exchange(stream, {{Transfer::Kind::receive, 1, &byte, 1}}, {1, "pending"});
  transport.abort("the disk is full");
  stream.synchronize();
  expect_error<CommError>([&] { transport.check(); }, {"rank 0 gave up: the disk is full"});
}

TEST(NcclFailures, RejectsSplittingAFailedGroup) {
  FakeWorld world(2);
  NcclTransport transport(fake_setup(world[0]));
  transport.abort("the disk is full");
  expect_error<CommError>([&] { transport.split({0, 1}); }, {"the disk is full"});
}

struct Store {
  NcclSetup setup_with(FakeComm& comm, std::chrono::milliseconds timeout) const {
    NcclSetup s = fake_setup(comm, timeout);
    s.group = std::make_unique<Membership>(
        GroupOptions{"file://" + folder.path("store"), comm.rank, comm.world, timeout});
    return s;
  }
  TemporaryFolder folder;
};

TEST(NcclFailures, ReportsDifferingCallsBeforeAnyExchange) {
  FakeWorld world(3);
  Store store;
  auto errors = run_nccl(
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

TEST(NcclFailures, EveryRankReportsTheFailedRank) {
  FakeWorld world(3);
  Store store;
  auto errors = run_nccl(
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

TEST(NcclFailures, ReportsAFailedJoin) {
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
  fake(comm).async = ncclRemoteError;
  EXPECT_THROW(init_nccl(api, gpu, 0, 2, {}, later), CommError);
  EXPECT_EQ(fake(comm).aborted, 1);
  hang = true;  // NCCL waits for a rank that does not arrive
  expect_error<CommError>([&] { init_nccl(api, gpu, 0, 2, {}, SteadyClock::now() + 100ms); },
                          {"rank 0 of 2", "no progress until the deadline"});
  hang = false;  // the rank arrives after the deadline
  while (slow[0].aborted == 0) std::this_thread::sleep_for(1ms);
}

}  // namespace
}  // namespace gradwire::testing
