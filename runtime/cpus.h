// How many processors this process may use.
#pragma once

#include <string>

namespace gradwire {

// Returns the number of processors that it may run on: its affinity mask, which cpusets limit too.
int cpus_by_affinity();

// Returns how many processors' time its control groups allow (cpu.max, or cpu.cfs_quota_us of version 1), rounded up; 0
// where nothing limits it. Containers are limited so. `root`: where /proc and /sys are; for tests.
int cpus_by_quota(const std::string& root = "");

}  // namespace gradwire
