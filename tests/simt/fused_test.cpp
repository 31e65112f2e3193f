// Allreduces over peer memory (kernels/wire/fused.h) on the CPU. The kernels of all ranks run concurrently,
// and their results equal those of a two-shot by messages bit for bit.
#include "kernels/wire/fused.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "kernels/wire/formats.h"
#include "tests/kernels/compare.h"
#include "tests/kernels/two_shot.h"
#include "tests/simt/peer_group.h"
#include "tests/simt/runtime.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

struct Case {
  Wire wire = kFp32;
  int world = 2;
  int64_t count = 100;
  bool one_shot = false;
  bool residual = true;
  Rounding mode = Rounding::nearest;
  int64_t shift = 0;  // offset of the floats, in elements, from a 16-byte boundary on odd ranks
  int calls = 1;
  bool poison = false;  // whether each chunk contains NaN and huge values
};

// Returns chunk boundaries as in a schedule: multiples of the format's block size. Chunks have unequal
// lengths and may be empty.
std::vector<int64_t> cut(const Case& c) {
  const int64_t grain = c.wire->granularity, blocks = (c.count + grain - 1) / grain;
  std::vector<int64_t> begin;
  for (int r = 0; r <= c.world; ++r) begin.push_back(std::min(c.count, blocks * r / c.world * grain));
  return begin;
}

class Fused {
 public:
  explicit Fused(const Case& c) : c_(c), begin_(cut(c)), step_(7) {
    const auto n = static_cast<size_t>(c.count);
    for (int call = 0; call < c.calls; ++call) {
      TwoShot& t = plans_.emplace_back();
      t.wire = c.wire;
      t.begin = begin_;
      t.scale = 1.0f / static_cast<float>(c.world);
      t.mode = c.mode;
      t.step = step_;
      t.first_element = 40 * call;
      for (int r = 0; r < c.world; ++r) {
        t.inputs.push_back(values(c.count, static_cast<uint32_t>(100 * call + r), 8.0f));
        for (int64_t i = 3; c.poison && i < c.count; i += 37) {
          const size_t at = static_cast<size_t>(i);
          t.inputs[r][at] = r == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.37e38f;
        }
        if (c.residual)
          t.residuals.push_back(values(c.count, static_cast<uint32_t>(100 * call + r + 50), 0.1f));
        t.seeds.push_back(static_cast<uint64_t>(r) * 77 + 5);
      }
    }
    for (int r = 0; r < c.world; ++r) {
      const size_t shift = r % 2 == 1 ? static_cast<size_t>(c.shift) : 0;
      for (int call = 0; call < c.calls; ++call) {
        data_.push_back(std::vector<float>(shift + n, -1.0f));
        std::copy(plans_[call].inputs[r].begin(), plans_[call].inputs[r].end(), data_.back().begin() + shift);
        kept_.push_back(std::vector<float>(shift + n, -1.0f));
        if (c.residual) {
          std::copy(plans_[call].residuals[r].begin(), plans_[call].residuals[r].end(),
                    kept_.back().begin() + shift);
        }
      }
    }
  }

  FusedAllreduce arguments(int rank, int call) {
    FusedAllreduce a;
    a.peers.world = c_.world;
    a.one_shot = c_.one_shot;
    a.in = a.out = data(rank, call);
    a.residual = c_.residual ? kept(rank, call) : nullptr;
    a.part_scale = part_scale_for(plans_[call].scale);
    a.scale = plans_[call].scale / a.part_scale;
    a.rounding = {c_.mode, plans_[call].seeds[rank], &step_, plans_[call].first_element};
    for (int r = 0; r < c_.world; ++r) a.seeds[r] = plans_[call].seeds[r];
    for (int r = 0; r <= c_.world; ++r) a.begin[r] = begin_[r];
    half_bytes_ = lay_out(a, c_.wire);
    return a;
  }
  int64_t half_bytes() {
    arguments(0, 0);
    return half_bytes_;
  }

  void launch(simt::Together& together, Group& group) {
    for (int r = 0; r < c_.world; ++r) {
      together.rank(r);
      for (int call = 0; call < c_.calls; ++call) {
        FusedAllreduce a = arguments(r, call);
        a.peers = group.peers[r];
        c_.wire->fused_allreduce(Stream(), a);
      }
    }
  }
  void run(Group& group) {
    simt::Together together(c_.world);
    launch(together, group);
    together.run();
  }

