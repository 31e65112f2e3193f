#include "runtime/threads/cpus.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_folder.h"

namespace gradwire {
namespace {

// Returns the CPU quota read from these files, in a folder that replaces /proc and /sys.
int quota_with(const std::string& groups, const std::vector<std::pair<std::string, std::string>>& files) {
  const testing::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder.path(name)).parent_path());
    std::ofstream(folder.path(name)) << text;
  };
  write("proc/self/cgroup", groups);
  for (const auto& [name, text] : files) write("sys/fs/cgroup/" + name, text + "\n");
  return cpus_by_quota(folder.path());
}

TEST(Cpus, RoundsTheControlGroupQuotaUp) {
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "max 100000"}}), 0);
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "250000 100000"}}), 3);
  EXPECT_EQ(quota_with("0::/\n", {{"cpu.max", "50000 100000"}}), 1);
  EXPECT_EQ(quota_with("0::/\n", {}), 0);
  EXPECT_EQ(quota_with("", {}), 0);
}

TEST(Cpus, TakesTheSmallestQuotaOfTheGroupAndItsParents) {
  const std::vector<std::pair<std::string, std::string>> nested = {
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

}  // namespace
}  // namespace gradwire
