// The reducer, through every compression spec: nothing is lost over many steps, ranks stay bit-identical,
// hard gradients stay contained, and what is wrong is said.
#include "collectives/reducer.h"

#include <gtest/gtest.h>

#include <numeric>

#include "collectives/codec/examples.h"
#include "collectives/transport/planned.h"
#include "kernels/error.h"
#include "tests/collectives/group.h"

namespace gradwire {
namespace {

using testing::norm;
using testing::normal;
using testing::run_ranks;
using testing::same_bits;

// Tensors of odd shapes: vectors, matrices worth compressing and not, a 4-D convolution, a scalar, an empty
// one.
std::vector<GradientTensor> model() {
  return {{"bias", {37}},          {"tall", {129, 31}}, {"wide", {17, 203}},
          {"tiny", {3, 3}},        {"scalar", {}},      {"empty", {0, 5}},
          {"conv", {24, 3, 5, 5}}, {"one", {1}},        {"square", {64, 64}}};
}

int64_t count_of(const GradientTensor& t) {
  return std::accumulate(t.shape.begin(), t.shape.end(), int64_t{1}, std::multiplies<>());
}

// One rank's side of the test: a reducer and a stream to produce and consume gradients on.
struct Rank {
  // In worlds of even size with overlap: messages of these tensors are cut into slices.
  Rank(Communicator& comm, const std::string& spec, std::vector<GradientTensor> tensors, int64_t bucket_bytes)
      : Rank(comm, spec, std::move(tensors), bucket_bytes, comm.world() % 2 == 0 ? 1000 : 0) {}
  Rank(Communicator& comm, const std::string& spec, std::vector<GradientTensor> tensors, int64_t bucket_bytes,
       int64_t slice_bytes)
      : tensors(std::move(tensors)),
        stream(Stream::create(comm.device(), "compute")),
        reducer(comm, CompressionSpec::parse(spec), this->tensors,
                {.bucket_bytes = bucket_bytes, .seed = 5, .slice_bytes = slice_bytes}) {}

  // Writes each tensor's gradient, marks it ready, waits, and returns the averaged flat gradient.
  std::vector<float> step(const std::vector<std::vector<float>>& gradients) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      copy(stream, reducer.gradient(static_cast<int>(i)), gradients[i].data(),
           gradients[i].size() * sizeof(float));
      reducer.ready(static_cast<int>(i), stream);
    }
    reducer.wait(stream);
    return to_host(stream, reducer.gradients().as<const float>(), reducer.elements());
  }

  // The residual of every element, laid out as the flat gradient; zero where nothing is kept.
  std::vector<float> residual() {
    std::vector<float> all;
    for (const CodecState& s : reducer.state()) {
      if (s.name.ends_with("/residual")) {
        auto part = to_host(stream, static_cast<const float*>(s.data), s.count);
        all.insert(all.end(), part.begin(), part.end());
      }
    }
    all.resize(static_cast<size_t>(reducer.elements()));
    return all;
  }

  std::vector<GradientTensor> tensors;
  Stream stream;
  Reducer reducer;
};

std::vector<std::vector<float>> gradients_for(const std::vector<GradientTensor>& tensors, uint32_t seed) {
  std::vector<std::vector<float>> gradients;
  for (size_t i = 0; i < tensors.size(); ++i) {
    gradients.push_back(normal(count_of(tensors[i]), seed * 1000 + static_cast<uint32_t>(i)));
  }
  return gradients;
}

// The same, laid out as the reducer's flat buffer.
std::vector<float> flat(const Rank& rank, const std::vector<std::vector<float>>& gradients) {
  std::vector<float> all(static_cast<size_t>(rank.reducer.elements()), 0.0f);
  for (size_t i = 0; i < gradients.size(); ++i) {
    std::copy(gradients[i].begin(), gradients[i].end(),
              all.begin() + rank.reducer.offset(static_cast<int>(i)));
  }
  return all;
}

