// Programs: every collective, schedule and wire gives the correct sum, stores its rounding errors, and has
// the same bits on every rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <numeric>
#include <string_view>
#include <thread>

#include "collectives/program/program.h"
#include "collectives/schedule/checker.h"
#include "kernels/math/small_float.h"
#include "runtime/util/error.h"
#include "tests/collectives/group.h"
#include "tests/collectives/program_runs.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

class AllreduceTest : public ::testing::TestWithParam<Device> {
 protected:
  static constexpr int64_t kCounts[] = {0, 1, 7, 64, 1000, 4099};

  static Outcome run(const Schedule& schedule, const Values& inputs, const Values& residuals,
                     const Program::Options& options) {
    return allreduce(GetParam(), schedule, inputs, residuals, options);
  }
  // Calls check(options) with the wire on all links and, for hierarchical schedules, with the wire only
  // between nodes.
  template <typename Check>
  static void for_wires_in_nodes(const Schedule& schedule, Wire wire, const Check& check) {
    for (bool fp32_intra_node : {false, true}) {
      if (fp32_intra_node && (schedule.kind != ScheduleKind::hierarchical || wire->exact)) continue;
      check(Program::Options{.what = "test",
                             .wire = wire,
                             .fp32_intra_node = fp32_intra_node,
                             .rounding = {wire->rounding, 42, nullptr, 0}});
    }
  }
  // Adds up element i over the ranks: inputs and old residuals on one side, result and new residuals on the
  // other side.
  static Conservation sums(const Outcome& outcome, const Values& inputs, const Values& residuals, size_t i,
                           double scale = 1.0) {
    Conservation sum{.out = outcome.result[0][i] / scale};
    for (size_t r = 0; r < inputs.size(); ++r) {
      sum.put(inputs[r][i]);
      sum.put(residuals[r][i]);
      sum.out += outcome.residual[r][i];
    }
    return sum;
  }
};
const std::vector<Wire> kFp32Only = {kFp32};

TEST_P(AllreduceTest, Fp32SumsIntegersExactly) {
  for_schedules({1, 2, 3, 4, 5, 8}, kFp32Only, [&](const Schedule& schedule, Wire) {
    for (int64_t count : kCounts) {
      Values inputs(schedule.world);
      std::vector<float> expected(count, 0.0f);
      for (int r = 0; r < schedule.world; ++r) {
        for (int64_t i = 0; i < count; ++i) {
          inputs[r].push_back(static_cast<float>((r + 1) * 1000 + i % 97));
          expected[i] += inputs[r].back();
        }
      }
      for (const auto& result : run(schedule, inputs, {}, {.what = "test"}).result)
        ASSERT_EQ(result, expected) << "count=" << count;
    }
  });
}

// Starts rank 1 of each of three calls 30 ms late. The other ranks wait at least that long for rank 1, and
// rank 1 finds their data ready.
TEST_P(AllreduceTest, TheStragglerWaitsLeast) {
  if (!GetParam().is_host()) GTEST_SKIP() << "measured on the host only";
  std::vector<double> total(3);
  run_ranks(3, GetParam(), [&](Communicator& comm) {
    const Stream stream = Stream::create(comm.device(), "test");
    std::vector<float> data(1000, 1.0f);
    Program program(comm.transport(), two_shot(3), {data.data(), data.data(), nullptr, 1000},
                    {.what = "test"});
    for (int call = 0; call < 3; ++call) {
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      run_once(program, stream);
    }
    const auto waited = comm.waited_s();
    total[comm.rank()] = std::accumulate(waited.begin(), waited.end(), 0.0);
  });
  EXPECT_EQ(std::min_element(total.begin(), total.end()) - total.begin(), 1);
}

// Expects sum of (gradient + residual) == result / scale + sum of new residuals, element by element, to FP32
// rounding.
TEST_P(AllreduceTest, Bf16LosesNothing) {
  for_schedules(thinned({2, 3, 4, 8}, 2), std::vector<Wire>{kBf16}, [&](const Schedule& schedule, Wire wire) {
    for (Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
      for (int64_t count : thinned(kCounts)) {
        const Values inputs = normals(schedule.world, count, 100),
                     residuals = normals(schedule.world, count, 200, 0.01f);
        const Outcome outcome = run(schedule, inputs, residuals,
                                    {.what = "test", .wire = wire, .rounding = {rounding, 42, nullptr, 0}});
        for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
          const Conservation sum = sums(outcome, inputs, residuals, i);
          ASSERT_NEAR(sum.out, sum.in, 1e-6 * sum.size) << "element " << i;
        }
      }
    }
  });
}

