// Ranks that make different calls, one argument differing at a time: every rank gets GW_COMM_FAILED and a
// text that names each rank's arguments. Between threads and over TCP.
#include <chrono>

#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

using capi::Model;
using capi::options;
using gradwire::testing::expect_has;

// A rank's calls, and their status and error text.
using Act = std::function<gw_status(gw_comm, int rank)>;
struct Outcome {
  gw_status status = GW_OK;
  std::string text;
  std::chrono::steady_clock::duration took{};
};

// The arguments of a reducer.
struct ReducerCall {
  Model model = {};
  std::string spec = "powersgd:rank=2,schedule=ring";
  gw_reducer_options how = options(8 << 10);
};

gw_status create(gw_comm comm, const ReducerCall& c, gw_reducer* reducer) {
  auto tensors = c.model.tensors();
  return capi::create_reducer(comm, c.spec.c_str(), tensors, &c.how, reducer);
}

class CApiAgreement : public testing::TestWithParam<const char*> {
 protected:
  std::vector<Outcome> outcomes(int world, const Act& act,
                                const std::function<int(int rank)>& ranks_per_node = {}) {
    std::vector<Outcome> all(world);
    const std::string where = capi::fresh_rendezvous(GetParam());
    capi::in_threads(world, [&](int r) {
      gw_comm comm = nullptr;
      auto options = capi::comm_options(where.c_str(), r, world);
      if (ranks_per_node) options.ranks_per_node = ranks_per_node(r);
      GW_ASSERT_OK(gw_comm_create(&options, &comm));
      Outcome& mine = all[r];
      const auto start = std::chrono::steady_clock::now();
      mine.status = act(comm, r);
      mine.text = gw_last_error();
      mine.took = std::chrono::steady_clock::now() - start;
      gw_comm_destroy(comm);
    });
    return all;
  }

  // Expects the call of every rank to fail with a text that contains all of `parts`.
  void expect_refused(const Act& act, const std::vector<std::string>& parts, int world = 2,
                      const std::function<int(int rank)>& ranks_per_node = {}) {
    if (HasFailure()) return;  // each difference that is not noticed takes until the deadline
    for (const Outcome& o : outcomes(world, act, ranks_per_node)) {
      EXPECT_EQ(o.status, GW_COMM_FAILED) << o.text;
      EXPECT_LT(o.took, std::chrono::seconds(30)) << "not noticed, only timed out";
      expect_has(o.text, parts);
    }
  }

  // Creates reducers whose arguments `change` changes on one rank.
  void differ(const std::function<void(ReducerCall&)>& change, const std::vector<std::string>& parts) {
    ReducerCall other;
    change(other);
    for (int odd : {0, 1, 2}) {
      expect_refused(
          [&](gw_comm comm, int rank) {
            gw_reducer reducer = nullptr;
            const gw_status status = create(comm, rank == odd ? other : ReducerCall{}, &reducer);
            gw_reducer_destroy(reducer);
            return status;
          },
          parts, 3);
    }
  }
};

// The arguments of a gw_allreduce.
struct AllreduceCall {
  int64_t count = 1024;
  gw_dtype dtype = GW_FLOAT32;
  gw_op op = GW_AVG;
  std::string spec = "fp32:schedule=ring";
  const char* tag = nullptr;
};

gw_status make(gw_comm comm, const AllreduceCall& c) {
  std::vector<float> buf(4096, 1.0f);
  return gw_allreduce(comm, buf.data(), c.count, c.dtype, c.op, c.spec.c_str(), nullptr,
                      capi::call({.tag = c.tag}));
}

