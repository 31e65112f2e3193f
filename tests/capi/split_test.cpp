// Tests gw_comm_split(), which makes separate communicators of groups of ranks, and gw_comm_query().
#include <barrier>

#include "tests/capi/ranks.h"
#include "tests/support/temporary_folder.h"

namespace {

using capi::query;
using capi::sum_of;

class CApiSplit : public testing::TestWithParam<const char*> {
 protected:
  void run(int world, const std::function<void(gw_comm, int)>& body) {
    const gradwire::testing::TemporaryFolder folder;
    const bool tcp = std::string(GetParam()) == "tcp";
    capi::run_ranks_at(tcp ? "file://" + folder.path("meet") : capi::fresh_name(), world, 60'000, body);
  }
};
INSTANTIATE_TEST_SUITE_P(, CApiSplit, testing::Values("threads", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(CApiSplit, RanksOfAColorAreAGroupInTheOrderOfTheirKeys) {
  for (int world : {1, 2, 5}) {
    run(world, [&](gw_comm comm, int rank) {
      EXPECT_EQ(query(comm).world, world);
      gw_comm part = nullptr;
      // Splits into even and odd ranks, each group in descending order.
      GW_EXPECT_OK(gw_comm_split(comm, rank % 2, -rank, &part));
      const int size = (world + 1 - rank % 2) / 2;
      const gw_comm_info info = query(part);
      EXPECT_EQ(info.world, size);
      EXPECT_EQ(info.rank, size - 1 - rank / 2);
      EXPECT_EQ(info.device, GW_HOST);
      EXPECT_EQ(sum_of(part, 1), static_cast<float>(size));
      std::vector<float> first(1, static_cast<float>(rank));
      GW_EXPECT_OK(gw_broadcast(part, first.data(), 1, GW_FLOAT32, 0, "fp32", nullptr, nullptr));
      EXPECT_EQ(first[0], static_cast<float>(rank % 2 + 2 * (size - 1)));
      EXPECT_EQ(sum_of(comm, 1), static_cast<float>(world)) << "the whole goes on beside its parts";
      EXPECT_EQ(query(part).bytes_sent > 0, size > 1);
      GW_EXPECT_OK(gw_comm_destroy(part));
    });
  }
}

TEST_P(CApiSplit, APartOutlivesTheWholeAndIsSplitAgain) {
  std::barrier split(4);
  run(4, [&](gw_comm comm, int rank) {
    gw_comm half = nullptr, alone = nullptr, none = comm;
    GW_EXPECT_OK(gw_comm_split(comm, rank / 2, 0, &half));
    GW_EXPECT_OK(gw_comm_split(comm, rank == 3 ? 7 : -1, 0, &none));
    EXPECT_EQ(none != nullptr, rank == 3);
    split.arrive_and_wait();  // every rank has split before a rank aborts the original group
    GW_EXPECT_OK(gw_comm_abort(comm, "the whole is over"));
    EXPECT_EQ(sum_of(half, 1), 2.0f);
    GW_EXPECT_OK(gw_comm_split(half, rank, 0, &alone));
    EXPECT_EQ(sum_of(alone, 1), 1.0f);
    for (gw_comm part : {half, alone, none}) GW_EXPECT_OK(gw_comm_destroy(part));
  });
}

TEST(CApiQuery, RefusesWhatItCannotFill) {
  capi::run_ranks(1, [](gw_comm comm, int) {
    gw_comm_info info = {};
    GW_EXPECT_BAD("gw_comm_info.size is 0", gw_comm_query(comm, &info));
    GW_EXPECT_BAD("info is null", gw_comm_query(comm, nullptr));
    GW_EXPECT_BAD("part is null", gw_comm_split(comm, 0, 0, nullptr));
    info.size = sizeof info;
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "null", gw_comm_query(nullptr, &info));
  });
}

}  // namespace