// Expects the units in which an average is added not to change a bit of the result or the residual. All ranks
// have the same bits.
TEST_P(AllreduceTest, AveragesMatchTheDividedSumBitForBit) {
  // A GPU tests few worlds, because starting a group on a GPU takes a minute.
  const std::vector<int> worlds = GetParam().is_host() ? thinned({1, 2, 3, 4, 5, 6, 8}) : std::vector{3};
  for_schedules(worlds, thinned(wire_formats()), [&](const Schedule& schedule, Wire wire) {
    for_wires_in_nodes(schedule, wire, [&](Program::Options options) {
      const Values inputs = normals(schedule.world, 1003, 10),
                   residuals = normals(schedule.world, 1003, 50, 0.01f);
      const Outcome sum = run(schedule, inputs, residuals, options);
      options.scale = 1.0f / static_cast<float>(schedule.world);
      const Outcome average = run(schedule, inputs, residuals, options);
      std::vector<float> divided = sum.result[0];
      for (float& x : divided) x *= options.scale;
      for (int r = 0; r < schedule.world; ++r) {
        ASSERT_TRUE(same_bits(average.result[r], divided)) << "rank " << r;
        ASSERT_TRUE(same_bits(average.residual[r], sum.residual[r])) << "rank " << r;
      }
    });
  });
}

// Tests averages whose sum overflows. The average and the residual are finite, and values are conserved,
// except where a format sends so little of a sum that the residual exceeds FP32. (int2 rounds up by up to
// half at each step, so its range is smaller by that factor.)
TEST_P(AllreduceTest, AveragesInFp32sRangeAreFinite) {
  for_schedules(thinned({2, 3, 4, 6}, 2), thinned(wire_formats()), [&](const Schedule& schedule, Wire wire) {
    const int world = schedule.world;
    for_wires_in_nodes(schedule, wire, [&](Program::Options options) {
      Values inputs = normals(world, 300, 10, 1e36f);
      for (auto& input : inputs) {
        for (float& x : input) x += std::string_view(wire->name) == "int2" ? 0.8e38f : 1.5e38f;
      }
      const Values zeros(world, std::vector<float>(300));
      options.scale = 1.0f / static_cast<float>(world);
      const Outcome outcome = run(schedule, inputs, zeros, options);
      for (size_t i = 0; i < 300; ++i) {
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(std::isfinite(outcome.result[r][i]));
          ASSERT_TRUE(std::isfinite(outcome.residual[r][i]));
        }
        if (wire->selects || (world > 2 && wire->gaussian_error > 0.002)) continue;
        const Conservation sum = sums(outcome, inputs, zeros, i, 1.0 / world);
        ASSERT_NEAR(sum.out / sum.in, 1, 2e-6)
            << "fp32_intra_node=" << options.fp32_intra_node << " element " << i;
      }
    });
  });
}

// Tests partial sums that overflow, and a NaN on one rank together with large values on other ranks. The
// result shows the non-finite value. The ranks clear the rounding errors of these elements, which would
// otherwise dominate the next step.
TEST_P(AllreduceTest, NonFiniteResultsClearTheResidualsOfAllRanks) {
  const auto rounding_wires = thinned(wire_formats().subspan(1));
  for_schedules({2, 3, 4}, rounding_wires, [&](const Schedule& schedule, Wire wire) {
    const int world = schedule.world;
    for (bool nan : {false, true}) {
      Values inputs = normals(world, 300, 10, 1e36f);
      for (int r = 0; r < world; ++r) {
        for (size_t i = 0; i < 300; i += 7) {
          inputs[r][i] = nan && r == world - 1 ? std::numeric_limits<float>::quiet_NaN()
                                               : 2.5e38f + static_cast<float>(r) * 1e35f;
        }
      }
      const Outcome outcome = run(schedule, inputs, Values(world, std::vector<float>(300)),
                                  {.what = "test",
                                   .wire = wire,
                                   .scale = nan ? 1.0f / static_cast<float>(world) : 1.0f,
                                   .rounding = {wire->rounding, 42, nullptr, 0}});
      int not_finite = 0;
      for (size_t i = 0; i < 300; ++i) {
        if (std::isfinite(outcome.result[0][i])) continue;
        ++not_finite;
        for (int r = 0; r < world; ++r) ASSERT_EQ(outcome.residual[r][i], 0.0f) << "element " << i;
      }
      ASSERT_TRUE(not_finite > 0 || !nan);
    }
  });
}

