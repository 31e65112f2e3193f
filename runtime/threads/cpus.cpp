#include "runtime/threads/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>
#include <vector>

#include "runtime/util/parse.h"

namespace gradwire {
namespace {

// Returns the quota in one control group's folder, in processors, or 0 if there is none.
double quota_in(const std::string& folder) {
  std::string quota;
  double period = 0;
  if (std::ifstream file(folder + "/cpu.max"); !(file >> quota >> period)) {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return period <= 0 ? 0 : parse_number(quota, 0.0).value_or(0) / period;  // "max", "-1": no quota
}

// Returns the bytes that one control group's folder allows, or 0 if it has no limit.
double memory_in(const std::string& folder) {
  std::string bytes;
  if (std::ifstream file(folder + "/memory.max"); !(file >> bytes))
    std::ifstream(folder + "/memory.limit_in_bytes") >> bytes;
  const double limit = parse_number(bytes, 0.0).value_or(0);  // "max": no limit
  return limit < 0x1p62 ? limit : 0;                          // 2^63 - 4096: no limit
}

// Returns the smallest limit that `limit_in` finds in the folders of this process's control groups and their
// parents; 0 without a limit.
double least_limit(const std::string& root, const std::string& controller,
                   double (*limit_in)(const std::string&)) {
  std::ifstream groups(root + "/proc/self/cgroup");
  double least = 0;
  // A line is "0::/path" in version 2 of control groups, "4:cpu,cpuacct:/path" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && (',' + controllers + ',').find(',' + controller + ',') == std::string::npos)
      continue;
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
    // Check the group and its parents. A container may see a path of its host that does not exist in the
    // container.
    std::string path = line.substr(second + 1);
    while (true) {
      if (!path.empty() && path.back() == '/') path.pop_back();
      const double limit = limit_in(mount + path);
      if (limit > 0 && (least == 0 || limit < least)) least = limit;
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

}  // namespace

int cpus_by_affinity() {
  // A set has 1024 processors. The kernel refuses sets that are smaller than its own.
  for (std::vector<cpu_set_t> sets(1); sets.size() <= 1024; sets.resize(2 * sets.size())) {
    const size_t bytes = sets.size() * sizeof sets[0];
    if (sched_getaffinity(0, bytes, sets.data()) == 0) return std::max(1, CPU_COUNT_S(bytes, sets.data()));
  }
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int cpus_by_quota(const std::string& root) {
  return static_cast<int>(std::ceil(least_limit(root, "cpu", quota_in) - 1e-9));
}

int64_t memory_by_limit(const std::string& root) {
  return static_cast<int64_t>(least_limit(root, "memory", memory_in));
}

}  // namespace gradwire
