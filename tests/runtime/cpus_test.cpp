#include "runtime/threads/thread.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_folder.h"

namespace gradwire {
namespace {

using Files = std::vector<std::pair<std::string, std::string>>;

// Returns the limit that `read` finds in these files, in a folder that replaces /proc and /sys.
template <typename Limit>
Limit limit_with(Limit (*read)(const std::string&), const std::string& groups, const Files& files) {
  const testing::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder.path(name)).parent_path());
    std::ofstream(folder.path(name)) << text;
  };
  write("proc/self/cgroup", groups);
  for (const auto& [name, text] : files) write("sys/fs/cgroup/" + name, text + "\n");
  return read(folder.path());
}

int quota_with(const std::string& groups, const Files& files) {
  return limit_with(cpus_by_quota, groups, files);
}

TEST(Cpus, RoundsTheControlGroupQuotaUp) {
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "max 100000"}}), 0);
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "250000 100000"}}), 3);
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "50000 100000"}}), 1);
  EXPECT_EQ(quota_with("0::/\n", {}), 0);
  EXPECT_EQ(quota_with("", {}), 0);
}

TEST(Cpus, TakesTheSmallestQuotaOfTheGroupAndItsParents) {
  const Files nested = {
      {"a/cpu.max", "200000 100000"}, {"a/b/cpu.max", "400000 100000"}, {"a/b/c/cpu.max", "max 100000"}};
  EXPECT_EQ(quota_with("0::/a/b/c\n", nested), 2);
  EXPECT_EQ(quota_with("0::/other\n", nested), 0);
}

TEST(Cpus, UsesTheVisibleQuotaInAContainerThatSeesTheHostsPath) {
  EXPECT_EQ(quota_with("0::/kubepods/pod1/container1\n", {{"cpu.max", "200000 100000"}}), 2);
}

TEST(Cpus, ReadsTheQuotaOfVersion1) {
  const std::string groups = "5:memory:/x\n4:cpu,cpuacct:/docker/c\n3:cpuset:/\n";
  EXPECT_EQ(quota_with(groups, {{"cpu,cpuacct/docker/c/cpu.cfs_quota_us", "150000"},
                                {"cpu,cpuacct/docker/c/cpu.cfs_period_us", "50000"}}),
            3);
  EXPECT_EQ(quota_with(groups,
                       {{"cpu,cpuacct/cpu.cfs_quota_us", "-1"}, {"cpu,cpuacct/cpu.cfs_period_us", "100000"}}),
            0);
}

TEST(Cpus, ReadsTheMemoryLimitOfBothVersions) {
  const struct {
    std::string groups;
    Files files;
    int64_t expected;
  } cases[] = {
      {"0::/\n", {{"memory.max", "max"}}, 0},
      {"0::/\n", {}, 0},
      {"0::/a/b\n", {{"a/memory.max", "268435456"}, {"a/b/memory.max", "536870912"}}, 268435456},
      {"0::/pod/of/the/host\n", {{"memory.max", "4294967296"}, {"cpu.max", "1 1"}}, 4294967296},
      {"5:memory:/x\n4:cpu:/x\n", {{"memory/x/memory.limit_in_bytes", "268435456"}}, 268435456},
      {"5:memory:/x\n", {{"memory/x/memory.limit_in_bytes", "9223372036854771712"}}, 0},
      {"4:cpu:/x\n", {{"memory/x/memory.limit_in_bytes", "268435456"}}, 0},
  };
  for (const auto& [groups, files, expected] : cases)
    EXPECT_EQ(limit_with(memory_by_limit, groups, files), expected) << groups;
}

}  // namespace
}  // namespace gradwire
