// Tests reduce-scatter, all-gather, updates of replicas and broadcast with shards of any size, between
// threads and over TCP.
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>

#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

using capi::normal;
using gradwire::testing::expect_has;
using Counts = std::vector<int64_t>;
using Floats = std::vector<float>;

int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}
int64_t before(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}
Floats shard(const Floats& whole, const Counts& counts, int rank) {
  const auto begin = whole.begin() + before(counts, rank);
  return {begin, begin + counts[rank]};
}
bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), 4 * a.size()) == 0);
}

// Returns five cuts into shards: even, uneven with empty shards, one non-empty shard, fewer elements than
// ranks, no elements.
std::vector<Counts> counts_for(int world) {
  std::vector<Counts> all(5);
  for (int r = 0; r < world; ++r) {
    all[0].push_back(512);
    all[1].push_back(r % 3 == 1 ? 0 : 33 + 101 * r);
    all[2].push_back(r == world - 1 ? 1003 : 0);
    all[3].push_back(r % 2);
    all[4].push_back(0);
  }
  return all;
}

class CApiSharded : public testing::TestWithParam<const char*> {
 protected:
  void run(int world, const std::function<void(gw_comm, int)>& body) {
    capi::run_ranks_at(capi::fresh_rendezvous(GetParam()), world, 60'000, body, world % 2 == 0 ? 2 : 0);
  }
  std::vector<int> worlds() const {
    return GetParam() == std::string("threads") ? std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}
                                                : std::vector<int>{1, 2, 3, 8};
  }
};

// Checks the bits for separate outputs and for outputs in place, independent of the addresses of earlier
// calls.
TEST_P(CApiSharded, ReduceScatterHasTheBitsOfATwoShotAllreduce) {
  for (int world : worlds()) {
    run(world, [&](gw_comm comm, int rank) {
      for (const Counts& counts : counts_for(world)) {
        for (gw_op op : {GW_SUM, GW_AVG}) {
          const size_t elements = static_cast<size_t>(sum(counts));
          Floats whole = normal(sum(counts), 10 + rank), in = whole, inside = whole;
          GW_EXPECT_OK(gw_allreduce(comm, whole.data(), sum(counts), GW_FLOAT32, op, "fp32:schedule=two_shot",
                                    nullptr, nullptr));
          const Floats want = shard(whole, counts, rank), given = in;
          Floats out(want.size() + 1, -1.5e33f);
          GW_EXPECT_OK(gw_reduce_scatter(comm, in.data(), out.data(), counts.data(), GW_FLOAT32, op,
                                         "fp32:schedule=two_shot", nullptr, nullptr));
          EXPECT_EQ(out.back(), -1.5e33f) << "wrote past the end";
          out.pop_back();
          EXPECT_TRUE(same(out, want)) << world << " ranks, " << elements << " elements";
          EXPECT_TRUE(same(in, given)) << "changed its input";
          GW_EXPECT_OK(gw_reduce_scatter(comm, inside.data(), inside.data() + before(counts, rank),
                                         counts.data(), GW_FLOAT32, op, "fp32:schedule=two_shot", nullptr,
                                         nullptr));
          EXPECT_TRUE(same(shard(inside, counts, rank), want)) << world << " ranks, in place";
        }
      }
    });
  }
}

TEST_P(CApiSharded, EveryScheduleReducesAndGathersShards) {
  for (int world : worlds()) {
    run(world, [&](gw_comm comm, int rank) {
      for (const char* schedule : {"auto", "ring", "two_shot", "hierarchical"}) {
        if (schedule == std::string("hierarchical") && world % 2 != 0) continue;
        const std::string spec = std::string("fp32:schedule=") + schedule;
        for (const Counts& counts : counts_for(world)) {
          Floats want(static_cast<size_t>(sum(counts)));
          for (int r = 0; r < world; ++r) {
            const Floats part = normal(sum(counts), 20 + r);
            for (size_t i = 0; i < want.size(); ++i) want[i] += part[i] / static_cast<float>(world);
          }
          const Floats in = normal(sum(counts), 20 + rank);
          Floats out(static_cast<size_t>(counts[rank])), all(want.size());
          GW_EXPECT_OK(gw_reduce_scatter(comm, in.data(), out.data(), counts.data(), GW_FLOAT32, GW_AVG,
                                         spec.c_str(), nullptr, nullptr));
          GW_EXPECT_OK(gw_all_gather(comm, out.data(), all.data(), counts.data(), GW_FLOAT32, spec.c_str(),
                                     nullptr, nullptr));
          EXPECT_TRUE(same(shard(all, counts, rank), out)) << spec;
          for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(all[i], want[i], 2e-6) << spec << " " << i;
        }
      }
    });
  }
}

