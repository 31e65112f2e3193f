#include "runtime/threads/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>

#include "runtime/util/parse.h"

namespace gradwire {
namespace {

// Returns the quota in one control group's folder, in processors, or 0 if there is none.
double quota_in(const std::string& folder) {
  std::string quota;
  double period = 0;
  if (std::ifstream file(folder + "/cpu.max"); file >> quota >> period) {
    return period <= 0 ? 0 : parse_number(quota, 0.0).value_or(0) / period;  // "max" means no quota
  }
  double microseconds = 0;
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
  if (!(quota_file >> microseconds) || !(period_file >> period)) return 0;
  return microseconds <= 0 || period <= 0 ? 0 : microseconds / period;
}

bool lists_cpu(std::istringstream controllers) {
  for (std::string name; std::getline(controllers, name, ',');) {
    if (name == "cpu") return true;
  }
  return false;
}

}  // namespace

int cpus_by_affinity() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int cpus_by_quota(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  double least = 0;
  // A line is "0::/path" in version 2 of control groups, "4:cpu,cpuacct:/path" in version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !lists_cpu(std::istringstream(controllers))) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/" + controllers);
    // Check the group and its parents. A container may see a path of its host that does not exist in the
    // container.
    std::string path = line.substr(second + 1);
    while (true) {
      if (!path.empty() && path.back() == '/') path.pop_back();
      const double quota = quota_in(mount + path);
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return static_cast<int>(std::ceil(least - 1e-9));
}

}  // namespace gradwire
