// PowerSGD's choice between kernels and library for its products: all ranks make the same choice and use it.
// Either choice conserves gradients.
#include "collectives/codec/powersgd_choice.h"

#include <gtest/gtest.h>

#include <optional>

#include "tests/collectives/conservation.h"
#include "tests/support/expect.h"
#include "tests/support/thin_products.h"

namespace gradwire::testing {
namespace {

MatrixTable table_of(const Stream& stream, std::vector<std::array<int32_t, 3>> shapes) {
  std::vector<MatrixDescriptor> matrices;
  int64_t offset = 0, p = 0, q = 0;
  for (const auto& [rows, cols, rank] : shapes) {
    matrices.push_back(
        {.offset = offset, .p_offset = p, .q_offset = q, .rows = rows, .cols = cols, .rank = rank});
    offset += int64_t{rows} * cols, p += int64_t{rows} * rank, q += int64_t{cols} * rank;
  }
  return MatrixTable(stream, std::move(matrices));
}

TEST(PowerSgdProducts, ConservationHoldsAndTheLibraryIsUsedWhenRequested) {
  for (const char* spec : {"powersgd:rank=4", "powersgd:rank=2,ef=off", "powersgd:rank=2,wire=bf16",
                           "powersgd:rank=2,residual=int8", "powersgd:rank=4,alternate=on",
                           "powersgd:rank=2,wire=bf16,round=stochastic,alternate=on"}) {
    SCOPED_TRACE(spec);
    const bool keeps = CompressionSpec::parse(spec).policy.keeps_errors();
    for (const char* products : {"library", "fused"}) {
      SCOPED_TRACE(products);
      const bool asked = std::string(products) == "library";
      std::optional<StandInProducts> library;
      if (asked) library.emplace();
      if (keeps) {
        expect_conservation(Device::host(), spec, 3, 3);
      } else {
        run_ranks(2, Device::host(), [&](Communicator& comm) {
          Rank rank(comm, spec, model(), 16 << 10);
          auto gradients = gradients_for(rank.tensors, 1);
          rank.step(gradients);
        });
      }
      if (!asked) continue;
      EXPECT_GT(library->onto_q, 0);
      EXPECT_GT(library->onto_p, 0);
    }
  }
}

// Compares both ways. The last bits of the factors and of the result differ, but all ranks agree.
TEST(PowerSgdProducts, BothWaysAgreeUpToRounding) {
  auto result = [](bool asked) {
    std::optional<StandInProducts> library;
    if (asked) library.emplace();
    std::vector<std::vector<float>> all(3);
    run_ranks(3, Device::host(), [&](Communicator& comm) {
      Rank rank(comm, "powersgd:rank=2", model(), 16 << 10);
      for (uint32_t step = 0; step < 4; ++step) {
        auto gradients = gradients_for(rank.tensors, 10 * step + static_cast<uint32_t>(comm.rank()));
        all[comm.rank()] = rank.step(gradients);
      }
    });
    EXPECT_TRUE(same_bits(all[0], all[1]));
    EXPECT_TRUE(same_bits(all[0], all[2]));
    return all[0];
  };
  const auto fused = result(false), library = result(true);
  ASSERT_EQ(fused.size(), library.size());
  std::vector<double> difference, size;
  for (size_t i = 0; i < fused.size(); ++i) {
    difference.push_back(double{fused[i]} - library[i]);
    size.push_back(fused[i]);
  }
  EXPECT_LT(norm(difference), 1e-4 * norm(size));
}

std::vector<ThinProducts*> choose_for_one_matrix(Communicator& comm) {
  const Stream stream = Stream::create(Device::host(), "choice");
  const MatrixTable table = table_of(stream, {{30, 40, 2}});
  BucketContext context;
  context.transport = &comm.transport();
  context.stream = stream;
  context.name = "bucket 1 of 1";
  return choose_products(
      context, {{PowerSgdPass::project, &table, true}, {PowerSgdPass::back_project, &table, false}});
}

TEST(PowerSgdProducts, AllRanksTakeTheLibraryIfAllHaveIt) {
  StandInProducts library;
  run_ranks(3, Device::host(), [&](Communicator& comm) {
    EXPECT_EQ(choose_for_one_matrix(comm), (std::vector<ThinProducts*>{&library, &library}))
        << "rank " << comm.rank();
  });
}

TEST(PowerSgdProducts, ModelChoosesTheLibraryAtHighRanksOfLargeMatrices) {
  const Stream stream = Stream::immediate_host();
  auto library = [&](PowerSgdPass::Kind kind, std::array<int32_t, 3> shape) {
    const MatrixTable table = table_of(stream, {shape});
    return model_times({kind, &table, kind != PowerSgdPass::back_project}).library_is_faster();
  };
  for (auto kind : {PowerSgdPass::project, PowerSgdPass::project_onto, PowerSgdPass::back_project}) {
    EXPECT_FALSE(library(kind, {4096, 1024, 4}));
    EXPECT_TRUE(library(kind, {4096, 1024, 64}));
    EXPECT_FALSE(library(kind, {64, 64, 32})) << "launches";
  }
  EXPECT_TRUE(library(PowerSgdPass::project_onto, {4096, 1024, 32}))
      << "22.7 ps per element fused, 11.5 by cuBLAS";
  EXPECT_FALSE(library(PowerSgdPass::back_project, {4096, 1024, 32})) << "5.3 and 6.9";
}

// Compares the model with measured times of 151 matrices, 1 GiB in total, on an H200
// (docs/results/2026-11-26-gpu).
TEST(PowerSgdProducts, ModelIsWithinAFifthOfMeasurementsOnAnH200) {
  const Stream stream = Stream::immediate_host();
  struct Measured {
    PowerSgdPass::Kind kind;
    int32_t rank;
    double fused_us, library_us;  // measured times in microseconds; 0: not measured
  };
  for (const Measured& m : {Measured{PowerSgdPass::project, 1, 1108, 0},
                            {PowerSgdPass::project, 4, 1270, 0},
                            {PowerSgdPass::project, 32, 3768, 1226 + 2268},
                            {PowerSgdPass::project, 64, 6240, 0},
                            {PowerSgdPass::project_onto, 1, 1280, 0},
                            {PowerSgdPass::project_onto, 32, 6106, 1226 + 1863},
                            {PowerSgdPass::back_project, 1, 263, 0},
                            {PowerSgdPass::back_project, 32, 1421, 1863},
                            {PowerSgdPass::back_project, 64, 2682, 2084}}) {
    const MatrixTable table =
        table_of(stream, std::vector<std::array<int32_t, 3>>(151, {1778, 1000, m.rank}));
    const PassTimes times = model_times({m.kind, &table, m.kind != PowerSgdPass::back_project});
    EXPECT_NEAR(times.fused_us, m.fused_us, 0.2 * m.fused_us) << m.rank;
    if (m.library_us > 0) {
      EXPECT_NEAR(times.library_us, m.library_us, 0.2 * m.library_us) << m.rank;
      EXPECT_EQ(times.library_is_faster(), m.library_us < m.fused_us) << m.rank;
    }
  }
}

}  // namespace
}  // namespace gradwire::testing
