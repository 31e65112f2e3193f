// The executor: every schedule and wire sums right, keeps what it rounds away, and leaves the same bits on
// every rank.
#include <gtest/gtest.h>

#include <random>

#include "collectives/executor.h"
#include "collectives/schedule/checker.h"
#include "kernels/error.h"
#include "tests/collectives/group.h"
#include "tests/collectives/schedule_mutator.h"

namespace gradwire {
namespace {

using testing::run_ranks;
using testing::same_bits;

struct Outcome {
  std::vector<std::vector<float>> result, residual;  // [rank]
  std::vector<uint64_t> bytes_sent;
};

// One allreduce of inputs[rank] with residuals[rank] (empty: none) on `device`.
Outcome allreduce(Device device, const Schedule& schedule, const std::vector<std::vector<float>>& inputs,
                  const std::vector<std::vector<float>>& residuals, Allreduce::Options options) {
  int world = schedule.world;
  Outcome outcome;
  outcome.result.resize(world);
  outcome.residual.resize(world);
  outcome.bytes_sent.resize(world);
  run_ranks(world, device, [&](Communicator& comm) {
    int r = comm.rank();
    int64_t count = static_cast<int64_t>(inputs[r].size());
    Stream stream = Stream::create(device, "test");
    Buffer data = make_buffer<float>(device, count);
    Buffer residual = make_buffer<float>(device, residuals.empty() ? 0 : count);
    to_device(stream, data.as<float>(), std::span<const float>(inputs[r]));
    if (residual) to_device(stream, residual.as<float>(), std::span<const float>(residuals[r]));
    Allreduce program(comm.transport(), schedule, data.as<float>(), residual.as<float>(), count, options);
    Buffer workspace(device, program.workspace_bytes());
    program.bind(workspace.data());
    program.run(stream);
    outcome.result[r] = to_host(stream, data.as<const float>(), count);
    if (residual) outcome.residual[r] = to_host(stream, residual.as<const float>(), count);
    outcome.bytes_sent[r] = comm.bytes_sent();
  });
  return outcome;
}

std::vector<Schedule> schedules(int world) {
  std::vector<Schedule> all = {ring(world), two_shot(world), double_tree(world),
                               pipelined(double_tree(world), 3)};
  for (int nodes = 1; nodes <= world; ++nodes) {
    if (world % nodes != 0) continue;
    all.push_back(hierarchical(nodes, world / nodes));
    if (nodes > 2) all.push_back(hierarchical(nodes, world / nodes, ScheduleKind::ring));
  }
  return all;
}

class AllreduceTest : public ::testing::TestWithParam<Device> {
 protected:
  static constexpr int64_t kCounts[] = {0, 1, 7, 64, 1000, 4099};
};

TEST_P(AllreduceTest, Fp32SumsIntegersExactly) {
  for (int world : {1, 2, 3, 4, 5, 8}) {
    for (const Schedule& schedule : schedules(world)) {
      for (int64_t count : kCounts) {
        std::vector<std::vector<float>> inputs(world);
        std::vector<float> expected(count, 0.0f);
        for (int r = 0; r < world; ++r) {
          for (int64_t i = 0; i < count; ++i) {
            inputs[r].push_back(static_cast<float>((r + 1) * 1000 + i % 97));
            expected[i] += inputs[r].back();
          }
        }
        Outcome outcome = allreduce(GetParam(), schedule, inputs, {}, {.what = "test"});
        for (int r = 0; r < world; ++r) {
          ASSERT_EQ(outcome.result[r], expected)
              << name(schedule.kind) << " n=" << world << " count=" << count;
        }
      }
    }
  }
}

TEST_P(AllreduceTest, EveryRankEndsWithTheSameBits) {
  for (int world : {2, 3, 5, 8}) {
    for (const Schedule& schedule : schedules(world)) {
      for (Wire wire : {Wire::fp32, Wire::bf16, Wire::fp8}) {
        std::vector<std::vector<float>> inputs;
        for (int r = 0; r < world; ++r) inputs.push_back(testing::normal(1003, 10 + r));
        Outcome outcome = allreduce(GetParam(), schedule, inputs, {},
                                    {.what = "test", .wire = wire, .scale = 1.0f / world});
        for (int r = 1; r < world; ++r) {
          ASSERT_TRUE(same_bits(outcome.result[r], outcome.result[0]))
              << name(schedule.kind) << " " << name(wire) << " n=" << world << " rank " << r;
        }
      }
    }
  }
}

// sum of (gradient + residual) == result / scale + sum of new residuals, element by element, to FP32
// rounding.
TEST_P(AllreduceTest, Bf16LosesNothing) {
  for (Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    for (int world : {2, 3, 4, 8}) {
      for (const Schedule& schedule : schedules(world)) {
        for (int64_t count : kCounts) {
          std::vector<std::vector<float>> inputs, residuals;
          for (int r = 0; r < world; ++r) {
            inputs.push_back(testing::normal(count, 100 + r));
            residuals.push_back(testing::normal(count, 200 + r, 0.01f));
          }
          Outcome outcome =
              allreduce(GetParam(), schedule, inputs, residuals,
                        {.what = "test", .wire = Wire::bf16, .rounding = {rounding, 42, nullptr, 0}});
          for (int64_t i = 0; i < count; ++i) {
            double before = 0, after = outcome.result[0][i], size = 0;
            for (int r = 0; r < world; ++r) {
              before += double{inputs[r][i]} + residuals[r][i];
              after += outcome.residual[r][i];
              size += std::abs(inputs[r][i]) + std::abs(residuals[r][i]);
            }
            ASSERT_NEAR(after, before, 1e-6 * size)
                << name(schedule.kind) << " n=" << world << " element " << i;
          }
        }
      }
    }
  }
}

TEST_P(AllreduceTest, SendsTheLeastBytesPossible) {
  for (int world : {2, 3, 4, 8}) {
    for (const Schedule& schedule : {ring(world), two_shot(world)}) {
      for (Wire wire : {Wire::fp32, Wire::bf16}) {
        int64_t count = 8 * world * 100;  // divides evenly
        std::vector<std::vector<float>> inputs(world, std::vector<float>(count, 1.0f));
        Outcome outcome = allreduce(GetParam(), schedule, inputs, {}, {.what = "test", .wire = wire});
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(outcome.bytes_sent[r], 2u * (world - 1) * count / world * (wire == Wire::bf16 ? 2 : 4));
        }
      }
    }
  }
}

TEST_P(AllreduceTest, SendsWhatTheScheduleSays) {
  for (int world : {1, 2, 5, 6}) {
    for (const Schedule& schedule : schedules(world)) {
      for (int64_t count : kCounts) {
        std::vector<std::vector<float>> inputs(world, std::vector<float>(count, 1.0f));
        Outcome outcome = allreduce(GetParam(), schedule, inputs, {}, {.what = "test", .wire = Wire::bf16});
        for (int r = 0; r < world; ++r) {
          EXPECT_EQ(outcome.bytes_sent[r], 2u * elements_sent(schedule, r, count)) << name(schedule.kind);
        }
      }
    }
  }
}

// A slice of a chunk goes through the same additions in the same order as the whole chunk.
TEST_P(AllreduceTest, PipeliningChangesNoBit) {
  for (const Schedule& schedule : schedules(6)) {
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < 6; ++r) inputs.push_back(testing::normal(48 * 64, 10 + r));
    for (Wire wire : {Wire::fp32, Wire::bf16}) {
      Allreduce::Options options{.what = "test", .wire = wire};
      Outcome whole = allreduce(GetParam(), schedule, inputs, {}, options);
      Outcome sliced = allreduce(GetParam(), pipelined(schedule, 4), inputs, {}, options);
      EXPECT_TRUE(same_bits(whole.result[0], sliced.result[0])) << name(schedule.kind) << " " << name(wire);
    }
  }
}

