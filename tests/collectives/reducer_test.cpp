// The reducer: which options affect its results, its memory, checkpoints, and errors.
#include "collectives/reducer/reducer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "collectives/transport/transport.h"
#include "kernels/math/small_float.h"
#include "runtime/device/graph.h"
#include "runtime/util/error.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

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

// Expects slices not to change a bit. Only the two halves of PowerSGD's Q may change results slightly,
// because their chunks have other owners.
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

TEST(Reducer, ReadyOrderMayDifferBetweenRanks) {
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

// Compares launch_in() during a run and wait_for() in any order with bucket order and wait().
TEST(Reducer, AnyOrderOfExchangesAndWaitsGivesTheSameBits) {
  constexpr int kWorld = 3, kSteps = 6;
  for (const char* spec : {"fp32:schedule=ring", "fp8:round=stochastic", "int8:residual=int8",
                           "powersgd:rank=2,start=2", "randk:ratio=0.1"}) {
    std::vector<std::vector<float>> results[2];
    for (const bool permuted : {false, true}) {
      run_ranks(kWorld, Device::host(), [&](Communicator& comm) {
        const std::vector<GradientTensor> tensors = model();
        const Stream stream = Stream::create(comm.device(), "compute");
        Reducer reducer(comm, CompressionSpec::parse(spec), tensors,
                        {.bucket_bytes = 1 << 10, .seed = 5, .single_waits = permuted});
        std::mt19937 same(7), own(static_cast<uint32_t>(comm.rank()));
        std::vector<int> order(reducer.ranges().size());
        std::iota(order.begin(), order.end(), 0);
        std::vector<int> waits = order;
        std::vector<float> step_result(reducer.elements());
        for (int step = 0; step < kSteps; ++step) {
          const auto gradients = gradients_for(tensors, static_cast<uint32_t>(kWorld * step + comm.rank()));
          for (int i = 0; i < reducer.tensors(); ++i) {
            const auto& values = gradients[i];
            copy(stream, reducer.gradient(i), values.data(), values.size() * sizeof(float));
            reducer.ready(i, stream);
          }
          if (permuted) {
            std::shuffle(waits.begin(), waits.end(), own);
            for (int b : waits) {
              reducer.wait_for(b, stream);
              const BucketRange& range = reducer.ranges()[b];
              copy(stream, step_result.data() + range.begin, reducer.gradients().as<float>() + range.begin,
                   static_cast<size_t>(range.elements()) * sizeof(float));
            }
            std::shuffle(order.begin(), order.end(), same);
            if (step % 2 == 0) reducer.launch_in(order);  // before wait()
            reducer.wait(stream);
            if (step % 2 == 1) reducer.launch_in(order);  // after wait()
          } else {
            reducer.wait(stream);
            copy(stream, step_result.data(), reducer.gradients().data(), reducer.gradients().bytes());
          }
          stream.synchronize();
          const ReducerStats stats = reducer.stats(step);
          EXPECT_GT(stats.wire_bytes, 0u);
          EXPECT_GE(stats.comm_ms, 0.0);
          EXPECT_LE(stats.comm_ms, stats.compress_ms + stats.communicate_ms + stats.decompress_ms + 1.0);
          if (comm.rank() == 0) results[permuted].push_back(step_result);
        }
      });
    }
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_TRUE(same_bits(results[0][step], results[1][step])) << spec << ", step " << step;
    }
  }
}

TEST(Reducer, AcceptsPermutationsOfExchangesBetweenStepsOnly) {
  run_ranks(2, Device::host(), [](Communicator& comm) {
    Rank rank(comm, "fp32", model(), 1 << 10);
    std::vector<int> order(rank.reducer.ranges().size());
    std::iota(order.begin(), order.end(), 0);
    EXPECT_NO_THROW(rank.reducer.launch_in(order));
    std::vector<int> twice = order;
    twice.back() = 0;
    expect_error<BadInput>([&] { rank.reducer.launch_in(twice); },
                           {"permutation", std::to_string(order.size())});
    expect_error<BadInput>([&] { rank.reducer.launch_in({}); }, {"permutation"});
    rank.reducer.ready(0, rank.stream);
    expect_error<BadInput>([&] { rank.reducer.launch_in(order); }, {"between steps"});
    expect_error<BadInput>([&] { rank.reducer.wait_for(0, rank.stream); }, {"single_waits"});
    for (int i = 1; i < rank.reducer.tensors(); ++i) rank.reducer.ready(i, rank.stream);
    rank.reducer.wait(rank.stream);
    rank.stream.synchronize();
  });
}