TEST_P(CApiSharded, GatheredWeightsHaveTheSameBitsOnAllRanks) {
  for (int world : worlds()) {
    const Counts counts = counts_for(world)[1];
    for (const char* spec : {"fp32", "bf16", "int8", "int4:schedule=ring", "bf16:schedule=two_shot,ef=off"}) {
      std::vector<Floats> gathered(world);
      run(world, [&](gw_comm comm, int rank) {
        Floats& out = gathered[rank];
        out.assign(static_cast<size_t>(sum(counts)), -1.5e33f);
        const Floats weights = normal(sum(counts), 5), mine = shard(weights, counts, rank);
        std::copy(mine.begin(), mine.end(), out.begin() + before(counts, rank));  // in place
        GW_EXPECT_OK(gw_all_gather(comm, out.data() + before(counts, rank), out.data(), counts.data(),
                                   GW_FLOAT32, spec, nullptr, nullptr));
        if (spec == std::string("fp32") || world == 1) {
          EXPECT_TRUE(same(out, weights)) << spec;
        }
      });
      for (const Floats& out : gathered) EXPECT_TRUE(same(out, gathered[0])) << spec << " of " << world;
    }
  }
}

// Sends BF16 elements in the format bf16 without loss.
TEST_P(CApiSharded, Bfloat16TravelsAsItIs) {
  run(3, [&](gw_comm comm, int rank) {
    const Counts counts{5, 0, 130};
    std::vector<uint16_t> all(135), mine;
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(0x3f80 + 7 * i);
    mine.assign(all.begin() + before(counts, rank), all.begin() + before(counts, rank) + counts[rank]);
    std::vector<uint16_t> out(135), root = rank == 1 ? all : std::vector<uint16_t>(135);
    GW_EXPECT_OK(
        gw_all_gather(comm, mine.data(), out.data(), counts.data(), GW_BFLOAT16, "bf16", nullptr, nullptr));
    EXPECT_EQ(out, all);
    GW_EXPECT_OK(gw_broadcast(comm, root.data(), 135, GW_BFLOAT16, 1, "bf16", nullptr, nullptr));
    EXPECT_EQ(root, all);
    std::vector<uint16_t> ones(135, 0x3f80), sums(mine.size());
    GW_EXPECT_OK(gw_reduce_scatter(comm, ones.data(), sums.data(), counts.data(), GW_BFLOAT16, GW_SUM, "bf16",
                                   nullptr, nullptr));
    EXPECT_EQ(sums, std::vector<uint16_t>(mine.size(), 0x4040));  // 3
  });
}

