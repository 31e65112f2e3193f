// Which exchange of the NCCL transport is stuck: deadlines of exchanges and of graph launches.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "collectives/transport/exchange_watch.h"
#include "tests/support/expect.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;
using Time = ExchangesInFlight::Time;

struct ManualMark final : ExchangeMark {
  struct State {
    Progress progress = Progress::queued;
    uint64_t runs = 0;
  };
  ManualMark(std::shared_ptr<State> s, bool captured) : state(std::move(s)), captured(captured) {}
  void begin(const Stream&) override {}
  void end(const Stream&) override {}
  Progress poll() override { return state->progress; }
  uint64_t runs() const override { return state->runs; }
  bool repeats() const override { return captured; }
  std::shared_ptr<State> state;
  bool captured;
};

std::shared_ptr<ManualMark::State> add(ExchangesInFlight& all, WatchedExchange e, bool captured = false) {
  auto state = std::make_shared<ManualMark::State>();
  all.add(std::make_unique<ManualMark>(state, captured), std::move(e));
  return state;
}

TEST(ExchangesInFlight, TheDeadlineStartsWhenTheExchangeStarts) {
  ExchangesInFlight all(100ms);
  const Time t{};
  auto first =
      add(all, {7, "allreduce of bucket 1, round 2 of 6", {{Transfer::Kind::receive, 3, nullptr, 8}}});
  auto second = add(all, {8, "another"});
  EXPECT_FALSE(all.overdue(t));
  EXPECT_FALSE(all.overdue(t + 10h)) << "earlier kernels may take any time";
  testing::expect_has(all.standing(), {"still computing before exchange 7"});
  first->progress = Progress::running;
  EXPECT_FALSE(all.overdue(t + 11h));
  EXPECT_FALSE(all.overdue(t + 11h + 100ms));
  auto text = all.overdue(t + 11h + 101ms);
  ASSERT_TRUE(text);
  testing::expect_has(*text, {"exchange 7", "bucket 1, round 2 of 6", "no progress for 100 ms",
                              "1 receive (8 bytes) from rank 3 pending"});
  testing::expect_has(all.standing(), {"in exchange 7"});

  first->progress = Progress::done;
  second->progress = Progress::running;
  EXPECT_FALSE(all.overdue(t + 12h)) << "the second has just started";
  EXPECT_EQ(all.take_spare().size(), 1u);
  second->progress = Progress::done;
  EXPECT_FALSE(all.overdue(t + 13h));
  EXPECT_FALSE(all.active());
  testing::expect_has(all.standing(), {"its last was exchange 8"});
}

TEST(ExchangesInFlight, EachLaunchOfAGraphHasItsOwnDeadline) {
  ExchangesInFlight all(100ms);
  const Time t{};
  auto mark = add(all, {1, "captured"}, true);
  mark->progress = Progress::done;
  EXPECT_FALSE(all.overdue(t));
  EXPECT_TRUE(all.active()) << "the graph may be launched again";
  mark->progress = Progress::running;
  // an exchange runs at every check, each time in another launch
  for (int launch = 0; launch < 10; ++launch) {
    ++mark->runs;
    EXPECT_FALSE(all.overdue(t + 90ms * launch));
  }
  EXPECT_FALSE(all.overdue(t + 90ms * 9 + 100ms));
  EXPECT_TRUE(all.overdue(t + 90ms * 9 + 101ms));
}

TEST(ExchangesInFlight, NeverExpireWithoutATimeout) {
  ExchangesInFlight all(0ms);
  add(all, {1, "x"})->progress = Progress::running;
  all.overdue(Time{});
  EXPECT_FALSE(all.overdue(Time{} + 100h));
}

}  // namespace
}  // namespace gradwire