TEST_P(AllreduceTest, TwoShotRoundsLessThanRing) {
  auto error = [&](const Schedule& schedule) {
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < schedule.world; ++r) inputs.push_back(testing::normal(20000, 300 + r));
    Outcome outcome = allreduce(GetParam(), schedule, inputs, {}, {.what = "test", .wire = Wire::bf16});
    double difference = 0, size = 0;
    for (size_t i = 0; i < inputs[0].size(); ++i) {
      double exact = 0;
      for (const auto& input : inputs) exact += input[i];
      difference += (outcome.result[0][i] - exact) * (outcome.result[0][i] - exact);
      size += exact * exact;
    }
    return std::sqrt(difference / size);
  };
  double two = error(two_shot(8)), round = error(ring(8));
  EXPECT_GT(two, 1e-4);  // it does round
  EXPECT_LT(two, 3.2e-3);
  EXPECT_LT(two, 0.8 * round);
}

INSTANTIATE_TEST_SUITE_P(On, AllreduceTest, ::testing::ValuesIn(available_devices()), [](const auto& info) {
  return info.param.is_host() ? std::string("host") : "cuda" + std::to_string(info.param.index);
});

// What the checker proves is what happens: right schedules give the sum, wrong ones an error or a wrong sum.
TEST(Executor, AgreesWithTheCheckerOnMutatedSchedules) {
  std::mt19937_64 random(7);
  int right = 0, wrong = 0;
  while (right < 60 || wrong < 500) {
    Schedule s = testing::random_schedule(random, 6);
    std::string change = testing::Mutator(s, random).mutate();
    CheckReport report = check(s);
    // Peers and chunks that do not exist are not the executor's business.
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
      // A wrong schedule may hang, a right one may be slow.
      run_ranks(s.world, Device::host(), std::chrono::milliseconds(report.correct ? 20000 : 30),
                [&](Communicator& comm) {
                  Stream stream = Stream::create(Device::host(), "test");
                  Allreduce program(comm.transport(), s, results[comm.rank()].data(), nullptr, count,
                                    {.what = "test"});
                  std::vector<std::byte> workspace(program.workspace_bytes());
                  program.bind(workspace.data());
                  program.run(stream);
                  stream.synchronize();
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

TEST(LocalTransport, AnAbsentRankIsNamedWithinTheDeadline) {
  try {
    run_ranks(3, Device::host(), std::chrono::milliseconds(200), [&](Communicator& comm) {
      if (comm.rank() == 2) return;  // never takes part
      Stream stream = Stream::create(Device::host(), "test");
      std::vector<float> data(100, 1.0f);
      Allreduce program(comm.transport(), ring(3), data.data(), nullptr, 100, {.what = "the test's buffer"});
      std::vector<std::byte> workspace(program.workspace_bytes());
      program.bind(workspace.data());
      program.run(stream);
      stream.synchronize();
    });
    FAIL() << "no error";
  } catch (const CommError& error) {
    std::string text = error.what();
    EXPECT_NE(text.find("from rank 2"), std::string::npos) << text;
    EXPECT_NE(text.find("the test's buffer"), std::string::npos) << text;
  }
}

TEST(LocalTransport, RanksThatDisagreeAreToldSo) {
  try {
    run_ranks(2, Device::host(), std::chrono::seconds(20), [&](Communicator& comm) {
      Stream stream = Stream::create(Device::host(), "test");
      int64_t count = comm.rank() == 0 ? 100 : 104;
      std::vector<float> data(count, 1.0f);
      Allreduce program(comm.transport(), ring(2), data.data(), nullptr, count, {.what = "x"});
      std::vector<std::byte> workspace(program.workspace_bytes());
      program.bind(workspace.data());
      program.run(stream);
      stream.synchronize();
    });
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("ranks disagree"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace gradwire
