// Tests how the interposer reads its settings, and which calls it intercepts.
#include "integrations/nccl/decide.h"
#include "tests/support/expect.h"

#include <gtest/gtest.h>

#include <map>

namespace gradwire::interposer {
namespace {

Settings with(const std::map<std::string, std::string>& variables) {
  return Settings::read([&](const char* name) -> const char* {
    auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

TEST(Interposer, TakesLargeFloat32SumsAndAveragesOnly) {
  const Settings s = with({{"GRADWIRE_NCCL_MIN_BYTES", "4K"}});
  EXPECT_EQ(decide(s, {.count = 1024}), Decision::compressed);
  EXPECT_EQ(decide(s, {.count = 1024, .op = ncclAvg}), Decision::compressed);
  EXPECT_EQ(decide(s, {.count = 1023}), Decision::untouched);
  EXPECT_EQ(decide(s, {.count = 0}), Decision::untouched);
  EXPECT_EQ(decide(s, {.count = 1024, .type = ncclBfloat16}), Decision::untouched);
  EXPECT_EQ(decide(s, {.count = 1024, .op = ncclMax}), Decision::untouched);
  EXPECT_EQ(decide(s, {.count = 1024, .op = static_cast<ncclRedOp_t>(77)}), Decision::untouched)
      << "a reduction defined by the caller";
  EXPECT_EQ(decide(s, {.count = 1024, .group_depth = 1}), Decision::untouched_group);
  EXPECT_EQ(decide(s, {.count = 1024, .capturing = true}), Decision::untouched_capture);
  const Settings all = with({{"GRADWIRE_NCCL_MIN_BYTES", "0"}});
  EXPECT_EQ(decide(all, {.count = 1}), Decision::compressed);
  EXPECT_EQ(decide(all, {.count = 0}), Decision::untouched);
}

// Checks that whether ranks compare a call depends only on the call. So a disabled or misconfigured rank also
// takes part in the comparison.
TEST(Interposer, RanksCompareDependingOnTheCallAlone) {
  EXPECT_TRUE(may_compare({.count = 1}));
  EXPECT_TRUE(may_compare({.count = 1 << 30, .op = ncclAvg}));
  EXPECT_FALSE(may_compare({.count = 1 << 30, .op = ncclMin}));
  EXPECT_FALSE(may_compare({.count = 1 << 30, .type = ncclInt32}));
  EXPECT_FALSE(may_compare({.count = 1, .group_depth = 2}));
  EXPECT_FALSE(may_compare({.count = 1, .capturing = true}));
}

TEST(Interposer, InvalidSettingsDisableItWithTheReason) {
  for (const auto& [name, value, says] : std::vector<std::array<std::string, 3>>{
           {"GRADWIRE_NCCL_SPEC", "bf17", "bf17"},
           {"GRADWIRE_NCCL_SPEC", "powersgd:rank=4", "the model's tensors"},
           {"GRADWIRE_NCCL_MIN_BYTES", "4X", "4X"},
           {"GRADWIRE_NCCL_MIN_BYTES", "-1", "-1"},
           {"GRADWIRE_NCCL_MAX_STATE_BYTES", "lots", "lots"},
           {"GRADWIRE_NCCL_RANKS_PER_NODE", "0", "0"},
           {"GRADWIRE_NCCL_SPEC", "bf16:schedule=hierarchical", "RANKS_PER_NODE"},
           {"GRADWIRE_NCCL_SPEC", "fp32:schedule=nccl", "without the interposer"},
           {"GRADWIRE_NCCL_SPEC", "off", "is off"},
           {"GRADWIRE_NCCL_DRY_RUN", "yes", "GRADWIRE_NCCL_DRY_RUN must be 0 or 1, not 'yes'"}}) {
    const Settings s = with({{name, value}});
    EXPECT_FALSE(s.on) << name << "=" << value;
    testing::expect_has(s.why_off, {says});
    EXPECT_EQ(s.fingerprint(), 0u);
    EXPECT_EQ(decide(s, {.count = 1 << 30}), Decision::untouched);
  }
  EXPECT_TRUE(with({{"GRADWIRE_NCCL_DRY_RUN", "0"}}).on);
  EXPECT_TRUE(with({}).on);
}

TEST(Interposer, FingerprintCoversEverySettingThatMustAgree) {
  const auto base = with({}).fingerprint();
  EXPECT_NE(base, 0u);
  EXPECT_EQ(static_cast<uint64_t>(static_cast<double>(base)), base) << "it is sent as a double";
  EXPECT_NE(with({{"GRADWIRE_NCCL_SPEC", "fp8"}}).fingerprint(), base);
  EXPECT_NE(with({{"GRADWIRE_NCCL_MIN_BYTES", "2M"}}).fingerprint(), base);
  EXPECT_NE(with({{"GRADWIRE_NCCL_RANKS_PER_NODE", "2"}}).fingerprint(), base);
  EXPECT_NE(with({{"GRADWIRE_NCCL_DRY_RUN", "1"}}).fingerprint(), base);
  EXPECT_EQ(with({{"GRADWIRE_NCCL_MAX_STATE_BYTES", "1G"}}).fingerprint(), base)
      << "residuals belong to one rank";
}

TEST(Interposer, ParsesSizesWithUnits) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("123"), 123);
  EXPECT_EQ(parse_bytes("4K"), 4096);
  EXPECT_EQ(parse_bytes("3m"), 3 << 20);
  EXPECT_EQ(parse_bytes("2G"), int64_t{2} << 30);
  for (const char* text : {"", "K", "4KB", "1.5M", "99999999999G", " 4"})
    EXPECT_LT(parse_bytes(text), 0) << text;
}

}  // namespace
}  // namespace gradwire::interposer
