// Plain memory copies on the host, as the reference for the speed of kernels.
#pragma once

#include <cstdint>
#include <vector>

namespace gradwire::bench {

// A loop that copies `bytes` bytes between 64-byte aligned addresses. `bytes` is a multiple of 64.
struct CopyLoop {
  const char* name;
  void (*copy)(void* to, const void* from, int64_t bytes);
};

// Returns memcpy, plain vector stores and, if the machine supports them, non-temporal vector stores. An
// ordinary store first reads its cache line, so a copy reaches at most two thirds of the bandwidth.
std::vector<CopyLoop> copy_loops();

// Copies on all host threads. Rounds `bytes` down to a multiple of 64.
void copy_in_parallel(CopyLoop loop, void* to, const void* from, int64_t bytes);

}  // namespace gradwire::bench
