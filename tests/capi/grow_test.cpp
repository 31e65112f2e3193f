// Tests gw_comm_grow() with ranks as threads: new ranks join a communicator between two of its calls. In
// tests/processes/grow_test.cpp ranks are processes that die while they join.
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/capi/states.h"
#include "tests/support/temporary_folder.h"

namespace {

using gradwire::testing::TemporaryFolder;

gw_comm created(const std::string& name, int rank, int world) {
  gw_comm comm = nullptr;
  auto options = capi::comm_options(name.c_str(), rank, world);
  options.shrinkable = 1;
  GW_EXPECT_OK(gw_comm_create(&options, &comm));
  return comm;
}

std::string invitation_of(gw_comm comm) {
  const char* const text = capi::query(comm).invitation;
  EXPECT_EQ(text, capi::query(comm).invitation) << "valid until the communicator is destroyed";
  return text;
}

gw_status join(const std::string& invitation, int64_t timeout_ms, gw_comm* comm,
               const char* secret = nullptr) {
  auto options = capi::comm_options(nullptr, 0, 0, GW_HOST, timeout_ms);
  options.invitation = invitation.c_str();
  options.secret = secret;
  return gw_comm_create(&options, comm);
}

// Calls broadcasts until a joiner is waiting. Returns the grown communicator.
gw_comm grown(gw_comm comm, int rank) {
  gw_comm next = nullptr;
  for (int call = 0; next == nullptr && call < 4000; ++call) {
    const int32_t joiners = capi::query(comm).joiners;
    EXPECT_TRUE(joiners == 0 || rank == 0);
    float told = static_cast<float>(joiners);
    GW_EXPECT_OK(gw_broadcast(comm, &told, 1, GW_FLOAT32, 0, "fp32", nullptr, nullptr));
    if (told > 0) {
      GW_EXPECT_OK(gw_comm_grow(comm, &next));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  EXPECT_NE(next, nullptr);
  return next;
}

void expect_sum(gw_comm comm, int rank, float sum) {
  EXPECT_EQ(capi::sum_of(comm, static_cast<float>(rank)), sum);
  const capi::Model model;
  const capi::Reducer reducer(comm, "powersgd,rank=2", model);
  std::vector<float> gradients(model.elements(), static_cast<float>(rank));
  GW_EXPECT_OK(reducer.step(gradients));
}

// Grows a group from two ranks to three, then to four. The group that admits the last joiner includes a
// former joiner.
TEST(CApiGrow, JoinersTakePartInLaterCalls) {
  const TemporaryFolder folder;
  const std::string name = "file://" + folder.path("meet");
  std::promise<std::string> first, second;
  std::shared_future<std::string> to_first = first.get_future(), to_second = second.get_future();
  capi::in_threads(4, [&](int rank) {
    gw_comm comm = nullptr;
    if (rank < 2) {
      comm = created(name, rank, 2);
      GW_EXPECT_OK(gw_comm_admit(comm, 4));
      float all_have = 0;  // waits until rank 0 admits joiners, because rank 0 rejects earlier requests
      GW_EXPECT_OK(capi::sum(comm, all_have));
      if (rank == 1) first.set_value(invitation_of(comm));
    } else {
      GW_ASSERT_OK(join((rank == 2 ? to_first : to_second).get(), 60'000, &comm));
    }
    for (int world = rank < 2 ? 2 : rank + 1; world <= 4; ++world) {
      const gw_comm_info info = capi::query(comm);
      EXPECT_EQ(info.rank, rank);
      EXPECT_EQ(info.world, world);
      expect_sum(comm, rank, static_cast<float>(world * (world - 1) / 2));
      if (world == 4) break;
      if (world == 3 && rank == 2) second.set_value(invitation_of(comm));
      gw_comm next = grown(comm, rank);
      GW_EXPECT_OK(gw_comm_destroy(comm));
      comm = next;
    }
    // Rank 0 leaves, and the group shrinks. The last joiner continues with the other ranks.
    if (rank > 0) {
      std::vector<float> data(10);
      EXPECT_EQ(capi::sum(comm, data), GW_COMM_FAILED);
      gw_comm rest = nullptr;
      int32_t ranks[4] = {};
      GW_ASSERT_OK(gw_comm_shrink(comm, 20'000, nullptr, &rest, ranks, 4));
      EXPECT_EQ(ranks[2], 3);
      expect_sum(rest, rank, 6);
      GW_EXPECT_OK(gw_comm_destroy(rest));
    }
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

TEST(CApiGrow, TellsRejectedJoinersTheReason) {
  const TemporaryFolder folder;
  gw_comm alone = nullptr, comm = nullptr;
  std::thread other([&] { alone = created("file://" + folder.path("meet"), 1, 2); });
  gw_comm rank0 = created("file://" + folder.path("meet"), 0, 2);
  other.join();
  const std::string invitation = invitation_of(rank0);
  GW_EXPECT_BAD("takes no new ranks", join(invitation, 5000, &comm));
  GW_EXPECT_OK(gw_comm_admit(rank0, 2));
  GW_EXPECT_BAD("there are 2 ranks, and at most 2 are allowed", join(invitation, 5000, &comm));
  GW_EXPECT_OK(gw_comm_admit(rank0, 3));
  GW_EXPECT_FAILS(GW_COMM_FAILED, "keeps this process waiting and has not admitted it",
                  join(invitation, 1000, &comm));
  GW_EXPECT_FAILS(GW_COMM_FAILED, "give it the run's GRADWIRE_SECRET",
                  join(invitation, 5000, &comm, "a guess"));
  GW_EXPECT_OK(gw_comm_admit(rank0, 0));
  GW_EXPECT_BAD("no longer admits ranks", join(invitation, 5000, &comm));
  GW_EXPECT_OK(gw_comm_destroy(alone));
  GW_EXPECT_OK(gw_comm_destroy(rank0));
  GW_EXPECT_FAILS(GW_COMM_FAILED, "no rank admits this process", join(invitation, 5000, &comm));
}

TEST(CApiGrow, RejectsInvalidArguments) {
  gw_comm comm = nullptr, single = nullptr;
  GW_EXPECT_OK(capi::create(nullptr, 0, 1, GW_HOST, 1000, &single));
  GW_EXPECT_BAD("no new ranks can join", gw_comm_admit(single, 2));
  GW_EXPECT_BAD("most is -1", gw_comm_admit(single, -1));
  GW_EXPECT_BAD("no new ranks can join", gw_comm_grow(single, &comm));
  EXPECT_EQ(capi::query(single).invitation, nullptr);
  EXPECT_EQ(capi::query(single).joiners, 0);
  GW_EXPECT_BAD("timeout_ms is 0", join("x", 0, &comm));
  GW_EXPECT_FAILS(GW_COMM_FAILED, "no rank has published its contact yet", join("", 300, &comm));
  auto options = capi::comm_options(nullptr, 0, 0);
  options.invitation = "x";
  options.world = 2;
  GW_EXPECT_BAD("world is 2; with gw_comm_options.invitation both must be 0",
                gw_comm_create(&options, &comm));
  options.world = 0;
  options.ranks_per_node = 1;
  GW_EXPECT_BAD("ranks_per_node is 1", gw_comm_create(&options, &comm));
  options.ranks_per_node = 0;
  options.device = 0;
  GW_EXPECT_FAILS(GW_UNSUPPORTED, "device is 0", gw_comm_create(&options, &comm));
  GW_EXPECT_FAILS(GW_BAD_HANDLE, "null", gw_comm_grow(nullptr, &comm));
  GW_EXPECT_OK(gw_comm_destroy(single));
}

}  // namespace
