// Reduce-scatter and all-gather: together the halves of an allreduce give its result, and lose nothing.
#include <gtest/gtest.h>

#include "runtime/error.h"
#include "tests/collectives/group.h"
#include "tests/collectives/program_runs.h"
#include "tests/devices.h"

namespace gradwire {
namespace {

using testing::allreduce;
using testing::HalfOutcome;
using testing::norm;
using testing::Outcome;
using testing::run_half;
using testing::same_bits;
using testing::schedules;
using testing::shard_of;

class HalvesTest : public ::testing::TestWithParam<Device> {
 protected:
  static constexpr int64_t kCounts[] = {0, 1, 7, 64, 1000, 4099};
};

// With FP32, an allreduce equals its two halves bit for bit: each owner's shard is its part of the result,
// and gathering the shards gives all of it. Nothing else is written, and the inputs stay unchanged.
TEST_P(HalvesTest, ReduceScatterThenAllGatherIsAllreduce) {
  for (int world : {1, 2, 3, 5, 8}) {
    for (const Schedule& schedule : schedules(world)) {
      for (int64_t count : kCounts) {
        std::vector<std::vector<float>> inputs;
        for (int r = 0; r < world; ++r) inputs.push_back(testing::normal(count, 300 + r));
        const Program::Options mean{.what = "test", .scale = 1.0f / static_cast<float>(world)};
        const Outcome whole = allreduce(GetParam(), schedule, inputs, {}, mean);
        const HalfOutcome scattered = run_half(GetParam(), reduce_scatter(schedule), count, inputs, {}, mean);
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(scattered.in[r], inputs[r])) << name(schedule.kind) << " n=" << world;
          ASSERT_TRUE(same_bits(scattered.out[r], shard_of(schedule, r, whole.result[0], 8)))
              << name(schedule.kind) << " n=" << world << " count=" << count << " rank " << r;
        }
        const HalfOutcome gathered =
            run_half(GetParam(), all_gather(schedule), count, scattered.out, {}, {.what = "test"});
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(gathered.in[r], scattered.out[r]));
          ASSERT_TRUE(same_bits(gathered.out[r], whole.result[0])) << name(schedule.kind) << " rank " << r;
        }
      }
    }
  }
}

// With every wire that rounds: what the owners hold plus all new residuals is the sum of the inputs. The
// owner adds exactly, so its own residual is zero in its shard.
TEST_P(HalvesTest, ReduceScatterLosesNothing) {
  for (Wire wire : wire_formats().subspan(1)) {
    for (int world : {1, 2, 3, 4, 8}) {
      for (const Schedule& schedule : schedules(world)) {
        for (bool fp32_intra_node : {false, true}) {
          if (fp32_intra_node && schedule.kind != ScheduleKind::hierarchical) continue;
          for (int64_t count : {int64_t{1}, int64_t{1000}, int64_t{4099}}) {
            std::vector<std::vector<float>> inputs, residuals;
            for (int r = 0; r < world; ++r) {
              inputs.push_back(testing::normal(count, 100 + r));
              residuals.push_back(testing::normal(count, 200 + r, 0.01f));
            }
            const HalfOutcome outcome =
                run_half(GetParam(), reduce_scatter(schedule), count, inputs, residuals,
                         {.what = "test", .wire = wire, .fp32_intra_node = fp32_intra_node});
            std::vector<double> after(static_cast<size_t>(count));
            for (int r = 0; r < world; ++r) {
              size_t at = 0;
              for (int c = 0; c < schedule.chunks; ++c) {
                const ChunkRange range = chunk_range(count, schedule.chunks, c, wire->granularity);
                for (int64_t i = range.begin; i < range.end; ++i) {
                  after[i] += outcome.residual[r][i];
                  if (schedule.owner[c] == r) after[i] += outcome.out[r][at++];
                }
              }
            }
            std::vector<double> difference = after, sizes(after.size());
            for (size_t i = 0; i < after.size(); ++i) {
              for (int r = 0; r < world; ++r) {
                difference[i] -= double{inputs[r][i]} + residuals[r][i];
                sizes[i] += std::abs(inputs[r][i]) + std::abs(residuals[r][i]);
              }
            }
            ASSERT_LE(norm(difference), 1e-6 * norm(sizes))
                << wire->name << " " << name(schedule.kind) << " n=" << world;
          }
        }
      }
    }
  }
}

// Every rank ends with the same bits, and the owner keeps in its residual what its one encode lost.
TEST_P(HalvesTest, AllGatherLosesNothingAndAgrees) {
  for (Wire wire : wire_formats().subspan(1)) {
    for (int world : {2, 3, 4, 8}) {
      for (const Schedule& schedule : schedules(world)) {
        const Schedule gather = all_gather(schedule);
        const int64_t count = 1003;
        const std::vector<float> values = testing::normal(count, 77);
        std::vector<std::vector<float>> shards, residuals;
        for (int r = 0; r < world; ++r) {
          shards.push_back(shard_of(gather, r, values, wire->granularity));
          residuals.push_back(testing::normal(count, 200 + r, 0.01f));
        }
        const HalfOutcome outcome =
            run_half(GetParam(), gather, count, shards, residuals, {.what = "test", .wire = wire});
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(outcome.out[r], outcome.out[0])) << wire->name << " " << name(schedule.kind);
        }
        for (int c = 0; c < gather.chunks; ++c) {
          const int owner = gather.owner[c];
          const ChunkRange range = chunk_range(count, gather.chunks, c, wire->granularity);
          for (int64_t i = range.begin; i < range.end; ++i) {
            ASSERT_NEAR(double{outcome.out[0][i]} + outcome.residual[owner][i],
                        double{values[i]} + residuals[owner][i], 1e-6)
                << wire->name << " " << name(schedule.kind) << " element " << i;
          }
        }
      }
    }
  }
}

// Slices change no bit of a half either.
TEST_P(HalvesTest, SlicesChangeNoBitOfAHalf) {
  const int64_t count = 20011;
  for (const Schedule& whole : {ring(4), two_shot(4), hierarchical(2, 2)}) {
    for (const Schedule& half : {reduce_scatter(whole), all_gather(whole)}) {
      for (Wire wire : {kFp32, kBf16}) {
        std::vector<std::vector<float>> inputs, residuals;
        for (int r = 0; r < 4; ++r) {
          const bool gather = half.collective == Collective::all_gather;
          const int64_t shard = elements_owned(half, r, count, wire->granularity);
          inputs.push_back(testing::normal(gather ? shard : count, 10 + r));
          residuals.push_back(testing::normal(count, 20 + r, 0.01f));
        }
        Program::Options options{.what = "test", .wire = wire};
        const HalfOutcome once = run_half(GetParam(), half, count, inputs, residuals, options);
        options.slice_bytes = 500;
        const HalfOutcome sliced = run_half(GetParam(), half, count, inputs, residuals, options);
        for (int r = 0; r < 4; ++r) {
          ASSERT_TRUE(same_bits(once.out[r], sliced.out[r]) &&
                      same_bits(once.residual[r], sliced.residual[r]))
              << name(half.collective) << " " << name(half.kind) << " " << wire->name;
        }
      }
    }
  }
}

GW_INSTANTIATE_ON_DEVICES(HalvesTest);

}  // namespace
}  // namespace gradwire