// Every example with every schedule, as specs.
std::vector<std::string> every_spec() {
  std::vector<std::string> specs = {"bf16:schedule=hierarchical,node_wire=fp32",
                                    "powersgd:rank=2,wire=bf16,schedule=hierarchical,node_wire=fp32"};
  for (std::string spec : kExampleSpecs) {
    spec += spec.find(':') == std::string::npos ? ":" : ",";
    for (const char* schedule : {"ring", "tree", "two_shot", "hierarchical"}) {
      specs.push_back(spec + "schedule=" + schedule);
    }
  }
  return specs;
}

// Nodes for hierarchical schedules: the fewest ranks above one that divide the world.
int ranks_per_node(int world) {
  for (int ranks = 2; ranks < world; ++ranks) {
    if (world % ranks == 0) return ranks;
  }
  return 1;
}

using SpecCase = std::tuple<Device, std::string>;
std::string case_name(const ::testing::TestParamInfo<SpecCase>& info) {
  auto [device, spec] = info.param;
  std::string text = device.name() + "_" + spec;
  for (char& c : text) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return text;
}

class EverySpec : public ::testing::TestWithParam<SpecCase> {};

// Conservation: what went in over all ranks and steps is what was applied plus what the residuals hold. Also
// checks, since it has everything at hand, that all ranks hold the same bits after every step.
void expect_conservation(Device device, const std::string& spec, int world, int steps) {
  std::vector<std::vector<double>> input(world), applied(world);
  std::vector<std::vector<float>> last(world), residual(world), first_result(world), first_residual(world);
  run_ranks(world, device, [&](Communicator& comm) {
    int r = comm.rank();
    comm.set_ranks_per_node(ranks_per_node(world));
    Rank rank(comm, spec, model(), 16 << 10);
    EXPECT_GE(rank.reducer.buckets(), world > 1 ? 2 : 0);
    input[r].assign(static_cast<size_t>(rank.reducer.elements()), 0.0);
    applied[r] = input[r];
    for (int s = 0; s < steps; ++s) {
      auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * world + r + 1));
      auto in = flat(rank, gradients);
      last[r] = rank.step(gradients);
      for (size_t i = 0; i < in.size(); ++i) input[r][i] += in[i], applied[r][i] += last[r][i];
      if (s == 0) {
        first_result[r] = last[r];
        first_residual[r] = rank.residual();
      }
    }
    residual[r] = rank.residual();
  });
  auto violation = [&](const auto& result, const auto& kept, const std::vector<std::vector<double>>& in) {
    std::vector<double> difference(result.size()), size(result.size());
    for (size_t i = 0; i < result.size(); ++i) {
      difference[i] = double{result[i]} * world;
      for (int r = 0; r < world; ++r) {
        difference[i] += kept[r][i] - in[r][i];
        size[i] += std::abs(in[r][i]);
      }
    }
    return norm(difference) / norm(size);
  };
  std::vector<std::vector<double>> first_input;
  for (int r = 0; r < world; ++r) {
    // The gaps between tensors are zero in the input, so they must be in the result.
    auto gradients = gradients_for(model(), static_cast<uint32_t>(r + 1));
    std::vector<double> in;
    for (size_t i = 0; i < gradients.size(); ++i) {
      in.insert(in.end(), gradients[i].begin(), gradients[i].end());
      while (in.size() % 4 != 0) in.push_back(0);
    }
    first_input.push_back(in);
    EXPECT_TRUE(same_bits(last[r], last[0])) << "rank " << r << " differs from rank 0";
  }
  EXPECT_LT(violation(first_result[0], first_residual, first_input), 1e-6);
  EXPECT_LT(violation(applied[0], residual, input), 1e-5);
}

TEST_P(EverySpec, LosesNothingAndKeepsRanksIdentical) {
  auto [device, spec] = GetParam();
#ifdef GRADWIRE_SANITIZED
  constexpr int kLong = 4, kShort = 2;  // the sanitizers look at memory and order, not at drift
  const std::initializer_list<int> worlds = {3, 8};
#else
  constexpr int kLong = 100, kShort = 8;
  const std::initializer_list<int> worlds = {1, 2, 3, 4, 5, 7, 8, 16};
#endif
  for (int world : worlds) {
    SCOPED_TRACE("world of " + std::to_string(world));
    expect_conservation(device, spec, world, world <= 3 ? kLong : kShort);
  }
}

