// Reduce-scatter and all-gather, the halves of an allreduce. Together they give the allreduce's result and
// conserve the inputs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>

#include "runtime/util/error.h"
#include "tests/collectives/group.h"
#include "tests/collectives/program_runs.h"
#include "tests/support/devices.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

class HalvesTest : public ::testing::TestWithParam<Device> {
 protected:
  static constexpr int64_t kCounts[] = {0, 1, 7, 64, 1000, 4099};
};

// Expects an FP32 allreduce to equal its two halves bit for bit. Each owner's shard is the owner's part of
// the result, and the gathered shards are the whole result. No other memory is written, and the inputs are
// unchanged.
TEST_P(HalvesTest, ReduceScatterThenAllGatherIsAllreduce) {
  const std::vector<Wire> fp32 = {kFp32};
  for_schedules(thinned({1, 2, 3, 5, 8}), fp32, [&](const Schedule& schedule, Wire) {
    for (int64_t count : thinned(kCounts)) {
      const Values inputs = normals(schedule.world, count, 300);
      const Program::Options mean{.what = "test", .scale = 1.0f / static_cast<float>(schedule.world)};
      const Outcome whole = allreduce(GetParam(), schedule, inputs, {}, mean);
      const HalfOutcome scattered = run_half(GetParam(), reduce_scatter(schedule), count, inputs, {}, mean);
      const HalfOutcome gathered =
          run_half(GetParam(), all_gather(schedule), count, scattered.out, {}, {.what = "test"});
      for (int r = 0; r < schedule.world; ++r) {
        SCOPED_TRACE(fmt::format("count {} rank {}", count, r));
        ASSERT_TRUE(same_bits(scattered.in[r], inputs[r]));
        ASSERT_TRUE(same_bits(scattered.out[r], shard_of(schedule, r, whole.result[0], 8)));
        ASSERT_TRUE(same_bits(gathered.in[r], scattered.out[r]));
        ASSERT_TRUE(same_bits(gathered.out[r], whole.result[0]));
      }
    }
  });
}

