#include "runtime/host_memory.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstdlib>

#include "runtime/error.h"

namespace gradwire {

void FreeHostMemory::operator()(void* memory) const {
  std::free(memory);
}

HostMemory host_memory(size_t bytes, size_t huge_from) {
  const size_t alignment = bytes >= huge_from ? kHugePage : 256;
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  HostMemory memory(std::aligned_alloc(alignment, whole));
  if (memory == nullptr) throw DeviceError(fmt::format("out of host memory: {} bytes asked for", bytes));
#ifdef MADV_HUGEPAGE
  if (bytes >= huge_from) madvise(memory.get(), whole, MADV_HUGEPAGE);  // a hint; refusal costs only speed
#endif
  return memory;
}

}  // namespace gradwire
