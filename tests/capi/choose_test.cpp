// Tests gw_choose().
#include <cmath>
#include <limits>

#include "tests/capi/ranks.h"

namespace {

using Floats = std::vector<float>;
constexpr const char* kSpecs[] = {"fp32", "bf16", "int8", "int4", "powersgd:rank=1"};
constexpr int32_t kCount = std::size(kSpecs);

gw_choose_options choose_options() {
  auto options = capi::sized<gw_choose_options>();
  options.specs = kSpecs;
  options.n_specs = kCount;
  return options;
}

Floats gradients_of(int rank) {
  return capi::normal(static_cast<int64_t>(capi::Model().elements()), static_cast<uint32_t>(rank) + 1);
}

struct Chosen {
  std::vector<gw_trial> trials = std::vector<gw_trial>(kCount);
  int32_t index = -1;
};

gw_status try_choose(gw_comm comm, Floats& gradients, const gw_choose_options* options, Chosen& chosen,
                     const capi::Model& model = {}) {
  const std::vector<gw_tensor> tensors = model.tensors(gradients.data());
  return gw_choose(comm, tensors.data(), static_cast<int32_t>(tensors.size()), options, nullptr,
                   chosen.trials.data(), &chosen.index);
}

Chosen choose(gw_comm comm, Floats gradients, const gw_choose_options& options) {
  Chosen chosen;
  GW_EXPECT_OK(try_choose(comm, gradients, &options, chosen));
  return chosen;
}

// Returns the error of averaging `mean`, the same values on every rank.
double error_of(gw_comm comm, const char* spec, const Floats& mean, int64_t bucket_bytes) {
  const capi::Reducer reducer(comm, spec, {}, bucket_bytes);
  Floats result = mean;
  GW_EXPECT_OK(reducer.step(result));
  double weighted = 0, elements = 0;
  size_t at = 0;
  for (size_t t = 0; t < reducer.model.names.size(); ++t) {
    double norm = 0, change = 0;
    for (const size_t end = at + reducer.model.count(t); at < end; ++at) {
      norm += static_cast<double>(mean[at]) * mean[at];
      change += std::pow(static_cast<double>(result[at]) - mean[at], 2);
    }
    if (norm == 0) continue;
    weighted += static_cast<double>(reducer.model.count(t)) * change / norm;
    elements += static_cast<double>(reducer.model.count(t));
  }
  return std::sqrt(weighted / elements);
}

TEST(CApiChoose, ErrorsAreThoseOfReducersOnTheMean) {
  for (const char* between : {"threads", "processes"}) {
    capi::run_ranks_at(capi::fresh_rendezvous(between), 3, 60'000, [&](gw_comm comm, int rank) {
      gw_choose_options options = choose_options();
      options.bucket_bytes = 16 << 10;
      const Floats mine = gradients_of(rank);
      const Chosen chosen = choose(comm, mine, options);
      Floats mean = mine;
      GW_EXPECT_OK(capi::Reducer(comm, "fp32", {}, options.bucket_bytes).step(mean));
      for (int32_t i = 0; i < kCount; ++i) {
        const double expected = error_of(comm, kSpecs[i], mean, options.bucket_bytes);
        EXPECT_NEAR(chosen.trials[i].error, expected, 1e-6 * expected + 1e-9) << kSpecs[i];
        EXPECT_GT(chosen.trials[i].communicate_ms, 0) << kSpecs[i];
        EXPECT_EQ(chosen.trials[i].exposed_ms, chosen.trials[i].communicate_ms) << kSpecs[i];
      }
      EXPECT_LE(chosen.trials[0].error, 1e-6);
      EXPECT_LT(chosen.trials[1].error, chosen.trials[2].error);
      EXPECT_LT(chosen.trials[2].error, chosen.trials[3].error);
    });
  }
}

TEST(CApiChoose, RanksMakeTheSameChoice) {
  for (double error : {1e-9, 0.003, 0.02, 1.0}) {
    std::vector<Chosen> chosen(4);
    capi::run_ranks(4, [&](gw_comm comm, int rank) {
      gw_choose_options options = choose_options();
      options.error = error;
      chosen[static_cast<size_t>(rank)] = choose(comm, gradients_of(rank), options);
    });
    for (const Chosen& one : chosen) {
      ASSERT_EQ(one.index, chosen[0].index);
      EXPECT_TRUE(one.index == 0 || one.trials[static_cast<size_t>(one.index)].error <= error) << error;
      for (size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(one.trials[i].communicate_ms, chosen[0].trials[i].communicate_ms);
        EXPECT_EQ(one.trials[i].error, chosen[0].trials[i].error);
      }
    }
    if (error == 1e-9) {
      EXPECT_EQ(chosen[0].index, 0);
    }
  }
}

TEST(CApiChoose, AStepThatHidesCommunicationKeepsTheSmallestError) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    gw_choose_options options = choose_options();
    const char* const reversed[] = {"int4", "int8", "fp32"};
    options.specs = reversed;
    options.n_specs = 3;
    options.compute_ms = options.backward_ms = 1e9;
    EXPECT_EQ(choose(comm, gradients_of(rank), options).index, 2);
  });
}

// All steps tie, so that the choice depends on the errors alone.
TEST(CApiChoose, SpecsBeyondTheErrorAreNotChosenExceptTheFirst) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    const char* const specs[] = {"int4", "bf16", "int8"};
    gw_choose_options options = choose_options();
    options.specs = specs;
    options.n_specs = 3;
    options.compute_ms = options.backward_ms = 1e9;
    for (const auto& [error, index] : {std::pair{1e-9, 0}, {1e-3, 0}, {0.01, 1}, {1.0, 1}}) {
      options.error = error;
      EXPECT_EQ(choose(comm, gradients_of(rank), options).index, index) << error;
    }
  });
}

