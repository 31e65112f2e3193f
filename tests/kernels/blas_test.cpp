// Tests the choice of OpenBLAS kernels. tests/integrations/blas_test.py tests the choice inside another
// program's process.
#include "kernels/blas/blas.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/blas/kernel_set.h"

namespace gradwire::blas {
namespace {

TEST(BlasKernels, KeepsAChoiceThatFitsTheProcessor) {
  for (const char* chosen : {"Haswell", "Zen", "SkylakeX", "Cooperlake"}) {
    EXPECT_EQ(better_kernels(chosen, Level::avx2), nullptr) << chosen;
  }
  for (const char* chosen : {"SkylakeX", "Cooperlake", "SapphireRapids"}) {
    EXPECT_EQ(better_kernels(chosen, Level::avx512), nullptr) << chosen;
  }
  for (const char* chosen : {"Prescott", "Nehalem", "Sandybridge", "Zen"}) {
    EXPECT_EQ(better_kernels(chosen, Level::base), nullptr) << chosen;
  }
}

TEST(BlasKernels, ChoosesByFeaturesOnAnUnknownProcessor) {
  for (const char* chosen : {"Prescott", "Opteron", "Barcelona", "Nehalem", "Sandybridge", "anything"}) {
    EXPECT_STREQ(better_kernels(chosen, Level::avx2), "Haswell") << chosen;
    EXPECT_STREQ(better_kernels(chosen, Level::avx512), "SkylakeX") << chosen;
  }
  EXPECT_STREQ(better_kernels("Haswell", Level::avx512), "SkylakeX");
  EXPECT_STREQ(better_kernels("Zen", Level::avx512), "SkylakeX");
}

TEST(BlasKernels, FitThisProcessor) {
  const GradwireBlas& library = *gradwire_blas();
  ASSERT_EQ(library.error, nullptr);
  EXPECT_EQ(std::string(library.version).rfind("OpenBLAS ", 0), 0u) << library.version;
  if (library.wanted == nullptr) {
    EXPECT_EQ(better_kernels(library.kernels, level_of_processor()), nullptr) << library.kernels;
  } else {
    EXPECT_STREQ(library.kernels, library.wanted);
  }
}

}  // namespace
}  // namespace gradwire::blas