constexpr const char* kGraphedSpecs[] = {"fp32",
                                         "fp8:round=stochastic",
                                         "int8:residual=int8,dense=auto",
                                         "powersgd:rank=2,wire=bf16,round=stochastic,warm=off,residual=bf16",
                                         "powersgd:rank=4,start=3",
                                         "powersgd:rank=4,alternate=on",
                                         "powersgd:rank=2,alternate=on,start=2",
                                         "randk:ratio=0.1,wire=bf16,round=stochastic",
                                         "powersgd:rank=2,ef=ef21",
                                         "int8:max_norm=20",
                                         "topk:k=5,of=256,ef_decay=0.9,momentum=0.9,start=1,ramp=2"};

// Compares steps that are enqueued one by one with steps that are captured as early as allowed and then
// launched. Both have the same results, residuals and bytes. Slices are used, so that a graph contains three
// streams of each rank.
TEST(Reducer, GraphsOfAStepHaveTheBitsAndStatsOfTheCalls) {
  constexpr int kWorld = 4, kSteps = 9;
  for (const char* spec : kGraphedSpecs) {
    std::vector<std::vector<float>> results[2];
    std::vector<uint64_t> sent[2];
    for (bool graphed : {false, true}) {
      run_ranks(kWorld, Device::host(), [&](Communicator& comm) {
        Rank rank(comm, spec, model(), 16 << 10, 500);
        auto gradients = gradients_for(rank.tensors, 0);  // each step copies its input from these gradients
        auto enqueue = [&] {
          for (int i = 0; i < rank.reducer.tensors(); ++i) {
            copy(rank.stream, rank.reducer.gradient(i), gradients[i].data(),
                 gradients[i].size() * sizeof(float));
            rank.reducer.ready(i, rank.stream);
          }
          rank.reducer.wait(rank.stream);
        };
        Graph graphs[2];
        int64_t captured[2] = {};
        for (int step = 0; step < kSteps; ++step) {
          auto fresh = gradients_for(rank.tensors, static_cast<uint32_t>(step * kWorld + comm.rank() + 1));
          for (size_t i = 0; i < fresh.size(); ++i)
            std::copy(fresh[i].begin(), fresh[i].end(), gradients[i].begin());
          Graph& graph = graphs[step % 2];
          if (!graphed || step < std::max<int64_t>(1, rank.reducer.steady_from())) {
            enqueue();
          } else if (!graph) {
            graph = Graph::capture(rank.stream, enqueue);
            captured[step % 2] = step;
            graph.launch();
          } else {
            graph.launch();
            rank.reducer.replayed(captured[step % 2]);
          }
          rank.stream.synchronize();
          EXPECT_EQ(rank.reducer.steps(), step + 1);
          const ReducerStats stats = rank.reducer.stats(step);
          if (comm.rank() == 0) sent[graphed].push_back(stats.wire_bytes);
          EXPECT_GT(stats.comm_ms, 0.0);
          if (graphed && step >= 6) {
            // a later step has reused the marks of this step
            EXPECT_THROW(rank.reducer.stats(step - 2), BadInput);
          }
        }
        std::vector<float> last =
            to_host(rank.stream, rank.reducer.gradients().as<const float>(), rank.reducer.elements());
        const auto residual = rank.residual();
        last.insert(last.end(), residual.begin(), residual.end());
        if (comm.rank() == 0) results[graphed].push_back(last);
      });
    }
    EXPECT_TRUE(same_bits(results[0][0], results[1][0])) << spec;
    EXPECT_EQ(sent[0], sent[1]) << spec;
    EXPECT_GT(sent[1].back(), 0u);
  }
}