INSTANTIATE_TEST_SUITE_P(Over, EverySpec,
                         ::testing::Combine(::testing::ValuesIn(available_devices()),
                                            ::testing::ValuesIn(every_spec())),
                         case_name);

class HardGradients : public ::testing::TestWithParam<Device> {};

// Rank 1 and 2 are where torch's hook turns a zero gradient into NaN for ever.
TEST_P(HardGradients, AZeroFirstGradientIsNeitherNanNorStuckAtZero) {
  for (const char* spec : {"powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=4",
                           "powersgd:rank=4,wire=bf16", "bf16", "fp8"}) {
    run_ranks(3, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      auto zeros = gradients_for(rank.tensors, 1);
      for (auto& g : zeros) std::fill(g.begin(), g.end(), 0.0f);
      for (int s = 0; s < 3; ++s) {
        for (float v : rank.step(zeros)) ASSERT_EQ(v, 0.0f) << spec;
      }
      // Now the same gradient every step: error feedback must bring all of it out in time.
      auto gradients = gradients_for(rank.tensors, 7);  // the same on every rank
      auto wanted = flat(rank, gradients);
      std::vector<double> applied(wanted.size(), 0.0), difference(wanted.size());
      constexpr int kSteps = 60;
      for (int s = 0; s < kSteps; ++s) {
        auto result = rank.step(gradients);
        for (size_t i = 0; i < result.size(); ++i) {
          ASSERT_TRUE(std::isfinite(result[i])) << spec;
          applied[i] += result[i];
        }
      }
      double size = norm(std::vector<double>(wanted.begin(), wanted.end()));
      for (size_t i = 0; i < wanted.size(); ++i) difference[i] = applied[i] / kSteps - wanted[i];
      EXPECT_LT(norm(difference) / size, 0.6) << spec;
      for (int t : {1, 2, 6, 8}) {  // each compressed matrix moved, not just the vectors
        double moved = 0;
        for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i)
          moved += std::abs(applied[rank.reducer.offset(t) + i]);
        EXPECT_GT(moved, 0.0) << spec << " " << rank.tensors[t].name;
      }
    });
  }
}

TEST_P(HardGradients, AFrozenLayerStaysZeroAndDisturbsNobody) {
  for (const char* spec : {"powersgd:rank=2", "powersgd:rank=4,wire=bf16", "bf16", "fp8"}) {
    run_ranks(2, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, model(), 1 << 20);
      for (int s = 0; s < 10; ++s) {
        auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 2 + comm.rank()));
        std::fill(gradients[2].begin(), gradients[2].end(), 0.0f);
        auto result = rank.step(gradients);
        for (float v : result) ASSERT_TRUE(std::isfinite(v));
        for (int64_t i = 0; i < count_of(rank.tensors[2]); ++i)
          ASSERT_EQ(result[rank.reducer.offset(2) + i], 0.0f);
      }
    });
  }
}

// A NaN of one rank reaches that tensor's result on every rank, and nothing else, and is gone in the next
// step.
TEST_P(HardGradients, ANanIsSeenOnceAndContained) {
  for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const char* spec : {"fp32", "bf16", "bf16:schedule=ring", "fp8", "fp8:schedule=ring",
                             "powersgd:rank=4,wire=fp8", "powersgd:rank=1", "powersgd:rank=4",
                             "powersgd:rank=4,wire=bf16", "powersgd:rank=4,schedule=ring"}) {
      for (int victim : {0, 1, 2, 6}) {
        run_ranks(3, GetParam(), [&](Communicator& comm) {
          Rank rank(comm, spec, model(), 1 << 20);
          for (int s = 0; s < 4; ++s) {
            auto gradients = gradients_for(rank.tensors, static_cast<uint32_t>(s * 3 + comm.rank()));
            if (s == 1 && comm.rank() == 1) gradients[victim][5] = poison;
            auto result = rank.step(gradients);
            for (size_t t = 0; t < rank.tensors.size(); ++t) {
              bool finite = true;
              for (int64_t i = 0; i < count_of(rank.tensors[t]); ++i) {
                finite &= std::isfinite(result[rank.reducer.offset(static_cast<int>(t)) + i]);
              }
              EXPECT_EQ(finite, !(s == 1 && static_cast<int>(t) == victim))
                  << spec << " tensor " << rank.tensors[t].name << " step " << s;
            }
            for (const CodecState& state : rank.reducer.state()) {
              for (float v : to_host(rank.stream, static_cast<const float*>(state.data), state.count)) {
                ASSERT_TRUE(std::isfinite(v)) << spec << " " << state.name << " step " << s;
              }
            }
          }
        });
      }
    }
  }
}