TEST_P(HalvesTest, SlicesChangeNoBitOfAHalf) {
  const int64_t count = 20011;
  for (const Schedule& whole : {ring(4), two_shot(4), hierarchical(2, 2)}) {
    for (const Schedule& half : {reduce_scatter(whole), all_gather(whole)}) {
      for (Wire wire : {kFp32, kBf16}) {
        Values inputs, residuals;
        for (int r = 0; r < 4; ++r) {
          const bool gather = half.collective == Collective::all_gather;
          const int64_t shard = elements_owned(half, r, count, wire->granularity);
          inputs.push_back(normal(gather ? shard : count, 10 + r));
          residuals.push_back(normal(gather ? shard : count, 20 + r, 0.01f));
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

// Returns shards that a caller may choose: uneven, empty, at any alignment, or all elements on one rank.
std::vector<Shards> odd_shards(int world) {
  std::vector<Shards> all(3);
  for (int r = 0; r < world; ++r) {
    all[0].push_back(r % 3 == 1 ? 0 : 37 + 211 * r);
    all[1].push_back(r == world - 1 ? 1003 : 0);
    all[2].push_back(r + 1);
  }
  return all;
}

std::vector<Schedule> schedules_for_shards(int world) {
  std::vector<Schedule> all = schedules(world);
  std::erase_if(all, [](const Schedule& s) { return s.kind == ScheduleKind::tree; });
  all.push_back(pipelined(ring(world), 3));
  all.push_back(pipelined(two_shot(world), 5));
  return all;
}

std::vector<float> part(const std::vector<float>& whole, const Shards& shards, int rank) {
  const int64_t begin = std::accumulate(shards.begin(), shards.begin() + rank, int64_t{0});
  return {whole.begin() + begin, whole.begin() + begin + shards[rank]};
}

// Expects each rank to get the sum of the shard that the caller assigned to the rank. A two-shot's bits do
// not depend on the shard boundaries. Gathering the shards gives the same bits to all ranks, also in place.
TEST_P(HalvesTest, ShardsOfAnySizeGetTheSumOfTheirRange) {
  for (int world : thinned({1, 2, 3, 5, 8})) {
    for (const Shards& shards : odd_shards(world)) {
      const int64_t count = std::accumulate(shards.begin(), shards.end(), int64_t{0});
      const Values inputs = normals(world, count, 300);
      const Program::Options mean{.what = "test", .scale = 1.0f / static_cast<float>(world)};
      const Outcome whole = allreduce(GetParam(), two_shot(world), inputs, {}, mean);
      for (const Schedule& schedule : schedules_for_shards(world)) {
        const std::string what = fmt::format("{} n={} count={}", name(schedule.kind), world, count);
        const HalfOutcome scattered =
            run_half(GetParam(), reduce_scatter(schedule), count, inputs, {}, mean, shards);
        const HalfOutcome gathered =
            run_half(GetParam(), all_gather(schedule), count, scattered.out, {}, {.what = "test"}, shards);
        std::vector<float> joined;
        for (int r = 0; r < world; ++r) {
          ASSERT_TRUE(same_bits(scattered.in[r], inputs[r])) << what;
          const std::vector<float> want = part(whole.result[0], shards, r);
          for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(scattered.out[r][i], want[i], 2e-6) << what;
          if (schedule.kind == ScheduleKind::two_shot) {
            ASSERT_TRUE(same_bits(scattered.out[r], want)) << what << " rank " << r;
          }
          joined.insert(joined.end(), scattered.out[r].begin(), scattered.out[r].end());
        }
        for (int r = 0; r < world; ++r) ASSERT_TRUE(same_bits(gathered.out[r], joined)) << what;
      }
    }
  }
}

// Expects results plus residuals to equal the inputs, in a reduce-scatter and in an all-gather. Tests every
// wire that rounds, with equal shards and with shards of any size. All ranks gather the same bits.
TEST_P(HalvesTest, LoseNothing) {
  auto check = [&](const Schedule& schedule, const Shards& shards, int64_t count, Program::Options options) {
    const int world = schedule.world;
    const int64_t granularity = options.wire->granularity;
    auto part_of = [&](const std::vector<float>& whole, int rank) {
      return shards.empty() ? shard_of(schedule, rank, whole, granularity) : part(whole, shards, rank);
    };
    const Values inputs = normals(world, count, 100), residuals = normals(world, count, 200, 0.01f);
    Values kept, own;
    for (int r = 0; r < world; ++r) {
      own.push_back(part_of(inputs[r], r));
      kept.push_back(part_of(residuals[r], r));
    }
    const HalfOutcome scattered =
        run_half(GetParam(), reduce_scatter(schedule), count, inputs, residuals, options, shards);
    const HalfOutcome gathered =
        run_half(GetParam(), all_gather(schedule), count, own, kept, options, shards);
    std::vector<double> lost, size, lost_gathering, size_gathering;
    for (int r = 0; r < world; ++r) {
      ASSERT_TRUE(same_bits(gathered.out[r], gathered.out[0]));
      std::vector<double> sum(own[r].size());
      for (int from = 0; from < world; ++from) {
        const auto in = part_of(inputs[from], r), had = part_of(residuals[from], r),
                   has = part_of(scattered.residual[from], r);
        for (size_t i = 0; i < sum.size(); ++i) {
          sum[i] += double{in[i]} + had[i] - has[i];
          size.push_back(in[i]);
        }
      }
      const auto all = part_of(gathered.out[0], r);
      for (size_t i = 0; i < sum.size(); ++i) {
        lost.push_back(sum[i] - scattered.out[r][i]);
        lost_gathering.push_back(double{own[r][i]} + kept[r][i] - all[i] - gathered.residual[r][i]);
        size_gathering.push_back(own[r][i]);
      }
    }
    ASSERT_LE(norm(lost), 1e-6 * norm(size)) << "count " << count;
    ASSERT_LE(norm(lost_gathering), 1e-6 * norm(size_gathering)) << "count " << count;
  };
  const auto rounding_wires = thinned(wire_formats().subspan(1));
  for_schedules(thinned({1, 2, 3, 4, 8}), rounding_wires, [&](const Schedule& schedule, Wire wire) {
    for (bool fp32_intra_node : {false, true}) {
      if (fp32_intra_node && schedule.kind != ScheduleKind::hierarchical) continue;
      for (int64_t count : thinned({int64_t{1}, int64_t{1000}, int64_t{4099}}, 2))
        check(schedule, {}, count, {.what = "test", .wire = wire, .fp32_intra_node = fp32_intra_node});
    }
  });
  for (Wire wire : rounding_wires) {
    for (const Shards& shards : odd_shards(4)) {
      for (const Schedule& schedule : schedules_for_shards(4)) {
        SCOPED_TRACE(fmt::format("{} {}, uneven shards", wire->name, name(schedule.kind)));
        const int64_t count = std::accumulate(shards.begin(), shards.end(), int64_t{0});
        check(schedule, shards, count, {.what = "test", .wire = wire});
      }
    }
  }
}

TEST_P(HalvesTest, RejectsShardsThatNoScheduleSupports) {
  auto error = [&](const Schedule& s, const Shards& shards) -> std::string {
    try {
      chunk_ranges(s, 10, shards);
    } catch (const BadInput& e) {
      return e.what();
    }
    return "accepted";
  };
  EXPECT_EQ(error(reduce_scatter(ring(3)), {5, 5}), "2 shards for 3 ranks");
  EXPECT_EQ(error(reduce_scatter(ring(3)), {5, 5, 5}), "the shards have 15 elements in all, not 10");
  EXPECT_EQ(error(reduce_scatter(ring(3)), {5, -1, 6}), "the shard of rank 1 has -1 elements");
  EXPECT_EQ(error(all_gather(double_tree(4)), {4, 2, 2, 2}).substr(0, 20), "with schedule=tree r");
  EXPECT_EQ(error(all_gather(ring(3)), {10, 0, 0}), "accepted");
}

// Expects every rank to have the root's values: either the FP32 bits, or the transmitted values with the
// rounding error in the root's residual.
TEST_P(HalvesTest, BroadcastGivesAllRanksTheRootsValues) {
  std::vector<Schedule> all;
  for (int world : thinned({1, 2, 3, 4, 5, 8})) {
    for (int root : thinned({0, world / 2, world - 1}, 2)) {
      for (ScheduleKind kind : {ScheduleKind::ring, ScheduleKind::two_shot}) {
        all.push_back(broadcast(kind, world, root));
        all.push_back(pipelined(all.back(), 3));
      }
      for (int nodes = 1; nodes <= world; ++nodes) {
        if (world % nodes == 0) {
          all.push_back(broadcast(ScheduleKind::hierarchical, world, root, {.nodes = nodes}));
        }
      }
    }
  }
  for (const Schedule& schedule : all) {
    for (Wire wire : thinned({kFp32, kBf16, wire_format("int4")}, 2)) {
      for (bool fp32_intra_node : {false, true}) {
        for (int64_t count : thinned({int64_t{0}, int64_t{3}, int64_t{2003}}, 2)) {
          const int root = schedule.owner[0];
          const std::string what = fmt::format("{} {} n={} root {} count {}", wire->name, name(schedule.kind),
                                               schedule.world, root, count);
          Values inputs(static_cast<size_t>(schedule.world)), residuals = inputs;
          inputs[root] = normal(count, 7);
          residuals[root] = normal(count, 8, 0.01f);
          const HalfOutcome outcome =
              run_half(GetParam(), schedule, count, inputs, residuals,
                       {.what = "test", .wire = wire, .fp32_intra_node = fp32_intra_node});
          for (const auto& out : outcome.out) ASSERT_TRUE(same_bits(out, outcome.out[root])) << what;
          if (wire->exact) {
            ASSERT_TRUE(same_bits(outcome.out[root], inputs[root])) << what;
          }
          for (int64_t i = 0; i < count; ++i) {
            const double kept = outcome.residual[root].empty() ? 0 : outcome.residual[root][i];
            const double had = residuals[root].empty() ? 0 : residuals[root][i];
            ASSERT_NEAR(outcome.out[root][i] + kept, inputs[root][i] + had, 1e-6) << what;
          }
        }
      }
    }
  }
}

// Compares errors as the number of ranks grows. A direct reduce-scatter rounds each contribution once and
// adds in FP32, so its error relative to the norm of the exact sum does not grow. A ring rounds a partial sum
// at every hop.
TEST_P(HalvesTest, ErrorOfADirectReduceScatterIsFlatInTheRanks) {
  const int64_t count = 4096;
  auto error = [&](const Schedule& whole) {
    const Schedule schedule = reduce_scatter(whole);
    const Values inputs = normals(schedule.world, count, 40);
    std::vector<double> exact(count), difference;
    for (const auto& input : inputs) {
      for (int64_t i = 0; i < count; ++i) exact[i] += input[i];
    }
    const HalfOutcome outcome =
        run_half(GetParam(), schedule, count, inputs, {}, {.what = "test", .wire = kBf16});
    size_t i = 0;
    for (const auto& shard : outcome.out) {
      for (float value : shard) difference.push_back(value - exact[i++]);
    }
    return norm(difference) / norm(exact);
  };
  const double first = error(two_shot(2));
  double last_ring = 0;
  for (int world : thinned({2, 4, 8, 16, 32, 64})) {
    const double direct = error(two_shot(world)), in_a_ring = error(ring(world));
    RecordProperty(fmt::format("n={}", world),
                   fmt::format("two_shot {:.3e}, ring {:.3e}", direct, in_a_ring));
    // With two ranks, one of two contributions is rounded. With many ranks, almost all contributions are
    // rounded.
    EXPECT_LE(direct, 1.5 * first) << world;
    if (world > 2) {
      EXPECT_GT(in_a_ring, last_ring) << world;
    }
    last_ring = in_a_ring;
    if (world == 64) {
      EXPECT_GT(in_a_ring, 3 * direct);
    }
  }
}

GW_INSTANTIATE_ON_DEVICES(HalvesTest);

}  // namespace
}  // namespace gradwire::testing