TEST(Reducer, RejectsReplayOfAnUnsteadyStep) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "powersgd:rank=2,start=2", model(), 16 << 10);
    EXPECT_EQ(rank.reducer.steady_from(), 2);
    rank.step(gradients_for(rank.tensors, 1));
    EXPECT_THROW(rank.reducer.replayed(0), BadInput);  // step 0 computed plain averages
    EXPECT_THROW(rank.reducer.replayed(2), BadInput);  // step 2 is in the future
  });
}

TEST(Reducer, StepsAreReplacedOnlyByStepsOfTheSameTurn) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "powersgd:rank=2,alternate=on", model(), 16 << 10);
    EXPECT_EQ(rank.reducer.period(), 2);
    for (uint32_t step = 0; step < 3; ++step) rank.step(gradients_for(rank.tensors, step));
    expect_error<BadInput>([&] { rank.reducer.replayed(2); }, {"step 2 cannot replace step 3", "every 2"});
    EXPECT_NO_THROW(rank.reducer.replayed(1));
    Rank other(comm, "powersgd:rank=2", model(), 16 << 10);
    EXPECT_EQ(other.reducer.period(), 1);
  });
}

TEST(Reducer, WorldOfOneDoesNotChangeGradients) {
  auto comm = Communicator::create_single(Device::host());
  Rank rank(*comm, "powersgd:rank=1", model(), 1 << 20);
  auto gradients = gradients_for(rank.tensors, 3);
  EXPECT_TRUE(same_bits(rank.step(gradients), flat(rank, gradients)));
  EXPECT_EQ(rank.reducer.buckets(), 0);
  EXPECT_EQ(rank.reducer.extra_bytes(), 0);
  EXPECT_EQ(comm->bytes_sent(), 0u);
}

// Restores a checkpoint, which consists of tensor_state() and steps(), in a new reducer. The new reducer
// continues with the same bits.
TEST(Reducer, ResumesBitForBit) {
  for (const char* spec :
       {"bf16:round=stochastic", "powersgd:rank=2,start=2,wire=bf16,round=stochastic", "bf16:residual=int8",
        "int8:residual=bf16,dense=auto", "powersgd:rank=2,wire=bf16,residual=int8",
        "powersgd:rank=2,alternate=on", "randk:ratio=0.1,wire=bf16", "int4:ef=ef21,start=1",
        "powersgd:rank=2,ef=ef21", "topk:k=5,of=256,ef_decay=0.9,momentum=0.9,ramp=6"}) {
    std::vector<std::vector<float>> straight(2), resumed(2);
    run_ranks(2, Device::host(), [&](Communicator& comm) {
      auto gradients = [&](int s) {
        return gradients_for(model(), static_cast<uint32_t>(s * 2 + comm.rank() + 1));
      };
      std::vector<std::vector<std::byte>> saved;
      Rank first(comm, spec, model(), 16 << 10);
      for (int s = 0; s < 3; ++s) first.step(gradients(s));
      for (const TensorState& s : first.reducer.tensor_state()) {
        s.read(first.stream, 0, saved.emplace_back(static_cast<size_t>(s.bytes())));
      }
      first.stream.synchronize();
      comm.barrier();  // the two reducers have separate streams
      Rank second(comm, spec, model(), 16 << 10);
      auto states = second.reducer.tensor_state();
      ASSERT_EQ(states.size(), saved.size());
      for (size_t i = 0; i < states.size(); ++i) states[i].write(second.stream, 0, saved[i]);
      second.stream.synchronize();
      second.reducer.resume_at(3);
      EXPECT_EQ(second.reducer.steps(), 3);
      for (int s = 3; s < 5; ++s) straight[comm.rank()] = first.step(gradients(s));
      comm.barrier();
      for (int s = 3; s < 5; ++s) resumed[comm.rank()] = second.step(gradients(s));
    });
    for (int r = 0; r < 2; ++r) EXPECT_TRUE(same_bits(straight[r], resumed[r])) << spec << " rank " << r;
  }
}