TEST_P(HardGradients, HugeGradientsSurviveTheWire) {
  for (const char* spec : {"bf16", "bf16:schedule=ring", "fp8"}) {
    run_ranks(2, GetParam(), [&](Communicator& comm) {
      Rank rank(comm, spec, {{"huge", {100}}}, 1 << 20);
      std::vector<std::vector<float>> gradients{std::vector<float>(100, 3.4e38f)};
      if (comm.rank() == 1) gradients[0].assign(100, -1.7e38f);
      for (float v : rank.step(gradients)) ASSERT_TRUE(std::isfinite(v)) << spec;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(On, HardGradients, ::testing::ValuesIn(available_devices()), [](const auto& info) {
  return info.param.is_host() ? std::string("host") : "cuda" + std::to_string(info.param.index);
});

TEST(Reducer, SameSeedGivesTheSameBits) {
  for (const char* spec : {"bf16:round=stochastic", "powersgd:rank=2,wire=bf16,round=stochastic"}) {
    std::vector<float> results[2];
    for (auto& result : results) {
      run_ranks(3, Device::host(), [&](Communicator& comm) {
        Rank rank(comm, spec, model(), 16 << 10);
        std::vector<float> last;
        for (int s = 0; s < 5; ++s)
          last = rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(3 * s + comm.rank())));
        if (comm.rank() == 0) result = last;
      });
    }
    EXPECT_TRUE(same_bits(results[0], results[1])) << spec;
  }
}

// Slices change no bit; the two halves of PowerSGD's Q may (their chunks have other owners), but not by much.
TEST(Reducer, OverlapDoesNotChangeResults) {
  for (const char* spec : {"fp32:schedule=ring", "fp8:round=stochastic", "powersgd:rank=2,schedule=ring",
                           "powersgd:rank=4,schedule=two_shot"}) {
    std::vector<std::vector<float>> results;
    for (int64_t slice_bytes : {0, 300, 5000}) {
      run_ranks(3, Device::host(), [&](Communicator& comm) {
        Rank rank(comm, spec, model(), 64 << 10, slice_bytes);
        std::vector<float> last;
        for (int s = 0; s < 3; ++s)
          last = rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(3 * s + comm.rank())));
        if (comm.rank() == 0) results.push_back(last);
      });
    }
    const bool ring_of_factors = std::string(spec) == "powersgd:rank=2,schedule=ring";
    for (const auto& result : results) {
      if (!ring_of_factors) {
        EXPECT_TRUE(same_bits(result, results[0])) << spec;
      }
      for (size_t i = 0; i < result.size(); ++i) ASSERT_NEAR(result[i], results[0][i], 1e-4) << spec;
    }
  }
}

TEST(Reducer, BucketsDoNotChangeFp32Results) {
  std::vector<std::vector<float>> results;
  for (int64_t bucket_bytes : {1, 4 << 10, 1 << 30}) {
    run_ranks(2, Device::host(), [&](Communicator& comm) {
      Rank rank(comm, "fp32", model(), bucket_bytes);
      auto result = rank.step(gradients_for(rank.tensors, static_cast<uint32_t>(comm.rank())));
      if (comm.rank() == 0) results.push_back(result);
    });
  }
  EXPECT_TRUE(same_bits(results[0], results[1]) && same_bits(results[0], results[2]));
}