// Moves masters at random for 1000 steps. After each step replicas have the same bits on every rank, and
// their distance from the masters does not grow.
TEST_P(CApiSharded, ReplicasFollowTheirMastersWithoutDrift) {
  const int world = 3, steps = 1000;
  const Counts counts{300, 0, 211};
  const auto all = static_cast<size_t>(sum(counts));
  for (const char* spec : {"int8", "int4", "fp8", "sign", "fp32"}) {
    std::vector<Floats> replicas(world);
    Floats masters(all);
    run(world, [&](gw_comm comm, int rank) {
      Floats replica = normal(sum(counts), 1);
      Floats master = shard(replica, counts, rank);
      double worst_early = 0, worst_late = 0;
      for (int step = 0; step < steps; ++step) {
        const Floats moves = normal(sum(counts), 2 + step, 1e-2f), mine = shard(moves, counts, rank);
        for (size_t i = 0; i < master.size(); ++i) master[i] += mine[i];
        GW_ASSERT_OK(gw_all_gather_update(comm, master.data(), replica.data(), counts.data(), GW_FLOAT32,
                                          spec, nullptr, nullptr));
        double distance = 0, moved = 1e-30;
        for (size_t i = 0; i < master.size(); ++i) {
          const double d = double{replica[static_cast<size_t>(before(counts, rank)) + i]} - master[i];
          distance += d * d, moved += double{mine[i]} * mine[i];
        }
        double& worst = step < steps / 2 ? worst_early : worst_late;
        worst = std::max(worst, std::sqrt(distance / moved));
      }
      EXPECT_LT(worst_late, 3) << spec << ": times one step's move";
      EXPECT_LE(worst_late, 1.3 * worst_early) << spec;
      if (spec == std::string("fp32")) {
        EXPECT_EQ(worst_late, 0);
      }
      replicas[rank] = replica;
      std::copy(master.begin(), master.end(), masters.begin() + before(counts, rank));
    });
    for (const Floats& replica : replicas) EXPECT_TRUE(same(replica, replicas[0])) << spec;
  }
}

TEST_P(CApiSharded, BroadcastGivesAllRanksTheRootsValues) {
  for (int world : worlds()) {
    for (const char* spec :
         {"fp32", "bf16:schedule=ring", "int4:schedule=two_shot", "fp32:schedule=hierarchical"}) {
      if (spec == std::string("fp32:schedule=hierarchical") && world % 2 != 0) continue;
      std::vector<Floats> ends(world);
      const Floats values = normal(1003, 3);
      for (int root : {0, world - 1}) {
        run(world, [&](gw_comm comm, int rank) {
          Floats& mine = ends[rank];
          mine = rank == root ? values : Floats(values.size(), -1.5e33f);
          GW_EXPECT_OK(gw_broadcast(comm, mine.data(), 1003, GW_FLOAT32, root, spec, nullptr, nullptr));
        });
        for (const Floats& end : ends) {
          EXPECT_TRUE(same(end, ends[0])) << spec;
          for (size_t i = 0; i < end.size(); ++i) ASSERT_NEAR(end[i], values[i], 0.5) << spec;
        }
        if (spec == std::string("fp32")) {
          EXPECT_TRUE(same(ends[0], values));
        }
      }
    }
  }
}