  void expect_bits() {
    for (int call = 0; call < c_.calls; ++call) {
      const TwoShotResult expected = two_shot_reference(plans_[call]);
      for (int r = 0; r < c_.world; ++r) {
        SCOPED_TRACE(fmt::format("call {} rank {}", call, r));
        expect_same_bits(data(r, call), expected.result);
        if (c_.residual && !c_.wire->exact) expect_same_bits(kept(r, call), expected.residuals[r]);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }

 private:
  static void expect_same_bits(const float* actual, const std::vector<float>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      if (std::memcmp(&actual[i], &expected[i], sizeof(float)) == 0) continue;
      if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
      ADD_FAILURE() << "element " << i << " is " << actual[i] << ", not " << expected[i];
      return;
    }
  }
  size_t shift(int rank) const { return rank % 2 == 1 ? static_cast<size_t>(c_.shift) : 0; }
  float* data(int rank, int call) { return data_[rank * c_.calls + call].data() + shift(rank); }
  float* kept(int rank, int call) { return kept_[rank * c_.calls + call].data() + shift(rank); }

  const Case c_;
  std::vector<int64_t> begin_;
  uint64_t step_;
  std::vector<TwoShot> plans_;
  std::vector<std::vector<float>> data_, kept_;  // [rank][call]
  int64_t half_bytes_ = 0;
};

void expect_two_shot_bits(const Case& c) {
  SCOPED_TRACE(fmt::format(
      "{} {} ranks {} count {}{}{} shift {}", c.wire->spec(), c.one_shot ? "one-shot" : "two-shot", c.world,
      c.count, c.residual ? " residual" : "", c.mode == Rounding::stochastic ? " stochastic" : "", c.shift));
  Fused fused(c);
  Group group(c.world, fused.half_bytes());
  fused.run(group);
  fused.expect_bits();
}

class FusedAllreduceTest : public ::testing::TestWithParam<Wire> {
 protected:
  const Wire wire = GetParam();
};

TEST_P(FusedAllreduceTest, MatchesATwoShotByMessagesBitForBit) {
  const int64_t grain = wire->granularity;
  const bool slow = grain > 512, variant = *wire->options != 0;
  const std::string_view name = wire->name;
  const bool own_kernel = name == "fp32" || name == "bf16" || name == "fp8" || name == "int8";
  for (bool one_shot : {false, true}) {
    for (int world = 2; world <= 8; ++world) {
      if (variant && world != 3) continue;
      // The count gives more than one tile per block and a remainder, chunks that are empty on some ranks,
      // and a few format blocks per chunk.
      const int64_t count = slow         ? 2 * grain + 5
                            : world == 2 ? 2 * (5 * 2048 + 3 * grain) + 5
                            : world == 5 ? 3 * grain + 1
                            : world == 3 && own_kernel && !variant
                                ? 3 * 20 * 2048 + 5  // more elements than are prefetched
                                : 8 * grain + 3 * world;
      const bool stochastic = wire->stochastic && world % 2 == 0;
      OneSchedule only(slow && world != 3);
      expect_two_shot_bits({.wire = wire,
                            .world = world,
                            .count = count,
                            .one_shot = one_shot,
                            .residual = world % 3 != 0,
                            .mode = stochastic ? Rounding::stochastic : Rounding::nearest,
                            .shift = world == 4 ? 3 : 0});
      if (HasFailure()) return;
    }
  }
}

// The residuals are cleared on every rank, not only on the owner that adds up the result.
TEST_P(FusedAllreduceTest, ClearsResidualsOfNonFiniteResultsOnAllRanks) {
  for (bool one_shot : {false, true}) {
    OneSchedule only(wire->granularity > 512);
    expect_two_shot_bits({.wire = wire,
                          .world = 3,
                          .count = 3 * wire->granularity + 41,
                          .one_shot = one_shot,
                          .shift = 1,
                          .poison = true});
  }
}

TEST_P(FusedAllreduceTest, ConsecutiveCallsDoNotWaitForSlowRanks) {
  if (wire->granularity > 512 || *wire->options != 0) return;
  for (bool one_shot : {false, true}) {
    expect_two_shot_bits(
        {.wire = wire, .world = 3, .count = 3 * wire->granularity + 40, .one_shot = one_shot, .calls = 4});
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, FusedAllreduceTest, ::testing::ValuesIn(example_wire_formats()),
                         [](const ::testing::TestParamInfo<Wire>& info) {
                           std::string name = info.param->spec();
                           for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

// --- planted bugs ---

bool is_found(const Case& c, bool one_half = false) {
  Fused fused(c);
  Group group(c.world, fused.half_bytes());
  for (PeerMemory& m : group.peers) m.half_bytes = one_half ? 0 : m.half_bytes;
  try {
    fused.run(group);
  } catch (const simt::Failure& failure) {
    expect_has(failure.what(), {"depends on the order"});
    return true;
  }
  return false;
}

TEST(FusedAllreduceBugs, MissingBarriersAreFound) {
  for (const char* wire : {"fp32", "bf16", "fp8", "int4"}) {
    for (int world : {2, 4, 8}) {
      if (world != 4 && std::string(wire) != "bf16") continue;
      for (int barrier : {0, 1}) {
        for (bool one_shot : {false, true}) {
          if (one_shot && barrier == 1) continue;  // a one-shot has one barrier
          SCOPED_TRACE(fmt::format("{} {} ranks, barrier {}", wire, world, barrier));
          const Case c{
              .wire = wire_format(wire), .world = world, .count = world * 3000, .one_shot = one_shot};
          EXPECT_FALSE(is_found(c));
          Unheeded planted(barrier);
          EXPECT_TRUE(is_found(c));
        }
      }
    }
  }
}

// A fast rank overwrites data that slower ranks still read. Two-shots of one layout do not have this bug,
// because a rank does not write first the data that is read last.
TEST(FusedAllreduceBugs, SingleBufferedPeerMemoryIsFound) {
  for (Wire wire : {kFp32, kBf16}) {
    const Case c{.wire = wire, .world = 4, .count = 4000, .one_shot = true, .calls = 4};
    EXPECT_FALSE(is_found(c));
    EXPECT_TRUE(is_found(c, true));
  }
}

// --- missing ranks ---

TEST(FusedAllreduce, ReportsAMissingRankAndEndsTheKernels) {
  const Case c{.wire = kBf16, .world = 3, .count = 3000};
  Fused fused(c);
  Group group(3, fused.half_bytes());
  simt::Together together(3);
  for (int r : {0, 2}) {
    together.rank(r);
    FusedAllreduce a = fused.arguments(r, 0);
    a.peers = group.peers[r];
    a.peers.patience_ns = 2'000'000;  // each check advances the clock by 1 us
    c.wire->fused_allreduce(Stream(), a);
  }
  OneSchedule only(true);  // whether the first checks fail depends on the schedule
  together.run();
  for (int r : {0, 2}) {
    EXPECT_EQ(group.report(r).missing, 2u) << "rank " << r << " waited for rank 1";
    EXPECT_EQ(group.report(r).barrier, 0u);
  }
}

TEST(FusedAllreduce, ReportsADeadlockWhenARankNeverArrives) {
  const Case c{.wire = kFp32, .world = 2, .count = 3000};
  Fused fused(c);
  Group group(2, fused.half_bytes());
  simt::Together together(2);
  FusedAllreduce a = fused.arguments(1, 0);
  a.peers = group.peers[1];
  together.rank(1);
  c.wire->fused_allreduce(Stream(), a);
  try {
    together.run();
    ADD_FAILURE() << "it ended";
  } catch (const simt::Failure& failure) {
    expect_has(failure.what(), {"rank 1", "kernel 'fp32_fused_allreduce'", "deadlock", "block"});
  }
}

TEST(FusedAllreduce, EndsTheKernelsWhenTheHostRequestsIt) {
  const Case c{.wire = kFp32, .world = 2, .count = 3000};
  Fused fused(c);
  Group group(2, fused.half_bytes());
  group.report(0).stop = 1;
  simt::Together together(2);
  FusedAllreduce a = fused.arguments(0, 0);
  a.peers = group.peers[0];
  c.wire->fused_allreduce(Stream(), a);
  together.run();
  EXPECT_EQ(group.report(0).missing, 0u);
}

}  // namespace
}  // namespace gradwire::testing