// Reads residuals between steps. PowerSGD computes a step's residuals when they are needed: in the next step,
// or when a caller reads them earlier.
TEST(Reducer, ReadingResidualsBetweenStepsChangesNoBit) {
  for (const char* spec : {"powersgd:rank=1", "powersgd:rank=4,wire=bf16", "powersgd:rank=9,warm=off",
                           "powersgd:rank=2,alternate=on,start=1", "powersgd:rank=3,alternate=on,wire=int8",
                           "powersgd:rank=4,ef_decay=0.9"}) {
    auto run = [&](bool reads) {
      std::vector<std::vector<float>> results(2);
      run_ranks(2, Device::host(), [&](Communicator& comm) {
        Rank rank(comm, spec, model(), 16 << 10);
        for (int s = 0; s < 6; ++s) {
          const auto mean = rank.step(gradients_for(model(), static_cast<uint32_t>(s * 2 + comm.rank() + 1)));
          auto& all = results[comm.rank()];
          all.insert(all.end(), mean.begin(), mean.end());
          if (!reads) continue;
          const auto residual = rank.residual();
          EXPECT_EQ(rank.residual(), residual) << spec << ": a second read";
        }
        const auto residual = rank.residual();
        auto& all = results[comm.rank()];
        all.insert(all.end(), residual.begin(), residual.end());
      });
      return results;
    };
    const auto read = run(true), unread = run(false);
    for (int r = 0; r < 2; ++r) EXPECT_EQ(read[r], unread[r]) << spec << " rank " << r;
  }
}

TEST(Reducer, MeasuresWireBytesThatFallWithCompression) {
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
        EXPECT_GT(stats.communicate_ms, 0.0);
        EXPECT_NEAR(stats.compress_ms + stats.communicate_ms + stats.decompress_ms, stats.comm_ms,
                    1e-6 * stats.comm_ms);
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

// Checks the memory in addition to the gradients: an FP32 residual, the factors of compressed matrices, and
// staging for at most two buckets.
TEST(Reducer, ExtraMemoryIsResidualFactorsAndAtMostTwoBuckets) {
  // The reducer has 16 tensors of 1 MiB in buckets of 1 and of 4 MiB. Allocations are aligned to 256 bytes.
  const std::vector<GradientTensor> tensors(16, GradientTensor{"w", {512, 512}});
  const int64_t elements = 16 * 512 * 512;
  for (int world : {2, 3, 8, 64}) {
    for (const char* schedule : {"ring", "tree", "two_shot"}) {
      for (int64_t bucket : {int64_t{1} << 20, int64_t{4} << 20}) {
        auto memory = [&](const std::string& spec) {
          Communicator comm(std::make_unique<PlannedTransport>(1, world, Device::host()));
          comm.set_link_costs({});  // a rank without peers cannot measure links
          return Reducer(comm, CompressionSpec::parse(spec + "schedule=" + schedule), tensors,
                         {.bucket_bytes = bucket})
              .memory();
        };
        SCOPED_TRACE(fmt::format("{} of {}, buckets of {}", schedule, world, bucket));
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
            // Each of the 16 matrices has P on the wire, P orthonormalized, Q at the start of a step, the sum
            // of Q, this rank's Q, and flags.
            EXPECT_GE(m.factors, 16 * 5 * 512 * 4 * 4);
            EXPECT_LE(m.factors, 16 * 5 * 512 * 4 * 4 + 1024);
          }
        }
      }
    }
  }
}

TEST(Reducer, NamesMissingAndRepeatedGradients) {
  run_ranks(2, Device::host(), [&](Communicator& comm) {
    Rank rank(comm, "fp32", {{"first", {4}}, {"second", {4}}}, 1 << 20);
    rank.reducer.ready(0, rank.stream);
    expect_error<Error>([&] { rank.reducer.wait(rank.stream); }, {"'second'"});
    EXPECT_THROW(rank.reducer.ready(0, rank.stream), Error);
    EXPECT_THROW(rank.reducer.ready(2, rank.stream), BadInput);
  });
}

TEST(Reducer, RankFailuresFailTheOtherRanksWithoutDeadlock) {
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
}  // namespace gradwire::testing
