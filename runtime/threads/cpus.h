// The processors and the memory that this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace gradwire {

// Returns the number of processors in this process's affinity mask, which cpusets also limit.
int cpus_by_affinity();

// Returns the processor time, in processors, that this process's control groups allow (cpu.max, or
// cpu.cfs_quota_us of version 1), rounded up; 0 without a limit. Such quotas limit containers. `root`: the
// folder with /proc and /sys, for tests.
int cpus_by_quota(const std::string& root = "");

// Returns the bytes that this process's control groups allow (memory.max, or memory.limit_in_bytes); 0
// without a limit.
int64_t memory_by_limit(const std::string& root = "");

}  // namespace gradwire