TEST_P(CApiAgreement, AllreduceRefusesEveryArgumentThatDiffers) {
  auto differ = [&](const AllreduceCall& one, const AllreduceCall& other,
                    const std::vector<std::string>& parts) {
    for (int odd : {0, 1}) {
      expect_refused([&](gw_comm comm, int rank) { return make(comm, rank == odd ? other : one); }, parts);
    }
  };
  differ({}, {.count = 1025}, {"1024 floats", "1025 floats"});
  differ({}, {.dtype = GW_BFLOAT16}, {"mean of float32", "mean of bfloat16"});
  differ({.dtype = GW_BFLOAT16}, {.dtype = GW_FLOAT16}, {"mean of bfloat16", "mean of float16"});
  differ({}, {.op = GW_SUM}, {"mean of float32", "sum of float32"});
  differ({}, {.spec = "bf16:schedule=ring"}, {"fp32", "bf16"});
  differ({.spec = "bf16:schedule=ring"}, {.spec = "bf16:round=stochastic,schedule=ring"},
         {"round=stochastic"});
  differ({.spec = "fp32:schedule=ring"}, {.spec = "fp32:schedule=tree"}, {"ring", "tree"});
  differ({.tag = "weight"}, {.tag = "bias"}, {"'weight'", "'bias'"});
  differ({}, {.tag = "bias"}, {"gw_allreduce,", "'bias'"});
  expect_refused(
      [&](gw_comm comm, int rank) {
        return make(comm, {.spec = rank == 2 ? "bf16:schedule=hierarchical,intra_node=fp32"
                                             : "bf16:schedule=hierarchical"});
      },
      {"intra_node=fp32"}, 4, [](int) { return 2; });
  // Error texts abbreviate the middle of long names, where these two names differ.
  const std::string begin(200, 'a'), end(200, 'z');
  const std::string left = begin + "left" + end, right = begin + "right" + end;
  differ({.tag = left.c_str()}, {.tag = right.c_str()}, {"#"});
  // Error texts cut no UTF-8 character: the first two-byte character begins at byte 35.
  std::string umlauts(35, 'u');
  for (int i = 0; i < 40; ++i) umlauts += "\xc3\xbc";
  const std::string other = umlauts + "u";
  differ({.tag = umlauts.c_str()}, {.tag = other.c_str()}, {"'" + std::string(35, 'u') + "...\xc3\xbc"});
}

TEST_P(CApiAgreement, EqualSizedCallsInAnotherOrderAreRefusedByName) {
  for (int world : {2, 3}) {
    expect_refused(
        [&](gw_comm comm, int rank) {
          const bool turned = rank == world - 1;
          const gw_status first = make(comm, {.tag = turned ? "layer 2" : "layer 1"});
          return first != GW_OK ? first : make(comm, {.tag = turned ? "layer 1" : "layer 2"});
        },
        {"'layer 1'", "'layer 2'"}, world);
  }
}

TEST_P(CApiAgreement, ArgumentsThatMayDifferAreAccepted) {
  for (const Outcome& o : outcomes(2, [](gw_comm comm, int rank) {
         std::vector<float> flat(Model().elements() + 8, 1.0f);
         Model model;
         auto tensors = model.tensors(flat.data() + rank);  // each rank passes different addresses
         auto how = options(4 << 10);
         how.no_timing = rank;
         gw_reducer reducer = nullptr;
         GW_EXPECT_OK(capi::create_reducer(comm, "bf16:schedule=ring", tensors, &how, &reducer));
         const auto n = static_cast<int32_t>(tensors.size());
         for (int32_t i = 0; i < n; ++i)
           GW_EXPECT_OK(gw_reducer_ready(reducer, rank == 0 ? i : n - 1 - i, nullptr));
         GW_EXPECT_OK(gw_reducer_wait(reducer, nullptr, nullptr));
         EXPECT_EQ(flat[rank], 1.0f);
         GW_EXPECT_OK(gw_reducer_destroy(reducer));
         float nothing = 0;
         return gw_allreduce(comm, rank == 0 ? nullptr : &nothing, 0, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                             nullptr);
       })) {
    EXPECT_EQ(o.status, GW_OK) << o.text;
  }
}

TEST_P(CApiAgreement, ReducersRefuseTensorsThatDiffer) {
  differ([](auto& c) { c.model.names[3] = "small"; },
         {"tensor 3: 'tiny' (3 x 3)", "tensor 3: 'small' (3 x 3)"});
  differ([](auto& c) { std::swap(c.model.rows[1], c.model.cols[1]); },
         {"'tall' (129 x 31)", "'tall' (31 x 129)"});
  differ([](auto& c) { c.model.dtype = GW_BFLOAT16; }, {"'bias' (37)", "'bias' (37) in bfloat16"});
  differ([](auto& c) { c.model.dtype = GW_FLOAT16; }, {"'bias' (37)", "'bias' (37) in float16"});
  differ(  // a matrix with the same number of elements, but not the transpose
      [](auto& c) { c.model.rows[6] = 32, c.model.cols[6] = 128; },
      {"'square' (64 x 64)", "'square' (32 x 128)"});
  differ(
      [](auto& c) {
        std::swap(c.model.names[1], c.model.names[2]);
        std::swap(c.model.rows[1], c.model.rows[2]);
        std::swap(c.model.cols[1], c.model.cols[2]);
      },
      {"tensor 1: 'tall'", "tensor 1: 'wide'"});
  differ(  // the same number of elements in total, but other tensor sizes
      [](auto& c) {
        c.model.rows[0] -= 1;
        c.model.rows[4] += 1;
      },
      {"'bias' (37)", "'bias' (36)"});
  differ(
      [](auto& c) {
        c.model.names.pop_back();
        c.model.rows.pop_back();
        c.model.cols.pop_back();
      },
      {"tensor 6: 'square' (64 x 64)", "nothing more"});
}

