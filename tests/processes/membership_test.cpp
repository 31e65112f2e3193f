// Tests how ranks find the store.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

#include "collectives/net/membership.h"
#include "tests/processes/processes.h"
#include "tests/processes/store_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/threads.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

void join_all(const std::string& rendezvous, int world) {
  std::atomic<int> joined{0};
  in_threads(world, [&](int i) {
    const int r = world - 1 - i;  // in descending order: the other ranks have to wait for rank 0
    if (r == 0) std::this_thread::sleep_for(30ms);
    Membership group({rendezvous, r, world, 20s});
    group.barrier();
    EXPECT_FALSE(group.address(in(20s)).empty());
    group.barrier();
    ++joined;
  });
  EXPECT_EQ(joined, world);
}

TEST(Membership, JoinsRepeatedlyThroughTcp) {
  std::string rendezvous = free_tcp_rendezvous();
  for (int i = 0; i < 3; ++i) join_all(rendezvous, 4);
}

TEST(Membership, JoinsThroughAFileAndDeletesIt) {
  std::string path = scratch_path("meet");
  // A crashed run may leave its file, which must not mislead new ranks.
  std::ofstream(path) << "gradwire-rendezvous-1\n0123456789abcdef 1 127.0.0.1\n";
  for (int i = 0; i < 3; ++i) join_all("file://" + path, 3);
  EXPECT_FALSE(std::ifstream(path).good());
}

TEST(Membership, BadInputNamesTheRemedy) {
  auto error = [](const std::string& rendezvous, int rank, int world) {
    return error_of([&] { Membership group({rendezvous, rank, world, 1s}); });
  };
  EXPECT_EQ(error("http://x:1", 0, 1),
            "rendezvous 'http://x:1': unknown kind; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host", 0, 1),
            "rendezvous 'tcp://host': no host and port; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host:99999", 0, 1),
            "rendezvous 'tcp://host:99999': '99999' is not a port; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host:80", 3, 2), "there is no rank 3 in a group of 2");
  expect_has(error("file:///no/such/folder/x", 0, 1), {"cannot be written"});
}

TEST(Membership, ReportsAMissingRankZeroAtTheDeadline) {
  std::string text = error_of([] { Membership group({free_tcp_rendezvous(), 1, 2, 200ms}); });
  expect_has(text, {"rank 1 did not reach rank 0 through tcp://127.0.0.1:", "Connection refused"});
}

TEST(Membership, BarrierReportsAMissingRank) {
  std::string text = error_of([] {
    Membership group({"file://" + scratch_path("alone"), 0, 2, 100ms});
    group.barrier();
  });
  expect_has(text, {"waiting for all ranks: nothing after"});
}

}  // namespace
}  // namespace gradwire::testing
