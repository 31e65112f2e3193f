// PowerSGD with the products by a library, as on a GPU at high ranks: it conserves gradients like the
// kernels.
#include <gtest/gtest.h>

#include <optional>

#include "tests/collectives/conservation.h"
#include "tests/support/expect.h"
#include "tests/support/thin_products.h"

namespace gradwire::testing {
namespace {

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

}  // namespace
}  // namespace gradwire::testing