TEST_P(CApiAgreement, ReducersRefuseSpecsAndOptionsThatDiffer) {
  differ([](auto& c) { c.spec = "powersgd:rank=3,schedule=ring"; }, {"rank=2", "rank=3"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,seed=7"; }, {"seed=7"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,warm=off"; }, {"warm=off"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,start=5"; }, {"start=5"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,min_ratio=3"; }, {"min_ratio=3"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,ef=off"; }, {"ef=off"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=ring,wire=bf16"; }, {"wire=bf16"});
  differ([](auto& c) { c.spec = "powersgd:rank=2,schedule=tree"; }, {"schedule=ring", "schedule=tree"});
  differ([](auto& c) { c.spec = "powersgd:rank=2"; }, {"schedule=ring"});
  differ([](auto& c) { c.how.bucket_bytes = 4 << 10; }, {"bucket_bytes 8192", "bucket_bytes 4096"});
  differ([](auto& c) { c.how.sum = 1; }, {"the mean", "the sum"});
  differ([](auto& c) { c.how.seed = 3; }, {"seed 0", "seed 3"});
  differ([](auto& c) { c.how.shard = 1; }, {"not sharded", "sharded"});
  differ([](auto& c) { c.how.tag = "head"; }, {"no tag", "'head'"});
  expect_refused(
      [&](gw_comm comm, int) {
        gw_reducer reducer = nullptr;
        const gw_status status = create(comm, {}, &reducer);
        gw_reducer_destroy(reducer);
        return status;
      },
      {"ranks_per_node 0", "ranks_per_node 1"}, 3, [](int rank) { return rank == 1 ? 1 : 0; });
}

TEST_P(CApiAgreement, AnotherKindOfCallIsRefusedByName) {
  expect_refused(
      [&](gw_comm comm, int rank) {
        GW_EXPECT_OK(make(comm, {}));  // the first call between processes measures the links
        gw_reducer reducer = nullptr;
        const gw_status status = rank == 0 ? make(comm, {}) : create(comm, {}, &reducer);
        gw_reducer_destroy(reducer);
        return status;
      },
      {"gw_allreduce", "gw_reducer_create"});
}

// Steps two reducers of the same tensors in a different order on each rank.
TEST_P(CApiAgreement, ReducersSteppedInAnotherOrderAreRefusedByName) {
  for (const bool tagged : {false, true}) {
    expect_refused(
        [&](gw_comm comm, int rank) {
          gw_reducer reducers[2] = {};
          for (int i : {0, 1}) {
            ReducerCall call;
            if (tagged) call.how.tag = i == 0 ? "encoder" : "decoder";
            GW_EXPECT_OK(create(comm, call, &reducers[i]));
          }
          std::vector<float> flat(Model().elements(), 1.0f);
          auto grads = Model().addresses(flat.data());
          gw_status status = GW_OK;
          for (int i : {0, 1}) {
            if (status == GW_OK)
              status = gw_reducer_allreduce(reducers[(i + rank) % 2], grads.data(), nullptr, nullptr);
          }
          const std::string text = gw_last_error();
          for (gw_reducer r : reducers) gw_reducer_destroy(r);
          return status;
        },
        tagged ? std::vector<std::string>{"reducer 1 'encoder'", "reducer 2 'decoder'"}
               : std::vector<std::string>{"reducer 1", "reducer 2"});
  }
}

