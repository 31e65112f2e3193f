// Tests the results of the C ABI, and that loaded states continue training bit for bit.
#include <cmath>

#include "kernels/math/small_float.h"
#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

using capi::Model;
using capi::normal;
using capi::run_ranks;
using capi::stats_of;

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);  // exact for the small integers used here
}
float from_bf16(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

TEST(CApi, VersionAndStatusTextsAreThoseOfTheHeader) {
  EXPECT_EQ(gw_version(), GW_VERSION_MAJOR * 10000 + GW_VERSION_MINOR * 100 + GW_VERSION_PATCH);
  EXPECT_STREQ(gw_status_string(GW_OK), "GW_OK");
  EXPECT_STREQ(gw_status_string(GW_COMM_FAILED), "GW_COMM_FAILED");
  EXPECT_STREQ(gw_status_string(99), "not a gw_status");
}

TEST(CApi, AllreduceSumsAndAveragesIntegersExactly) {
  for (int world : {1, 2, 3, 4}) {
    for (const char* spec : {"fp32", "bf16", "bf16:schedule=ring"}) {
      for (int64_t count : {0, 1, 7, 63, 1025}) {
        for (gw_op op : {GW_SUM, GW_AVG}) {
          run_ranks(world, [&](gw_comm comm, int rank) {
            // Rank r holds i % 5 + r. So sums stay below 256, where BF16 is exact.
            std::vector<float> a(count + 1, -1.0f);  // the last element must not change
            std::vector<uint16_t> b(count + 1, to_bf16(-1.0f)), h(count + 1, gradwire::float_to_fp16(-1.0f));
            for (int64_t i = 0; i < count; ++i) {
              a[i] = static_cast<float>(i % 5 + rank);
              b[i] = to_bf16(a[i]);
              h[i] = gradwire::float_to_fp16(a[i]);
            }
            GW_ASSERT_OK(gw_allreduce(comm, a.data(), count, GW_FLOAT32, op, spec, nullptr, nullptr));
            GW_ASSERT_OK(gw_allreduce(comm, b.data(), count, GW_BFLOAT16, op, spec, nullptr, nullptr));
            GW_ASSERT_OK(gw_allreduce(comm, h.data(), count, GW_FLOAT16, op, spec, nullptr, nullptr));
            for (int64_t i = 0; i < count; ++i) {
              double sum = static_cast<double>(world * (i % 5)) + world * (world - 1) / 2.0;
              double want = op == GW_AVG ? sum / world : sum;
              // Averages over 3 are not exact.
              EXPECT_NEAR(a[i], want, std::abs(want) * 1e-6) << world << spec << count;
              EXPECT_NEAR(from_bf16(b[i]), want, std::abs(want) / 256) << world << spec << count;
              EXPECT_NEAR(gradwire::fp16_to_float(h[i]), want,
                          std::abs(want) / (spec[0] == 'f' ? 2048 : 256));
            }
            EXPECT_EQ(a[count], -1.0f);
            EXPECT_EQ(b[count], to_bf16(-1.0f));
            EXPECT_EQ(h[count], gradwire::float_to_fp16(-1.0f));
          });
        }
      }
    }
  }
}

TEST(CApi, HierarchicalSchedulesNeedTheNumberOfRanksPerNode) {
  capi::run_ranks(4, [](gw_comm comm, int rank) {
    std::vector<float> buffer(100, static_cast<float>(rank));
    auto allreduce = [&] { return capi::sum(comm, buffer, "bf16:schedule=hierarchical,intra_node=fp32"); };
    GW_EXPECT_BAD("needs the number of ranks per node", allreduce());
  });
  const auto on_nodes_of = [](int ranks_per_node, const std::function<void(gw_comm_options&, int)>& body) {
    const std::string name = capi::fresh_name();
    capi::in_threads(4, [&](int rank) {
      auto options = capi::comm_options(name.c_str(), rank, 4);
      options.ranks_per_node = ranks_per_node;
      body(options, rank);
    });
  };
  for (int wrong : {3, -2}) {
    on_nodes_of(wrong, [&](gw_comm_options& options, int) {
      gw_comm comm = nullptr;
      GW_EXPECT_BAD(std::to_string(wrong) + " ranks per node do not divide", gw_comm_create(&options, &comm));
    });
  }
  on_nodes_of(2, [&](gw_comm_options& options, int rank) {
    gw_comm comm = nullptr;
    GW_ASSERT_OK(gw_comm_create(&options, &comm));
    EXPECT_EQ(capi::query(comm).ranks_per_node, 2);
    std::vector<float> buffer(100, static_cast<float>(rank));
    GW_EXPECT_OK(capi::sum(comm, buffer, "bf16:schedule=hierarchical,intra_node=fp32"));
    EXPECT_EQ(buffer, std::vector<float>(100, 6.0f));
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

// Reduces more buffers than the library caches programs for. Their sizes make the shared workspace grow. Each
// buffer is used again later.
TEST(CApi, AllreduceRemembersAndForgetsBuffers) {
  run_ranks(2, [](gw_comm comm, int rank) {
    std::vector<std::vector<float>> buffers;
    for (int k = 0; k < 100; ++k) buffers.emplace_back(static_cast<size_t>(k * 17 + 1));
    for (int pass = 0; pass < 3; ++pass) {
      for (auto& b : buffers) {
        std::fill(b.begin(), b.end(), static_cast<float>(rank + pass));
        GW_ASSERT_OK(capi::sum(comm, b));
        for (float v : b) ASSERT_EQ(v, 1.0f + 2 * pass);
      }
    }
  });
}

// Tests a promise of gradwire.h: the average is finite although the sum 4 x 1.5e38 overflows a float. A call
// whose sum overflows leaves no residual for the next call.
TEST(CApi, AveragesOfOverflowingSumsAreFiniteAndLeaveNoResidual) {
  const int64_t count = 1000;
  for (const char* spec :
       {"fp32", "fp32:schedule=ring", "fp32:schedule=tree", "bf16", "bf16:schedule=ring", "fp8", "int8"}) {
    run_ranks(4, [&](gw_comm comm, int rank) {
      const auto close_to = [&](const std::vector<float>& values, float want) {
        for (float x : values) ASSERT_NEAR(x / want, 1.0f, 0.04f) << spec << " on rank " << rank;
      };
      std::vector<float> residual(count), a(count, 1.5e38f);
      GW_ASSERT_OK(gw_allreduce(comm, a.data(), count, GW_FLOAT32, GW_AVG, spec, nullptr,
                                capi::call({.residual = residual.data()})));
      close_to(a, 1.5e38f);
      std::fill(residual.begin(), residual.end(), 0.0f);
      a.assign(count, 1.5e38f + static_cast<float>(rank) * 1e35f);
      GW_ASSERT_OK(gw_allreduce(comm, a.data(), count, GW_FLOAT32, GW_SUM, spec, nullptr,
                                capi::call({.residual = residual.data()})));
      for (float x : a) ASSERT_FALSE(std::isfinite(x)) << spec;
      a.assign(count, 1.0f);
      GW_ASSERT_OK(gw_allreduce(comm, a.data(), count, GW_FLOAT32, GW_SUM, spec, nullptr,
                                capi::call({.residual = residual.data()})));
      close_to(a, 4.0f);
      if (std::string(spec).find("tree") != std::string::npos) return;  // a tree has no reduce-scatter
      const std::vector<int64_t> counts(4, count / 4);
      std::vector<float> in(count, 1.5e38f), shard(count / 4);
      GW_ASSERT_OK(gw_reduce_scatter(comm, in.data(), shard.data(), counts.data(), GW_FLOAT32, GW_AVG, spec,
                                     nullptr, nullptr));
      close_to(shard, 1.5e38f);
    });
  }
}

TEST(CApi, StochasticRoundingDiffersFromCallToCall) {
  run_ranks(2, [](gw_comm comm, int) {
    std::vector<float> buffer(1000), first;
    for (int call = 0; call < 2; ++call) {
      std::fill(buffer.begin(), buffer.end(), 1.001f);
      GW_ASSERT_OK(gw_allreduce(comm, buffer.data(), 1000, GW_FLOAT32, GW_AVG, "bf16:round=stochastic",
                                nullptr, nullptr));
      if (call == 0) first = buffer;
    }
    EXPECT_NE(first, buffer);
  });
}

class EverySpec : public ::testing::TestWithParam<const char*> {};

constexpr int kSteps = 3, kWorld = 3;
enum class Layout { packed, scattered, overlapped };

// Returns this rank's gradients of one step, packed.
std::vector<float> gradients_of(const Model& model, int step, int rank) {
  return normal(model.elements(), static_cast<unsigned>(step * kWorld + rank));
}

void average_once(gw_reducer reducer, const std::vector<void*>& addresses, int rank, Layout layout) {
  if (layout != Layout::overlapped) {
    GW_ASSERT_OK(gw_reducer_allreduce(reducer, addresses.data(), nullptr, nullptr));
    return;
  }
  for (size_t i = 0; i < addresses.size(); ++i) {  // ranks may use different orders
    auto tensor = static_cast<int32_t>((i + static_cast<size_t>(rank)) % addresses.size());
    GW_ASSERT_OK(gw_reducer_ready(reducer, tensor, nullptr));
  }
  GW_ASSERT_OK(gw_reducer_wait(reducer, nullptr, nullptr));
}

void expect_stats(gw_reducer reducer, Layout layout) {
  const gw_stats stats = stats_of(reducer);
  EXPECT_EQ(stats.steps, kSteps);
  EXPECT_GE(stats.buckets, 2);
  EXPECT_EQ(stats.buckets_in_place, layout == Layout::scattered ? 0 : stats.buckets);
  EXPECT_GT(stats.wire_bytes, 0u);
  EXPECT_GT(stats.comm_ms, 0.0);
  gradwire::testing::expect_has(stats.description, {"bucket 0"});
}

// Averages gradients in kSteps steps. Returns the last step's result, packed.
std::vector<float> average(gw_comm comm, int rank, const char* spec, Layout layout) {
  const Model model;
  std::vector<float> flat(model.elements()), result;
  std::vector<std::vector<float>> pieces;
  for (size_t i = 0; i < model.names.size(); ++i) pieces.emplace_back(model.count(i) + 1);
  auto addresses = model.addresses(flat.data());
  if (layout == Layout::scattered) {
    for (size_t i = 0; i < pieces.size(); ++i) addresses[i] = pieces[i].data();
  }
  const auto how = capi::options(16 << 10);
  gw_reducer made = nullptr;
  GW_EXPECT_OK(capi::create_reducer(comm, spec, model.tensors(flat.data()), &how, &made));
  const capi::Reducer reducer(made);
  for (int s = 0; s < kSteps; ++s) {
    const auto gradients = gradients_of(model, s, rank);
    for (size_t i = 0, at = 0; i < pieces.size(); at += model.count(i++)) {
      if (model.count(i) > 0) std::memcpy(addresses[i], &gradients[at], model.count(i) * sizeof(float));
    }
    average_once(made, addresses, rank, layout);
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto* tensor = static_cast<const float*>(addresses[i]);
    result.insert(result.end(), tensor, tensor + model.count(i));
  }
  expect_stats(made, layout);
  return result;
}

// Checks that the results have the same bits on all ranks for packed, scattered and overlapped gradients.
// With fp32 the results are the mean.
TEST_P(EverySpec, PackedScatteredAndOverlappedGradientsGiveTheSameBits) {
  std::vector<std::vector<float>> results;
  for (Layout layout : {Layout::packed, Layout::scattered, Layout::overlapped}) {
    std::vector<std::vector<float>> by_rank(kWorld);
    run_ranks(kWorld,
              [&](gw_comm comm, int rank) { by_rank[rank] = average(comm, rank, GetParam(), layout); });
    results.insert(results.end(), by_rank.begin(), by_rank.end());
  }
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  if (GetParam() != std::string("fp32")) return;
  const Model model;
  std::vector<double> mean(model.elements());
  for (int r = 0; r < kWorld; ++r) {
    const auto last = gradients_of(model, kSteps - 1, r);
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += last[i] / kWorld;
  }
  for (size_t i = 0; i < mean.size(); ++i) ASSERT_NEAR(results[0][i], mean[i], 1e-6);
}

TEST_P(EverySpec, AStateSavedAndLoadedContinuesBitForBit) {
  const Model model;
  constexpr int kBefore = 3, kAfter = 3;
  for (int world : {1, 2, 3}) {
    run_ranks(world, [&](gw_comm comm, int rank) {
      auto step = [&](gw_reducer reducer, int s) {
        auto gradient = normal(model.elements(), static_cast<unsigned>(s * world + rank));
        auto at = model.addresses(gradient.data());
        GW_EXPECT_OK(gw_reducer_allreduce(reducer, at.data(), nullptr, nullptr));
        return gradient;
      };
      capi::Reducer straight(comm, GetParam(), model);
      for (int s = 0; s < kBefore; ++s) step(straight.handle, s);
      auto state = straight.save();
      EXPECT_EQ(state, straight.save()) << "saving changes nothing";

      // Loading a state must replace the state of a reducer that has already made steps.
      capi::Reducer resumed(comm, GetParam(), model);
      step(resumed.handle, 77);
      GW_ASSERT_OK(resumed.load(state));
      EXPECT_EQ(stats_of(resumed.handle).steps, kBefore);
      EXPECT_EQ(stats_of(resumed.handle).wire_bytes, 0u);
      EXPECT_EQ(resumed.save(), state);
      for (int s = kBefore; s < kBefore + kAfter; ++s) {
        auto a = step(straight.handle, s), b = step(resumed.handle, s);
        EXPECT_EQ(a, b) << GetParam() << " world " << world << " step " << s;
      }
      EXPECT_EQ(straight.save(), resumed.save());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(CApi, EverySpec,
                         ::testing::Values("fp32", "bf16", "bf16:round=stochastic,schedule=ring",
                                           "powersgd:rank=2", "powersgd:rank=4,start=2",
                                           "powersgd:rank=2,wire=bf16", "powersgd:rank=3,ef=off", "fp8",
                                           "powersgd:rank=2,wire=fp8", "int8:residual=int8,dense=auto",
                                           "powersgd:rank=2,wire=bf16,residual=bf16", "int4:ef=ef21",
                                           "powersgd:rank=2,ef=ef21",
                                           "topk:k=5,of=256,ef_decay=0.9,momentum=0.9,start=1,ramp=4"),
                         [](const auto& info) {
                           std::string text = info.param;
                           for (char& c : text) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return text;
                         });

// Loads a state, which is stored by tensor, into a reducer with other buckets and another order of tensors.
TEST(CApi, AStateSurvivesAnotherBucketSizeAndOrder) {
  const Model model;
  Model reversed;
  for (auto* v : {&reversed.rows, &reversed.cols}) std::reverse(v->begin(), v->end());
  std::reverse(reversed.names.begin(), reversed.names.end());
  run_ranks(2, [&](gw_comm comm, int rank) {
    capi::Reducer first(comm, "powersgd:rank=2", model, 1),
        second(comm, "powersgd:rank=2", reversed, 1 << 20);
    auto gradient = normal(model.elements(), static_cast<unsigned>(rank));
    GW_ASSERT_OK(first.step(gradient));
    auto state = first.save();
    GW_ASSERT_OK(second.load(state));

    // Both reducers make the next step with the same gradients. The sums over the ranks agree up to rounding.
    auto a = normal(model.elements(), 10u + static_cast<unsigned>(rank));
    auto a_at = model.addresses(a.data());
    std::vector<float> b(a.size());
    auto b_at = reversed.addresses(b.data());
    const size_t n = model.names.size();
    for (size_t i = 0; i < n; ++i) std::memcpy(b_at[n - 1 - i], a_at[i], model.count(i) * sizeof(float));
    GW_ASSERT_OK(gw_reducer_allreduce(first.handle, a_at.data(), nullptr, nullptr));
    GW_ASSERT_OK(gw_reducer_allreduce(second.handle, b_at.data(), nullptr, nullptr));
    for (size_t i = 0; i < n; ++i) {
      for (size_t k = 0; k < model.count(i); ++k) {
        ASSERT_NEAR(static_cast<float*>(a_at[i])[k], static_cast<float*>(b_at[n - 1 - i])[k], 1e-4)
            << model.names[i];
      }
    }
  });
}

// Loads states between reducers with different residual formats: states store residuals in FP32.
TEST(CApi, AStateFitsAReducerWithAnotherResidualFormat) {
  const Model model;
  run_ranks(2, [&](gw_comm comm, int rank) {
    capi::Reducer fp32(comm, "fp8", model), int8(comm, "fp8:residual=int8", model), again(comm, "fp8", model);
    auto gradient = normal(model.elements(), static_cast<unsigned>(rank));
    GW_ASSERT_OK(fp32.step(gradient));
    const auto exact = fp32.save();
    GW_ASSERT_OK(int8.load(exact));
    const auto rounded = int8.save();
    EXPECT_EQ(rounded.size(), exact.size());
    EXPECT_NE(rounded, exact);
    GW_ASSERT_OK(again.load(rounded));
    EXPECT_EQ(again.save(), rounded);
    capi::Reducer other(comm, "bf16", model);
    EXPECT_EQ(other.load(exact), GW_BAD_ARGUMENT);
  });
}

TEST(CApi, AReducerOutlivesTheHandleOfItsCommunicator) {
  const std::string name = capi::fresh_name();
  capi::in_threads(2, [&](int rank) {
    gw_comm comm = nullptr;
    GW_ASSERT_OK(capi::create(name.c_str(), rank, 2, GW_HOST, 60'000, &comm));
    const Model model;
    capi::Reducer reducer(comm, "bf16", model);
    GW_ASSERT_OK(gw_comm_destroy(comm));
    auto gradient = normal(model.elements(), static_cast<unsigned>(rank));
    GW_EXPECT_OK(reducer.step(gradient));
    GW_EXPECT_FAILS(GW_BAD_HANDLE, "destroyed", gw_comm_abort(comm, "too late"));
  });
}

// Overlaps two reducers and an allreduce on one communicator. The operations run in the order of the calls.
TEST(CApi, ReducersOfOneCommunicatorOverlapWithoutMixing) {
  const Model model;
  run_ranks(3, [&](gw_comm comm, int rank) {
    std::vector<float> flat[2] = {std::vector<float>(model.elements()), std::vector<float>(model.elements())};
    gw_reducer reducers[2] = {};
    const auto n = static_cast<int32_t>(model.names.size());
    for (int k = 0; k < 2; ++k) {
      auto tensors = model.tensors(flat[k].data());
      auto how = capi::options(4 << 10);
      GW_ASSERT_OK(gw_reducer_create(comm, "fp32", tensors.data(), n, &how, &reducers[k]));
    }
    for (int s = 0; s < 20; ++s) {
      for (int k = 0; k < 2; ++k) std::fill(flat[k].begin(), flat[k].end(), static_cast<float>(rank + k + s));
      for (int k = 0; k < 2; ++k) {
        for (int32_t i = 0; i < n; ++i) GW_ASSERT_OK(gw_reducer_ready(reducers[k], i, nullptr));
      }
      float one = 1;
      GW_ASSERT_OK(capi::sum(comm, one));
      EXPECT_EQ(one, 3.0f);
      for (int k = 1; k >= 0; --k) GW_ASSERT_OK(gw_reducer_wait(reducers[k], nullptr, nullptr));
      for (int k = 0; k < 2; ++k) {
        for (float v : flat[k]) ASSERT_NEAR(v, 1.0f + k + s, 1e-5);
      }
    }
    for (gw_reducer r : reducers) GW_EXPECT_OK(gw_reducer_destroy(r));
  });
}

// Two lists of shapes in turn: each call uses the memory of an earlier call with its shapes.
TEST(CApi, OrthonormalizeGivesOrthonormalColumnsInEveryCall) {
  run_ranks(1, [&](gw_comm comm, int) {
    const std::vector<std::vector<int64_t>> lists = {{40, 3, 0, 7, 2, 1}, {129, 5, 4}};
    std::vector<float> dependent[4];  // [call]: the second column, which was a copy of the first one
    for (int call = 0; call < 4; ++call) {
      const std::vector<int64_t>& shapes = lists[call % 2];
      const auto n = static_cast<int32_t>(shapes.size() / 3);
      std::vector<size_t> begins;
      size_t end = 0;
      for (int32_t i = 0; i < n; ++i) {
        begins.push_back(end);
        end += static_cast<size_t>(shapes[3 * i] * shapes[3 * i + 1] + 3) / 4 * 4;
      }
      auto values = normal(static_cast<int64_t>(end), static_cast<unsigned>(call));
      for (int64_t r = 0; r < shapes[0]; ++r) values[r * shapes[1] + 1] = values[r * shapes[1]];
      std::vector<int32_t> flags(static_cast<size_t>(n), 0);
      GW_ASSERT_OK(
          gw_orthonormalize(comm, values.data(), shapes.data(), n, 0, 1, call / 2, flags.data(), nullptr));
      for (int32_t i = 0; i < n; ++i) {
        EXPECT_EQ(flags[i], 0);
        const float* factor = values.data() + begins[i];
        for (int64_t a = 0; a < shapes[3 * i + 1]; ++a) {
          for (int64_t b = 0; b <= a; ++b) {
            double product = 0;
            for (int64_t r = 0; r < shapes[3 * i]; ++r) {
              product += double{factor[r * shapes[3 * i + 1] + a]} * factor[r * shapes[3 * i + 1] + b];
            }
            EXPECT_NEAR(product, a == b ? 1.0 : 0.0, 1e-6) << "call " << call << " factor " << i;
          }
        }
      }
      for (int64_t r = 0; r < shapes[0]; ++r) dependent[call].push_back(values[r * shapes[1] + 1]);
    }
    EXPECT_NE(dependent[0], dependent[2]) << "the draws of steps 0 and 1";
    EXPECT_NE(dependent[1], dependent[3]);
  });
}

}  // namespace