// Expects conservation and agreement of all ranks with intra_node=fp32. Links between nodes carry the wire
// format, and links inside nodes carry FP32. Rounding errors are smaller than with the wire format on all
// links.
TEST_P(AllreduceTest, HierarchicalUsesTheWireOnSlowLinksOnly) {
  for (auto [nodes, per_node] : thinned({std::pair{1, 4}, {2, 1}, {2, 2}, {3, 4}, {4, 3}})) {
    for (ScheduleKind between : {ScheduleKind::two_shot, ScheduleKind::ring}) {
      for (Wire wire : thinned(wire_formats().subspan(1))) {  // formats that round
        // a multiple of all numbers of ranks and blocks
        const int64_t count = 12 * std::max<int64_t>(wire->granularity, 384);
        const Schedule schedule = hierarchical(nodes, per_node, between);
        const int world = schedule.world;
        SCOPED_TRACE(fmt::format("{}x{} {} {}", nodes, per_node, name(between), wire->name));
        const Values inputs = normals(world, count, 100), residuals = normals(world, count, 200, 0.01f);
        double lost[2] = {};  // [fp32_intra_node]: sum of this step's rounding errors
        for (bool fp32_intra_node : {false, true}) {
          const Outcome outcome = run(schedule, inputs, residuals,
                                      {.what = "test", .wire = wire, .fp32_intra_node = fp32_intra_node});
          std::vector<double> difference, sizes;
          for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
            const Conservation sum = sums(outcome, inputs, residuals, i);
            difference.push_back(sum.out - sum.in);
            sizes.push_back(sum.size);
            for (int r = 0; r < world; ++r) {  // a rank without rounding errors keeps its residual
              if (outcome.residual[r][i] != residuals[r][i])
                lost[fp32_intra_node] += std::abs(outcome.residual[r][i]);
            }
          }
          EXPECT_LT(norm(difference), 1e-6 * norm(sizes));
          const CheckReport report = check(schedule);
          const int64_t chunk = count / schedule.chunks;
          for (int r = 0; r < world; ++r) {
            EXPECT_TRUE(same_bits(outcome.result[r], outcome.result[0])) << "rank " << r;
            EXPECT_EQ(outcome.bytes_sent[r],
                      static_cast<uint64_t>(report.sent_inter_node[r] * wire->bytes(chunk) +
                                            report.sent_intra_node[r] *
                                                (fp32_intra_node ? kFp32 : wire)->bytes(chunk)));
          }
        }
        if (per_node == 1) {
          EXPECT_EQ(lost[1], lost[0]);
        } else if (nodes == 1) {
          EXPECT_EQ(lost[1], 0);
        } else {
          EXPECT_GT(lost[1], 0);
          EXPECT_LT(lost[1], lost[0]);
        }
      }
    }
  }
}

// Expects the same result in place and out of place. 16-bit buffers get the rounded FP32 sum.
TEST_P(AllreduceTest, OutOfPlaceAnd16BitBuffersHaveTheSameSum) {
  const int world = 4;
  const int64_t count = 4099;
  for (const Schedule& schedule : schedules(world)) {
    for (Wire wire : {kFp32, kBf16, wire_format("fp8")}) {
      Values inputs = normals(world, count, 60);
      for (auto& input : inputs) {
        for (float& v : input)  // exact in all types
          v = fp16_to_float(float_to_fp16(bf16_to_float(float_to_bf16_nearest(v))));
      }
      const Program::Options options{.what = "test", .wire = wire, .scale = 0.25f};
      const Outcome expected = allreduce(GetParam(), schedule, inputs, {}, options);
      run_ranks(world, GetParam(), [&](Communicator& comm) {
        const int r = comm.rank();
        Stream stream = Stream::create(GetParam(), "test");
        Buffer in = make_buffer<float>(GetParam(), count), out = make_buffer<float>(GetParam(), count);
        to_device(stream, in.as<float>(), std::span<const float>(inputs[r]));
        Program apart(comm.transport(), schedule, {in.data(), out.data(), nullptr, count}, options);
        run_once(apart, stream);
        EXPECT_TRUE(same_bits(to_host(stream, in.as<const float>(), count), inputs[r]));
        EXPECT_TRUE(same_bits(to_host(stream, out.as<const float>(), count), expected.result[r]))
            << name(schedule.kind) << " " << wire->name;

        for (DType dtype : {DType::bf16, DType::f16}) {
          auto* const round = dtype == DType::bf16 ? float_to_bf16_nearest : float_to_fp16;
          std::vector<uint16_t> narrow;
          for (float v : inputs[r]) narrow.push_back(round(v));
          Buffer half = make_buffer<uint16_t>(GetParam(), count);
          to_device(stream, half.as<uint16_t>(), std::span<const uint16_t>(narrow));
          Program program(comm.transport(), schedule, {half.data(), half.data(), nullptr, count, dtype},
                          options);
          run_once(program, stream);
          const auto got = to_host(stream, half.as<const uint16_t>(), count);
          for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(got[i], round(expected.result[r][i])) << name(schedule.kind) << " " << i;
          }
        }
      });
    }
  }
}

