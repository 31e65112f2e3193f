// Host memory for data that kernels stream through.
#pragma once

#include <cstddef>
#include <memory>

namespace gradwire {

constexpr size_t kHugePage = size_t{2} << 20;

struct FreeHostMemory {
  void operator()(void* memory) const;
};
using HostMemory = std::unique_ptr<void, FreeHostMemory>;

// At least `bytes`, beginning at a multiple of 256; from `huge_from` on, on huge pages where the system grants them, which
// makes streaming a third faster. The last one is used up, so a smaller `huge_from` wastes more. Throws DeviceError.
HostMemory host_memory(size_t bytes, size_t huge_from = 4 * kHugePage);

}  // namespace gradwire
