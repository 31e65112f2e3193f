// The shared clock: all ranks agree on the time.
#include "collectives/agreement/statements.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/collectives/group.h"

namespace gradwire {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

double us(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

TEST(SharedClock, RanksWithOneClockAgreeToTheNanosecond) {
  std::vector<SharedInstant> instants(4);
  testing::run_ranks(4, Device::host(),
                     [&](Communicator& comm) { instants[comm.rank()] = agree_on_instant(comm.transport()); });
  for (const SharedInstant& instant : instants) {
    EXPECT_EQ(instant.here, instants[0].here);
    EXPECT_EQ(instant.error_us, 0);
  }
}

TEST(SharedClock, ReadsDifferingClocksWithinTheStatedError) {
  std::vector<SharedInstant> instants(4);
  const Clock::duration ahead[] = {0s, 5s, -90min, 1000h};
  testing::run_ranks(4, Device::host(), [&](Communicator& comm) {
    instants[comm.rank()] =
        agree_on_instant(comm.transport(), [&, rank = comm.rank()] { return Clock::now() + ahead[rank]; });
  });
  for (int rank = 1; rank < 4; ++rank) {
    const double off_us = us(instants[rank].here - ahead[rank] - instants[0].here);
    EXPECT_LE(std::abs(off_us), instants[rank].error_us + 0.001) << "rank " << rank;
    EXPECT_GT(instants[rank].error_us, 0);
  }
}

}  // namespace
}  // namespace gradwire