// Compares sent bytes with the schedule. A ring and a two-shot send the minimum.
TEST_P(AllreduceTest, SendsTheScheduledBytes) {
  for_schedules({1, 2, 5, 6}, std::vector<Wire>{kFp32, kBf16}, [&](const Schedule& schedule, Wire wire) {
    const int world = schedule.world, bytes = wire == kBf16 ? 2 : 4;
    for (int64_t count : {int64_t{0}, int64_t{7}, int64_t{4099}, int64_t{800} * world}) {
      const Values inputs(world, std::vector<float>(count, 1.0f));
      const Outcome outcome = run(schedule, inputs, {}, {.what = "test", .wire = wire});
      const bool minimal = schedule.kind == ScheduleKind::ring || schedule.kind == ScheduleKind::two_shot;
      for (int r = 0; r < world; ++r) {
        EXPECT_EQ(outcome.bytes_sent[r], static_cast<uint64_t>(bytes * elements_sent(schedule, r, count)));
        if (minimal && count % (8 * world) == 0) {
          EXPECT_EQ(outcome.bytes_sent[r], static_cast<uint64_t>(bytes * 2 * (world - 1) * count / world));
        }
      }
    }
  });
}

// Expects slices not to change a bit of the result or the residual. A slice of a chunk undergoes the same
// additions in the same order as the whole chunk, at the same offsets of the buffer. So neither the slice
// size nor transfers concurrent with kernels change a bit. (A world of 6 ranks has every kind of schedule,
// with nodes of several shapes.)
TEST_P(AllreduceTest, SlicesChangeNoBit) {
#ifdef GRADWIRE_SANITIZED
  const std::vector<int64_t> counts = {20011}, sizes = {500};
#else
  const std::vector<int64_t> counts = {7, 1000, 20011}, sizes = {64, 500, 5000};
#endif
  for_schedules({6}, std::vector<Wire>{kFp32, kBf16, wire_format("fp8")},
                [&](const Schedule& schedule, Wire wire) {
                  for (int64_t count : counts) {
                    const Values inputs = normals(6, count, 10), residuals = normals(6, count, 20, 0.01f);
                    const Rounding rounding = wire == kBf16 ? Rounding::stochastic : Rounding::nearest;
                    Program::Options options{.what = "test",
                                             .wire = wire,
                                             .fp32_intra_node = count == 1000,
                                             .scale = 1.0f / 6,
                                             .rounding = {rounding, 42, nullptr, 0}};
                    const Outcome whole = run(schedule, inputs, residuals, options);
                    for (int64_t slice_bytes : sizes) {
                      options.slice_bytes = slice_bytes;
                      const Outcome sliced = run(schedule, inputs, residuals, options);
                      for (int r = 0; r < 6; ++r) {
                        ASSERT_TRUE(same_bits(whole.result[r], sliced.result[r]) &&
                                    same_bits(whole.residual[r], sliced.residual[r]))
                            << "count=" << count << " slices of " << slice_bytes << ", rank " << r;
                      }
                    }
                  }
                });
}

TEST_P(AllreduceTest, TwoShotStaysFlatWhereARingsErrorGrows) {
  auto error = [&](const Schedule& schedule) {
    const Values inputs = normals(schedule.world, 4000, 300);
    const Outcome outcome = run(schedule, inputs, {}, {.what = "test", .wire = kBf16});
    double difference = 0, size = 0;
    for (size_t i = 0; i < inputs[0].size(); ++i) {
      double exact = 0;
      for (const auto& input : inputs) exact += input[i];
      difference += (outcome.result[0][i] - exact) * (outcome.result[0][i] - exact);
      size += exact * exact;
    }
    return std::sqrt(difference / size);
  };
#ifdef GRADWIRE_SANITIZED
  constexpr int kMany = 16;
#else
  constexpr int kMany = 64;
#endif
  const double few = error(two_shot(2)), many = error(two_shot(kMany));
  EXPECT_GT(few, 1e-4);  // the wire rounds
  EXPECT_LT(many, 1.2 * few);
  EXPECT_LT(many, 2.5e-3);
  EXPECT_NEAR(error(ring(2)), few, 0.1 * few);
  EXPECT_GT(error(ring(kMany)), 0.5 * std::sqrt(kMany / 2) * few);
}

GW_INSTANTIATE_ON_DEVICES(AllreduceTest);

}  // namespace
}  // namespace gradwire::testing