TEST(Reducer, OrderOfReadinessMayDifferBetweenRanks) {
  run_ranks(3, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "bf16", model(), 1 << 10);
    auto gradients = gradients_for(rank.tensors, 3);
    std::vector<int> order(rank.tensors.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<uint32_t>(comm.rank())));
    for (int i : order) {
      copy(rank.stream, rank.reducer.gradient(i), gradients[i].data(), gradients[i].size() * sizeof(float));
      rank.reducer.ready(i, rank.stream);
    }
    rank.reducer.wait(rank.stream);
    auto result = to_host(rank.stream, rank.reducer.gradients().as<const float>(), rank.reducer.elements());
    auto wanted = flat(rank, gradients);
    for (size_t i = 0; i < wanted.size(); ++i)
      ASSERT_NEAR(result[i], wanted[i], 0.01 * std::abs(wanted[i]) + 1e-6);
  });
}

TEST(Reducer, AWorldOfOneLeavesGradientsAlone) {
  auto comm = Communicator::create_single(Device::host());
  Rank rank(*comm, "powersgd:rank=1", model(), 1 << 20);
  auto gradients = gradients_for(rank.tensors, 3);
  EXPECT_TRUE(same_bits(rank.step(gradients), flat(rank, gradients)));
  EXPECT_EQ(rank.reducer.buckets(), 0);
  EXPECT_EQ(rank.reducer.extra_bytes(), 0);
  EXPECT_EQ(comm->bytes_sent(), 0u);
}

class AdoptedGradients : public ::testing::TestWithParam<const char*> {};

// The same steps three times: gradients in the reducer's own buffer, adopted where they lie (densely packed,
// as in a framework's bucket, which moves once), and adopted one by one. Where they are may not change a bit.
TEST_P(AdoptedGradients, GiveTheSameBitsAsOwnOnes) {
  constexpr int kSteps = 4;
  enum Where { own, packed, scattered };
  std::vector<std::vector<float>> results;
  for (Where where : {own, packed, scattered}) {
    std::vector<std::vector<float>> steps(2);
    run_ranks(2, Device::host(), [&](Communicator& comm) {
      auto tensors = model();
      Stream stream = Stream::create(comm.device(), "compute");
      Reducer reducer(comm, CompressionSpec::parse(GetParam()), tensors,
                      {.bucket_bytes = 16 << 10, .alignment = 1, .own_gradients = where == own});
      std::vector<std::vector<float>> memory(2);  // two homes; an address is used again only after a move
      for (auto& m : memory) m.resize(static_cast<size_t>(reducer.elements() + 1));
      std::vector<std::vector<float>> pieces;
      for (const auto& t : tensors) pieces.emplace_back(static_cast<size_t>(count_of(t)) + 1);
      for (int s = 0; s < kSteps; ++s) {
        auto gradients = gradients_for(tensors, static_cast<uint32_t>(s * 2 + comm.rank() + 1));
        std::vector<float*> addresses;
        for (int i = 0; i < reducer.tensors(); ++i) {
          // One float off, so that nothing is aligned to more than 4 bytes.
          addresses.push_back(where == packed ? memory[s / 2].data() + 1 + reducer.offset(i)
                                              : pieces[i].data() + 1);
        }
        if (where != own) {
          reducer.adopt(addresses);
          EXPECT_EQ(reducer.buckets_in_place(), where == packed ? reducer.buckets() : 0);
        }
        for (int i = 0; i < reducer.tensors(); ++i) {
          copy(stream, reducer.gradient(i), gradients[i].data(), gradients[i].size() * sizeof(float));
          reducer.ready(i, stream);
        }
        reducer.wait(stream);
        for (int i = 0; i < reducer.tensors(); ++i) {
          auto result = to_host(stream, static_cast<const float*>(reducer.gradient(i)), count_of(tensors[i]));
          steps[comm.rank()].insert(steps[comm.rank()].end(), result.begin(), result.end());
        }
      }
    });
    EXPECT_TRUE(same_bits(steps[0], steps[1]));
    results.push_back(steps[0]);
  }
  EXPECT_TRUE(same_bits(results[own], results[packed]));
  EXPECT_TRUE(same_bits(results[own], results[scattered]));
}