TEST(CApiChoose, BackwardHidesAllButTheLastBucket) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    gw_choose_options options = choose_options();
    options.bucket_bytes = 1;  // a bucket per tensor
    options.compute_ms = options.backward_ms = 1e6;
    const capi::Model model;
    const double last =
        static_cast<double>(model.count(model.names.size() - 1)) / static_cast<double>(model.elements());
    const Chosen chosen = choose(comm, gradients_of(rank), options);
    for (const gw_trial& trial : chosen.trials) {
      EXPECT_NEAR(trial.exposed_ms, last * trial.communicate_ms, 1e-9 * 1e6);
    }
  });
}

TEST(CApiChoose, DoesNotChangeGradientsOrTheReducersOfTheCommunicator) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    const capi::Reducer before(comm, "int8", {}), straight(comm, "int8", {});
    const Floats mine = gradients_of(rank);
    Floats a = mine, b = mine, given = mine;
    const gw_choose_options options = choose_options();
    GW_EXPECT_OK(before.step(a));
    GW_EXPECT_OK(straight.step(b));
    Chosen chosen;
    GW_EXPECT_OK(try_choose(comm, given, &options, chosen));
    EXPECT_EQ(given, mine);
    EXPECT_GE(chosen.index, 0);
    GW_EXPECT_OK(before.step(a));
    GW_EXPECT_OK(straight.step(b));
    EXPECT_EQ(a, b);
  });
}

TEST(CApiChoose, TakesGradientsOf16Bits) {
  for (gw_dtype dtype : {GW_BFLOAT16, GW_FLOAT16}) {
    capi::run_ranks(2, [&](gw_comm comm, int) {
      std::vector<uint16_t> gradient(5000);
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<uint16_t>(0x3000 + 7 * i % 1001);
      auto tensor = capi::sized<gw_tensor>();
      tensor.rows = 50;  // a matrix, because int4 does not compress a short vector
      tensor.cols = 100;
      tensor.dtype = dtype;
      tensor.grad = gradient.data();
      const gw_choose_options options = choose_options();
      Chosen chosen;
      GW_ASSERT_OK(gw_choose(comm, &tensor, 1, &options, nullptr, chosen.trials.data(), &chosen.index));
      EXPECT_EQ(chosen.trials[0].error, 0);
      EXPECT_EQ(chosen.trials[1].error == 0, dtype == GW_BFLOAT16);  // bf16 is lossless for bfloat16
      EXPECT_GT(chosen.trials[3].error, 0);
    });
  }
}

TEST(CApiChoose, AWorldOf1KeepsTheFirstSpec) {
  capi::run_ranks(1, [&](gw_comm comm, int rank) {
    const Chosen chosen = choose(comm, gradients_of(rank), choose_options());
    EXPECT_EQ(chosen.index, 0);
    EXPECT_EQ(chosen.trials[2].communicate_ms, 0);
  });
}

TEST(CApiChoose, RefusesGradientsWithoutAnErrorAndServesTheNextCall) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    const gw_choose_options options = choose_options();
    Floats zero(capi::Model().elements()), infinite = gradients_of(rank);
    Chosen chosen;
    GW_EXPECT_BAD("is zero", try_choose(comm, zero, &options, chosen));
    if (rank == 1) infinite[100] = std::numeric_limits<float>::quiet_NaN();
    GW_EXPECT_BAD("not finite", try_choose(comm, infinite, &options, chosen));
    EXPECT_EQ(chosen.index, -1);
    EXPECT_GE(choose(comm, gradients_of(rank), options).index, 0);
  });
}

TEST(CApiChoose, RefusesInvalidArgumentsByName) {
  capi::run_ranks(1, [&](gw_comm comm, int) {
    Floats gradients = gradients_of(0);
    Chosen chosen;
    const auto refused = [&](const char* part, const gw_choose_options& options) {
      GW_EXPECT_BAD(part, try_choose(comm, gradients, &options, chosen));
    };
    const auto with_spec = [&](const char* const& spec) {
      gw_choose_options options = choose_options();
      options.specs = &spec;
      options.n_specs = 1;
      return options;
    };
    for (const char* spec : {"int8:start=3", "int4:ramp=5", "topk:k=41,momentum=0.9", "dion:rank=2"}) {
      refused(spec, with_spec(spec));
    }
    refused("int9", with_spec("int9"));
    gw_choose_options options = choose_options();
    options.n_specs = 0;
    refused("n_specs is 0", options);
    options = choose_options();
    options.error = -1;
    refused("error is -1", options);
    options = choose_options();
    options.backward_ms = 5;
    refused("backward_ms is 5", options);
    options = choose_options();
    const capi::Model model;
    std::vector<gw_tensor> tensors = model.tensors(gradients.data());
    tensors[1].grad = nullptr;
    GW_EXPECT_BAD("'tall'", gw_choose(comm, tensors.data(), static_cast<int32_t>(tensors.size()), &options,
                                      nullptr, nullptr, &chosen.index));
    GW_EXPECT_BAD("n_tensors is 0",
                  gw_choose(comm, tensors.data(), 0, &options, nullptr, nullptr, &chosen.index));
  });
}

TEST(CApiChoose, NamesTheStatementOnWhichRanksDisagree) {
  capi::run_ranks(2, [&](gw_comm comm, int rank) {
    gw_choose_options options = choose_options();
    options.error = rank == 0 ? 0.1 : 0.2;
    Floats gradients = gradients_of(rank);
    Chosen chosen;
    GW_EXPECT_FAILS(GW_COMM_FAILED, "error 0.2", try_choose(comm, gradients, &options, chosen));
  });
}

}  // namespace
