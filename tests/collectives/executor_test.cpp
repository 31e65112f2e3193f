// Execution, between threads, of wrong schedules, with missing ranks, and with ranks that disagree.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "collectives/schedule/checker.h"
#include "runtime/util/error.h"
#include "tests/collectives/program_runs.h"
#include "tests/collectives/schedule_mutator.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

// Expects execution to agree with the checker: correct schedules give the sum, and wrong schedules give an
// error or a wrong sum.
TEST(Executor, AgreesWithTheCheckerOnMutatedSchedules) {
  std::mt19937_64 random(7);
  int right = 0, wrong = 0;
  while (right < 60 || wrong < 500) {
    Schedule s = random_schedule(random, 6);
    std::string change = Mutator(s, random).mutate();
    CheckReport report = check(s);
    // The executor does not handle invalid peers and chunks.
    if (!report.violations.empty() && report.violations[0].rule == CheckReport::Rule::form) continue;
    ++(report.correct ? right : wrong);
    const int64_t count = 8 * s.chunks;
    std::vector<float> expected(count, 0.0f);
    std::vector<std::vector<float>> results(s.world);
    for (int r = 0; r < s.world; ++r) {
      for (int64_t i = 0; i < count; ++i) {
        results[r].push_back(static_cast<float>(random() % 1000000));
        expected[i] += results[r].back();
      }
    }
    std::string failure;
    try {
      // A wrong schedule may hang, and a correct schedule may be slow.
      run_ranks(s.world, Device::host(), std::chrono::milliseconds(report.correct ? 20000 : 30),
                [&](Communicator& comm) {
                  Stream stream = Stream::create(Device::host(), "test");
                  float* data = results[comm.rank()].data();
                  Program program(comm.transport(), s, {data, data, nullptr, count}, {.what = "test"});
                  run_once(program, stream);
                });
      for (const auto& result : results) {
        if (result != expected) failure = "a wrong sum";
      }
    } catch (const Error& error) {
      failure = error.what();
    }
    EXPECT_EQ(failure.empty(), report.correct)
        << name(s.kind) << " of " << s.world << ", " << change << ": executing gives "
        << (failure.empty() ? "the sum" : failure) << ", the checker says\n"
        << report.to_string();
  }
}

TEST(LocalTransport, NamesAMissingRankWithinTheDeadline) {
  try {
    run_ranks(3, Device::host(), std::chrono::milliseconds(200), [&](Communicator& comm) {
      if (comm.rank() == 2) return;  // rank 2 never takes part
      Stream stream = Stream::create(Device::host(), "test");
      std::vector<float> data(100, 1.0f);
      Program program(comm.transport(), ring(3), {data.data(), data.data(), nullptr, 100},
                      {.what = "the test's buffer"});
      run_once(program, stream);
    });
    FAIL() << "no error";
  } catch (const CommError& error) {
    expect_has(error.what(), {"from rank 2", "the test's buffer"});
  }
}

// Expects an immediate error when rank 2 of 4 makes a different third call. No rank waits for the deadline.
TEST(LocalTransport, ReportsRanksThatDisagree) {
  using Options = Program::Options;
  auto disagree = [](const char* says, const std::function<void(int64_t&, Schedule&, Options&)>& change) {
    std::atomic<int> told = 0;
    try {
      run_ranks(4, Device::host(), std::chrono::seconds(600), [&](Communicator& comm) {
        Stream stream = Stream::create(Device::host(), "test");
        try {
          for (int call = 1; call <= 4; ++call) {
            int64_t count = 100;
            Schedule schedule = ring(4);
            Options options{.what = "x", .spec = "powersgd:rank=1"};
            if (comm.rank() == 2 && call == 3) change(count, schedule, options);
            std::vector<float> data(count, 1.0f);
            Program program(comm.transport(), schedule, {data.data(), data.data(), nullptr, count}, options);
            run_once(program, stream);
            EXPECT_EQ(data, std::vector<float>(count, 4.0f)) << "call " << call;
          }
        } catch (const CommError& error) {
          expect_has(error.what(), {"ranks disagree: call 3 of rank ", "of rank 2", says});
          ++told;
          throw;
        }
      });
      ADD_FAILURE() << "nobody noticed: " << says;
    } catch (const CommError&) {
      EXPECT_EQ(told, 4) << says;
    }
  };
  disagree("(104 floats, fp32, ring", [](int64_t& count, Schedule&, Options&) { count = 104; });
  disagree("(0 floats", [](int64_t& count, Schedule&, Options&) { count = 0; });
  disagree("100 floats, bf16", [](int64_t&, Schedule&, Options& o) { o.wire = kBf16; });
  disagree("fp32, tree", [](int64_t&, Schedule& s, Options&) { s = double_tree(4); });
  disagree("differ in something else", [](int64_t&, Schedule& s, Options&) { s = pipelined(s, 2); });
  disagree("differ in something else", [](int64_t&, Schedule&, Options& o) { o.scale = 0.25f; });
  disagree("differ in something else",
           [](int64_t&, Schedule&, Options& o) { o.rounding.mode = Rounding::stochastic; });
  disagree("powersgd:rank=1,warm=off",
           [](int64_t&, Schedule&, Options& o) { o.spec = "powersgd:rank=1,warm=off"; });
  disagree("allreduce of y", [](int64_t&, Schedule&, Options& o) { o.what = "y"; });
}

}  // namespace
}  // namespace gradwire::testing