// Checks that ranks that make different calls get an error that names each rank's call.
TEST_P(CApiSharded, CallsThatDifferAreRefusedWithBothTexts) {
  struct Call {
    const char* kind = "reduce_scatter";
    Counts counts{3, 4};
    gw_dtype dtype = GW_FLOAT32;
    int root = 0;
    const char* tag = "";
    gw_op op = GW_AVG;
    const char* spec = "bf16";
    int64_t count = 7;  // elements of a broadcast or an allreduce
  };
  auto differ = [&](const Call& one, const Call& other, const std::vector<std::string>& parts) {
    run(2, [&](gw_comm comm, int rank) {
      const Call& c = rank == 0 ? one : other;
      const std::string kind = c.kind;
      Floats in(64, 1.0f), out(64), residual(64);
      const auto tagged = capi::call({.tag = c.tag});
      gw_status status = GW_INTERNAL;
      if (kind == "reduce_scatter") {
        status = gw_reduce_scatter(comm, in.data(), out.data(), c.counts.data(), c.dtype, c.op, c.spec,
                                   nullptr, capi::call({.tag = c.tag, .residual = residual.data()}));
      } else if (kind == "all_gather") {
        status =
            gw_all_gather(comm, in.data(), out.data(), c.counts.data(), c.dtype, c.spec, nullptr, tagged);
      } else if (kind == "all_gather_update") {
        status = gw_all_gather_update(comm, in.data(), out.data(), c.counts.data(), c.dtype, c.spec, nullptr,
                                      tagged);
      } else if (kind == "broadcast") {
        status = gw_broadcast(comm, in.data(), c.count, c.dtype, c.root, c.spec, nullptr, tagged);
      } else {
        status = gw_allreduce(comm, in.data(), c.count, c.dtype, c.op, c.spec, nullptr, tagged);
      }
      EXPECT_EQ(status, GW_COMM_FAILED);
      expect_has(gw_last_error(), parts);
    });
  };
  differ({}, {.counts = {4, 3}}, {"gw_reduce_scatter", "shards 3, 4", "shards 4, 3"});
  differ({}, {.kind = "all_gather"}, {"gw_reduce_scatter", "gw_all_gather"});
  differ({}, {.kind = "allreduce"}, {"gw_reduce_scatter", "gw_allreduce"});
  differ({.kind = "all_gather"}, {.kind = "all_gather_update"},
         {"gw_all_gather of", "gw_all_gather_update of"});
  differ({.kind = "broadcast"}, {.kind = "broadcast", .root = 1}, {"from rank 0", "from rank 1"});
  differ({.kind = "all_gather"}, {.kind = "all_gather", .dtype = GW_BFLOAT16}, {"float32", "bfloat16"});
  differ({.tag = "layer 1"}, {.tag = "layer 2"}, {"'layer 1'", "'layer 2'"});
  differ({}, {.op = GW_SUM}, {"mean of float32", "sum of float32"});
  for (const char* kind : {"reduce_scatter", "all_gather", "all_gather_update", "broadcast"}) {
    differ({.kind = kind}, {.kind = kind, .spec = "int8"}, {"bf16", "int8"});
    differ({.kind = kind, .spec = "int8:schedule=ring"}, {.kind = kind, .spec = "int8:schedule=two_shot"},
           {"schedule=ring", "schedule=two_shot"});
    differ({.kind = kind, .spec = "int8"}, {.kind = kind, .spec = "int8:round=stochastic"},
           {"round=stochastic"});
  }
  for (const char* kind : {"all_gather", "all_gather_update"}) {
    differ({.kind = kind}, {.kind = kind, .counts = {4, 3}}, {"shards 3, 4", "shards 4, 3"});
  }
  differ({}, {.counts = {3, 5}}, {"shards 3, 4", "shards 3, 5"});
  differ({.kind = "broadcast"}, {.kind = "broadcast", .count = 8}, {"(7 ", "(8 "});
  differ({.kind = "broadcast"}, {.kind = "broadcast", .dtype = GW_FLOAT16}, {"float32", "float16"});
  differ({.kind = "broadcast", .tag = "a"}, {.kind = "broadcast", .tag = "b"}, {"'a'", "'b'"});
}

// Passes residuals and addresses that differ between ranks and steps, under one tag.
TEST_P(CApiSharded, ResidualsAndAddressesMayDiffer) {
  run(2, [&](gw_comm comm, int rank) {
    const Counts counts{40, 60};
    for (int step = 0; step < 5; ++step) {
      Floats in(100 + static_cast<size_t>(step), 1.0f), out(60), residual(100);
      GW_EXPECT_OK(gw_reduce_scatter(
          comm, in.data() + step % 3, out.data(), counts.data(), GW_FLOAT32, GW_SUM, "int8", nullptr,
          capi::call({.tag = "w", .residual = (rank + step) % 2 == 0 ? residual.data() : nullptr})));
      for (int64_t i = 0; i < counts[rank]; ++i) {
        ASSERT_NEAR(out[i], 2, 0.05);
      }
    }
  });
}

