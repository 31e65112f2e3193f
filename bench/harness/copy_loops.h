// Plain ways to copy memory on the host: the yardstick for kernels.
#pragma once

#include <cstdint>
#include <vector>

namespace gradwire::bench {

// Copies `bytes`, a multiple of 64, between 64-byte aligned addresses.
struct CopyLoop {
  const char* name;
  void (*copy)(void* to, const void* from, int64_t bytes);
};

// memcpy, plain vector stores and, where the machine has them, non-temporal vector stores. An ordinary store
// reads its line first, which limits a copy to two thirds of the bandwidth.
std::vector<CopyLoop> copy_loops();

// On all host threads; `bytes` is rounded down to a multiple of 64.
void copy_in_parallel(CopyLoop loop, void* to, const void* from, int64_t bytes);

}  // namespace gradwire::bench