INSTANTIATE_TEST_SUITE_P(Reducer, AdoptedGradients,
                         ::testing::Values("fp32", "bf16:schedule=ring", "powersgd:rank=2,start=1",
                                           "powersgd:rank=4,wire=bf16"));

TEST(Reducer, AdoptRefusesWhatItCannotUse) {
  run_ranks(2, Device::host(), [](Communicator& comm) {
    Stream stream = Stream::create(comm.device(), "compute");
    Reducer reducer(comm, CompressionSpec::parse("fp32"), {{"a", {4}}, {"b", {2}}}, {.own_gradients = false});
    EXPECT_THROW(reducer.ready(0, stream), Error);  // nothing adopted yet
    std::vector<float> memory(8);
    std::vector<float*> one{memory.data()}, with_null{memory.data(), nullptr};
    EXPECT_THROW(reducer.adopt(one), BadInput);
    EXPECT_THROW(reducer.adopt(with_null), BadInput);
    std::vector<float*> good{memory.data(), memory.data() + 4};
    reducer.adopt(good);
    // With the default alignment of 4, a gap would follow b: memory[6] and [7] are not the reducer's.
    EXPECT_EQ(reducer.buckets_in_place(), 0);
    reducer.ready(0, stream);
    EXPECT_THROW(reducer.adopt(good), Error);  // in the middle of a step
    reducer.ready(1, stream);
    reducer.wait(stream);
    stream.synchronize();
  });
}

// A checkpoint is state() and steps(): with both back in place, a new reducer goes on with the same bits.
TEST(Reducer, ResumesBitForBit) {
  for (const char* spec : {"bf16:round=stochastic", "powersgd:rank=2,start=2,wire=bf16,round=stochastic"}) {
    std::vector<std::vector<float>> straight(2), resumed(2);
    run_ranks(2, Device::host(), [&](Communicator& comm) {
      auto gradients = [&](int s) {
        return gradients_for(model(), static_cast<uint32_t>(s * 2 + comm.rank() + 1));
      };
      std::vector<std::vector<float>> saved;
      Rank first(comm, spec, model(), 16 << 10);
      for (int s = 0; s < 3; ++s) first.step(gradients(s));
      for (const CodecState& s : first.reducer.state()) {
        saved.push_back(to_host(first.stream, static_cast<const float*>(s.data), s.count));
      }
      comm.barrier();  // the two reducers have streams of their own
      Rank second(comm, spec, model(), 16 << 10);
      auto states = second.reducer.state();
      ASSERT_EQ(states.size(), saved.size());
      for (size_t i = 0; i < states.size(); ++i)
        to_device(second.stream, states[i].data, std::span<const float>(saved[i]));
      second.reducer.resume_at(3);
      EXPECT_EQ(second.reducer.steps(), 3);
      for (int s = 3; s < 5; ++s) straight[comm.rank()] = first.step(gradients(s));
      comm.barrier();
      for (int s = 3; s < 5; ++s) resumed[comm.rank()] = second.step(gradients(s));
    });
    for (int r = 0; r < 2; ++r) EXPECT_TRUE(same_bits(straight[r], resumed[r])) << spec << " rank " << r;
  }
}

TEST(Reducer, WireBytesAreMeasuredAndFall) {
  std::vector<GradientTensor> tensors{{"weight", {256, 256}}, {"bias", {256}}};
  auto measure = [&](const char* spec) {
    ReducerStats stats;
    run_ranks(4, Device::host(), [&](Communicator& comm) {
      Rank rank(comm, spec, tensors, 25 << 20);
      rank.step(gradients_for(tensors, 1));
      rank.step(gradients_for(tensors, 2));
      if (comm.rank() == 0) {
        stats = rank.reducer.stats(1);
        EXPECT_EQ(rank.reducer.stats(0).wire_bytes, stats.wire_bytes);
        EXPECT_GT(stats.comm_ms, 0.0);
        EXPECT_GE(stats.exposed_comm_ms, 0.0);
        EXPECT_THROW(rank.reducer.stats(2), BadInput);
      }
    });
    return stats;
  };
  ReducerStats fp32 = measure("fp32"), bf16 = measure("bf16"), powersgd = measure("powersgd:rank=4");
  EXPECT_EQ(fp32.wire_bytes, fp32.dense_bytes);
  EXPECT_EQ(fp32.wire_bytes, 2u * 3 * (256 * 256 + 256) / 4 * 4);
  EXPECT_EQ(bf16.wire_bytes * 2, fp32.wire_bytes);
  EXPECT_EQ(bf16.dense_bytes, fp32.dense_bytes);
  EXPECT_EQ(powersgd.wire_bytes, 2u * 3 * (512 * 4 + 256) / 4 * 4);
}