// With ef_decay, a call first multiplies the residual: new residuals + sum = values + decayed residuals.
TEST_P(CApiSharded, DecaysTheResidualBeforeACall) {
  run(3, [&](gw_comm comm, int rank) {
    const Counts counts{40, 60, 33};
    const int64_t all = sum(counts);
    Floats residual(static_cast<size_t>(all));
    for (int step = 0; step < 4; ++step) {
      const Floats in = normal(all, 10 * step + rank);
      Floats went_in = in, out(static_cast<size_t>(counts[rank]));
      for (size_t i = 0; i < in.size(); ++i) went_in[i] += 0.75f * residual[i];
      GW_ASSERT_OK(gw_reduce_scatter(comm, in.data(), out.data(), counts.data(), GW_FLOAT32, GW_SUM,
                                     "int4:ef_decay=0.75,schedule=ring", nullptr,
                                     capi::call({.tag = "w", .residual = residual.data()})));
      Floats came_out = residual, sums(in.size());
      for (Floats* x : {&went_in, &came_out}) {
        GW_ASSERT_OK(gw_allreduce(comm, x->data(), all, GW_FLOAT32, GW_SUM, "fp32", nullptr, nullptr));
      }
      GW_ASSERT_OK(
          gw_all_gather(comm, out.data(), sums.data(), counts.data(), GW_FLOAT32, "fp32", nullptr, nullptr));
      for (size_t i = 0; i < in.size(); ++i) ASSERT_NEAR(came_out[i] + sums[i], went_in[i], 2e-5) << step;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Between, CApiSharded, testing::Values("threads", "processes"),
                         [](const auto& where) { return std::string(where.param); });

gw_status scatter(gw_comm comm, const void* from, void* to, const int64_t* counts,
                  gw_dtype dtype = GW_FLOAT32, gw_op op = GW_SUM, const char* spec = "fp32",
                  float* residual = nullptr) {
  return gw_reduce_scatter(comm, from, to, counts, dtype, op, spec, nullptr,
                           capi::call({.residual = residual}));
}

TEST(CApiShardedErrors, ReduceScatterChecksEveryArgument) {
  capi::run_ranks(2, [](gw_comm comm, int rank) {
    float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {};
    const int64_t counts[2] = {4, 4}, negative[2] = {4, -4}, huge[2] = {INT64_MAX, INT64_MAX};
    GW_EXPECT_BAD("counts is null", scatter(comm, in, out, nullptr));
    GW_EXPECT_BAD("counts[1] is -4", scatter(comm, in, out, negative));
    GW_EXPECT_BAD("more elements than", scatter(comm, in, out, huge));
    GW_EXPECT_BAD("in is null", scatter(comm, nullptr, out, counts));
    GW_EXPECT_BAD("out is null", scatter(comm, in, nullptr, counts));
    GW_EXPECT_BAD("dtype 7", scatter(comm, in, out, counts, 7));
    GW_EXPECT_BAD("op 9", scatter(comm, in, out, counts, GW_FLOAT32, 9));
    GW_EXPECT_BAD("spec is null", scatter(comm, in, out, counts, GW_FLOAT32, GW_SUM, nullptr));
    for (const char* spec :
         {"powersgd:rank=2", "randk:ratio=0.1", "int8:ef=ef21", "int8:start=2", "int4:ramp=2"}) {
      GW_EXPECT_BAD("use a reducer", scatter(comm, in, out, counts, GW_FLOAT32, GW_SUM, spec));
    }
    GW_EXPECT_BAD("not aligned", scatter(comm, in, reinterpret_cast<char*>(out) + 1, counts));
    GW_EXPECT_BAD("residual is not aligned",
                  scatter(comm, in, out, counts, GW_FLOAT32, GW_SUM, "bf16",
                          reinterpret_cast<float*>(reinterpret_cast<char*>(out) + 2)));
    GW_EXPECT_BAD("is not this rank's place in it", scatter(comm, in, in + 1 + 4 * rank, counts));
    // The communicator still works.
    GW_EXPECT_OK(scatter(comm, in, out, counts));
    EXPECT_EQ(out[0], rank == 0 ? 2.0f : 10.0f);
  });
  capi::run_ranks(4, [](gw_comm comm, int) {
    float in[4] = {}, out[4] = {};
    const int64_t counts[4] = {1, 1, 1, 1};
    GW_EXPECT_BAD("with schedule=tree rank",
                  scatter(comm, in, out, counts, GW_FLOAT32, GW_SUM, "fp32:schedule=tree"));
  });
}

TEST(CApiShardedErrors, AllGathersCheckTheirArguments) {
  capi::run_ranks(2, [](gw_comm comm, int rank) {
    float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {};
    const int64_t counts[2] = {4, 4};
    const auto update = [&](const float* master, gw_dtype dtype, const char* spec,
                            const gw_call_options* call = nullptr) {
      return gw_all_gather_update(comm, master, in, counts, dtype, spec, nullptr, call);
    };
    GW_EXPECT_BAD("is not this rank's place in it",
                  gw_all_gather(comm, in + 1, in, counts, GW_FLOAT32, "fp32", nullptr, nullptr));
    GW_EXPECT_BAD("master overlaps replica", update(in + 4 * rank, GW_FLOAT32, "int8"));
    GW_EXPECT_FAILS(GW_UNSUPPORTED, "keep them in float32", update(out, GW_BFLOAT16, "int8"));
    GW_EXPECT_BAD("use a reducer", update(out, GW_FLOAT32, "powersgd:rank=2"));
    for (const char* spec : {"qsgd:bits=4", "qsgd:bits=4,ef=off", "terngrad:clip=off,ef=off"}) {
      GW_EXPECT_BAD("replicas would drift from their masters", update(out, GW_FLOAT32, spec));
    }
    GW_EXPECT_BAD("it needs block=128, or another format", update(out, GW_FLOAT32, "qsgd:bits=4"));
    const auto residual = capi::call({.residual = out});
    GW_EXPECT_BAD("gw_all_gather_update has no residual", update(out, GW_FLOAT32, "int8", residual));
  });
}

// The residual decides, not ef= in the spec.
TEST(CApiShardedErrors, AResidualThatCouldGrowWithoutBoundIsRefused) {
  capi::run_ranks(2, [](gw_comm comm, int) {
    float in[8] = {1, 2, 3, 4, 5, 6, 7, 8}, out[8] = {}, residual[8] = {};
    const int64_t counts[2] = {4, 4};
    const auto fed_back = capi::call({.residual = residual});
    for (const char* spec : {"qsgd:bits=4", "qsgd:bits=4,ef=off", "terngrad:clip=off"}) {
      for (const gw_call_options* call : {static_cast<const gw_call_options*>(nullptr), &*fed_back}) {
        const auto expect = [call](gw_status status) {
          if (call == nullptr) {
            GW_EXPECT_OK(status);
          } else {
            GW_EXPECT_BAD("or no residual", status);
          }
        };
        expect(gw_allreduce(comm, in, 8, GW_FLOAT32, GW_SUM, spec, nullptr, call));
        expect(gw_reduce_scatter(comm, in, out, counts, GW_FLOAT32, GW_SUM, spec, nullptr, call));
        expect(gw_all_gather(comm, in, out, counts, GW_FLOAT32, spec, nullptr, call));
      }
      GW_EXPECT_OK(gw_broadcast(comm, in, 8, GW_FLOAT32, 0, spec, nullptr, nullptr));
    }
  });
}

TEST(CApiShardedErrors, BroadcastAndAllreduceCheckTheirArguments) {
  capi::run_ranks(2, [](gw_comm comm, int) {
    float values[8] = {}, residual[8] = {};
    const auto broadcast = [&](int root, const char* spec, const gw_call_options* call = nullptr) {
      return gw_broadcast(comm, values, 8, GW_FLOAT32, root, spec, nullptr, call);
    };
    GW_EXPECT_BAD("root is 2 in a world of 2", broadcast(2, "fp32"));
    GW_EXPECT_BAD("schedule=tree has no broadcast", broadcast(0, "fp32:schedule=tree"));
    const auto with_residual = capi::call({.residual = residual});
    GW_EXPECT_BAD("gw_broadcast has no residual", broadcast(0, "int8", with_residual));
    const gw_call_options zeros = {};
    GW_EXPECT_BAD("gw_call_options.size is 0", broadcast(0, "int8", &zeros));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "null",
                    gw_broadcast(nullptr, values, 8, GW_FLOAT32, 0, "fp32", nullptr, nullptr));
    GW_EXPECT_BAD("count is -1",
                  gw_allreduce(comm, values, -1, GW_FLOAT32, GW_SUM, "bf16", nullptr, nullptr));
  });
}

}  // namespace