TEST_P(CApiAgreement, AStateThatOnlySomeRanksLoadIsRefused) {
  enum class Loads { one_rank, other_steps, other_factors, same };
  for (Loads loads : {Loads::one_rank, Loads::other_steps, Loads::other_factors, Loads::same}) {
    const Act act = [&](gw_comm comm, int rank) {
      gw_reducer reducer = nullptr;
      GW_EXPECT_OK(create(comm, {}, &reducer));
      std::vector<std::vector<char>> saved;
      auto step = [&](unsigned seed) {
        auto flat = capi::normal(Model().elements(), seed + static_cast<unsigned>(rank));
        auto grads = Model().addresses(flat.data());
        return gw_reducer_allreduce(reducer, grads.data(), nullptr, nullptr);
      };
      auto save = [&] {
        size_t size = 0;
        GW_EXPECT_OK(capi::state_size(reducer, &size));
        GW_EXPECT_OK(capi::save_state(reducer, saved.emplace_back(size).data(), size));
      };
      auto load = [&](const std::vector<char>& s) {
        GW_EXPECT_OK(gw_reducer_state_load(reducer, s.data(), s.size()));
      };
      save();
      for (unsigned i = 0; i < 2; ++i) {
        GW_EXPECT_OK(step(10 * i));
        save();
      }
      load(saved[0]);  // makes the same number of steps, with other gradients
      GW_EXPECT_OK(step(100));
      save();
      switch (loads) {
        case Loads::one_rank:
          if (rank == 1) load(saved[1]);
          break;
        case Loads::other_steps:
          load(saved[1 + rank]);
          break;
        case Loads::other_factors:
          load(saved[rank == 0 ? 1 : 3]);
          break;
        case Loads::same:
          load(saved[2]);
          break;
      }
      const gw_status status = step(1000);
      gw_reducer_destroy(reducer);
      return status;
    };
    if (loads == Loads::same) {
      for (const Outcome& o : outcomes(2, act)) EXPECT_EQ(o.status, GW_OK) << o.text;
    } else {
      expect_refused(act, {"loaded state of step"});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CApiAgreement, testing::Values("threads", "processes"),
                         [](const auto& info) { return std::string(info.param); });

TEST(CApiTag, AnAbortsReasonIsPrintable) {
  capi::run_ranks(2, [](gw_comm aborted, int rank) {
    if (rank == 0) {
      GW_EXPECT_OK(gw_comm_abort(aborted, "broken: \xff\n"));
    }
    float value = 1;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "broken: ??", capi::sum(aborted, value));
  });
}

TEST(CApiTag, RejectsTagsThatAreLongOrNotText) {
  gw_comm comm = nullptr;
  GW_EXPECT_OK(capi::create(nullptr, 0, 1, GW_HOST, 1000, &comm));
  float value = 1;
  const auto tagged = [&](const std::string& tag) {
    return gw_allreduce(comm, &value, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr,
                        capi::call({.tag = tag.c_str()}));
  };
  GW_EXPECT_BAD("control character", tagged("two\nlines"));
  GW_EXPECT_BAD("1001 bytes", tagged(std::string(1001, 'x')));
  GW_EXPECT_OK(tagged(std::string(1000, 'x')));
  GW_EXPECT_OK(
      tagged("G\xc3\xbc"
             "te"));
  // Invalid UTF-8: truncated characters, a lone continuation byte, overlong forms, a surrogate, a character
  // above U+10FFFF, Latin-1.
  for (const std::string bad : {"\xc3", "\xe2\x82", "\xf0\x9f\x98", "\x80", "\xc0\x80", "\xe0\x80\x80",
                                "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "G\xfcte"}) {
    for (const std::string& text : {bad, "a" + bad, bad + "a", "\xc3\xbc" + bad + "\xc3\xbc"}) {
      GW_EXPECT_BAD("tag is not UTF-8", tagged(text));
      capi::Model model;
      gw_reducer reducer = nullptr;
      auto tensors = model.tensors();
      const auto n = static_cast<int32_t>(tensors.size());
      auto how = options();
      how.tag = text.c_str();
      GW_EXPECT_BAD("tag is not UTF-8", gw_reducer_create(comm, "fp32", tensors.data(), n, &how, &reducer));
      tensors[1].name = text.c_str();
      GW_EXPECT_BAD("the name of tensor 1 is not UTF-8",
                    gw_reducer_create(comm, "fp32", tensors.data(), n, nullptr, &reducer));
    }
  }
  for (const char* good :
       {"\xe2\x82\xac", "\xf0\x9f\x98\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xf4\x8f\xbf\xbf", "\xc2\x80"}) {
    GW_EXPECT_OK(tagged(good));
  }
  GW_EXPECT_OK(gw_comm_destroy(comm));
}

}  // namespace