// Beyond the gradients: an FP32 residual, the factors of what is compressed, and at most two buckets of
// staging.
TEST(Reducer, ExtraMemoryIsResidualFactorsAndAtMostTwoBuckets) {
  // 16 tensors of 1 MiB in buckets of 1 and of 4 MiB; pieces are aligned to 256 bytes.
  const std::vector<GradientTensor> tensors(16, GradientTensor{"w", {512, 512}});
  const int64_t elements = 16 * 512 * 512;
  for (int world : {2, 3, 8, 64}) {
    for (const char* schedule : {"ring", "tree", "two_shot"}) {
      for (int64_t bucket : {int64_t{1} << 20, int64_t{4} << 20}) {
        auto memory = [&](const std::string& spec) {
          Communicator comm(std::make_unique<PlannedTransport>(1, world, Device::host()));
          return Reducer(comm, CompressionSpec::parse(spec + "schedule=" + schedule), tensors,
                         {.bucket_bytes = bucket})
              .memory();
        };
        SCOPED_TRACE(std::string(schedule) + " of " + std::to_string(world) + ", buckets of " +
                     std::to_string(bucket));
        const int64_t gaps = int64_t{256} * 4 * world;
        for (const char* spec : {"fp32:", "bf16:", "fp8:", "bf16:ef=off,", "powersgd:rank=4,"}) {
          const ReducerMemory m = memory(spec);
          SCOPED_TRACE(spec);
          const bool lossless = std::string(spec) == "fp32:" || std::string(spec) == "bf16:ef=off,";
          EXPECT_EQ(m.residual, lossless ? 0 : 4 * elements);
          EXPECT_LE(m.staging, 2 * bucket + gaps);
          if (std::string(spec) != "powersgd:rank=4,") {
            EXPECT_EQ(m.factors, 0);
          } else {
            // P, Q to start from and Q of this step, for 16 matrices; flags.
            EXPECT_GE(m.factors, 16 * 3 * 512 * 4 * 4);
            EXPECT_LE(m.factors, 16 * 3 * 512 * 4 * 4 + 1024);
          }
        }
      }
    }
  }
}

TEST(Reducer, ForgottenAndRepeatedGradientsAreNamed) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "fp32", {{"first", {4}}, {"second", {4}}}, 1 << 20);
    rank.reducer.ready(0, rank.stream);
    try {
      rank.reducer.wait(rank.stream);
      ADD_FAILURE() << "wait() accepted a missing gradient";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("'second'"), std::string::npos) << error.what();
    }
    EXPECT_THROW(rank.reducer.ready(0, rank.stream), Error);
    EXPECT_THROW(rank.reducer.ready(2, rank.stream), BadInput);
  });
}

TEST(Reducer, ARankThatDiesFailsTheOthersInsteadOfHangingThem) {
  EXPECT_THROW(run_ranks(4, Device::host(), std::chrono::milliseconds(20'000),
                         [&](Communicator& comm) {
                           Rank rank(comm, "bf16:schedule=ring", model(), 1 << 12);
                           rank.step(gradients_for(rank.tensors, 1));
                           if (comm.rank() == 2) throw Error("planted failure");
                           for (int s = 0; s < 100; ++s) rank.step(gradients_for(rank.tensors, 1));
                         }),
               Error);
}

}  // namespace
}  // namespace gradwire
