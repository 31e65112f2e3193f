// Surviving ranks of a failed group of GPUs continue, without a GPU. Threads replace NCCL (fake_nccl.h).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <numeric>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/schedule/schedule.h"
#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/collectives/program_runs.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/threads.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

// The ranks of a run with a file rendezvous.
struct Meeting {
  explicit Meeting(int world) : ranks(world) {}

  std::unique_ptr<Communicator> join(int rank, bool shrinkable = true,
                                     std::chrono::milliseconds timeout = 500ms) {
    const GroupOptions group{"file://" + folder.path("store"), rank, static_cast<int>(ranks.comms.size()),
                             timeout};
    GroupOptions joining = group;
    joining.timeout = 20s;
    NcclSetup setup = fake_setup(ranks[rank], timeout);
    setup.shrinkable = shrinkable;
    setup.group = std::make_unique<Membership>(joining);
    const auto deadline = SteadyClock::now() + 20s;
    setup.options = group;
    setup.address = "127.0.0.1";
    if (shrinkable) setup.quorum = std::make_shared<Quorum>(setup.address, setup.group->key());
    setup.contacts = exchange_contacts(*setup.group, setup.quorum.get(), deadline);
    return std::make_unique<Communicator>(std::make_unique<NcclTransport>(std::move(setup)));
  }

  // Runs `body` on every rank. Returns every rank's error, or "" for success.
  std::vector<std::string> each(const std::function<void(int rank)>& body) const {
    return errors_in_threads(static_cast<int>(ranks.comms.size()), body);
  }

  TemporaryFolder folder;
  FakeWorld ranks;
};

// A barrier for all ranks that have not left or failed.
struct Together {
  ~Together() { ranks.arrive_and_drop(); }
  void wait() { ranks.arrive_and_wait(); }
  std::barrier<>& ranks;
};

// Returns the sum of all ranks' `mine`. Computes the sum by messages and by NCCL's allreduce, and expects
// equal results.
float sum_of(Communicator& comm, float mine) {
  const Stream stream = Stream::create(Device::host(), "test");
  std::vector<float> data(1000, mine);
  Program program(comm.transport(), ring(comm.world()), {data.data(), data.data(), nullptr, 1000},
                  {.what = "the gradients"});
  run_once(program, stream);
  comm.check();
  float by_library = 0;
  comm.transport().allreduce(stream, &mine, &by_library, 1, false, 4, "allreduce");
  stream.synchronize();
  comm.check();
  EXPECT_EQ(data.front(), data.back());
  EXPECT_EQ(data.front(), by_library);
  return by_library;
}

TEST(NcclRegroup, FromFourToThreeToTwoWhenAnyRanksLeave) {
  for (const auto& leavers : {std::vector{3, 1}, std::vector{0, 1}, std::vector{2, 0}}) {
    SCOPED_TRACE(fmt::format("ranks {} and {}", leavers[0], leavers[1]));
    Meeting run(4);
    std::barrier ranks(4);
    const auto errors = run.each([&](int rank) {
      Together together{ranks};  // destroyed after the communicator
      auto comm = run.join(rank);
      std::vector<int> left{0, 1, 2, 3};
      for (const int leaver : leavers) {
        EXPECT_EQ(sum_of(*comm, static_cast<float>(rank)), std::accumulate(left.begin(), left.end(), 0.0f));
        together.wait();  // no rank leaves before all ranks have the sum
        if (rank == leaver) return;
        together.wait();
        EXPECT_THROW(sum_of(*comm, 1.0f), CommError);
        std::vector<int> survivors;
        auto next = comm->regroup(20s, survivors);
        std::vector<int> was = left;
        left.erase(std::find(left.begin(), left.end(), leaver));
        EXPECT_EQ(survivors.size(), left.size());
        for (size_t i = 0; i < std::min(left.size(), survivors.size()); ++i) {
          EXPECT_EQ(was[survivors[i]], left[i]);
        }
        EXPECT_THROW(comm->regroup(1s, survivors), BadInput);  // a communicator can regroup only once
        comm = std::move(next);
        EXPECT_EQ(comm->rank(), std::find(left.begin(), left.end(), rank) - left.begin());
      }
      EXPECT_EQ(sum_of(*comm, static_cast<float>(rank)), std::accumulate(left.begin(), left.end(), 0.0f));
      together.wait();
    });
    EXPECT_EQ(errors, no_errors(4));
  }
}

TEST(NcclRegroup, RestoresTheGroupWhenEveryRankSurvives) {
  Meeting run(3);
  std::barrier ranks(3);
  const auto errors = run.each([&](int rank) {
    Together together{ranks};
    auto comm = run.join(rank);
    EXPECT_EQ(sum_of(*comm, 1.0f), 3.0f);
    together.wait();
    if (rank == 1) comm->abort("enough");
    std::vector<int> survivors;
    auto again = comm->regroup(20s, survivors);
    EXPECT_EQ(survivors, (std::vector{0, 1, 2}));
    EXPECT_EQ(sum_of(*again, 1.0f), 3.0f);
    together.wait();
  });
  EXPECT_EQ(errors, no_errors(3));
}

TEST(NcclRegroup, RejectsRanksThatDifferInShrinkable) {
  Meeting run(2);
  const auto errors = run.each([&](int rank) { run.join(rank, rank == 0); });
  expect_has(errors[0], {"rank 0 continues", "rank 1 does not", "gw_comm_options.shrinkable"});
}

TEST(NcclRegroup, NamesTheRemedyForAGroupThatIsNotShrinkable) {
  Meeting run(2);
  const auto errors = run.each([&](int rank) {
    auto comm = run.join(rank, false);
    comm->barrier();
    std::vector<int> survivors;
    comm->regroup(1s, survivors);
  });
  for (const std::string& error : errors) expect_has(error, {"gw_comm_options.shrinkable"});
}

}  // namespace
}  // namespace gradwire::testing
