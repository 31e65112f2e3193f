// Runs the grids of kernels on tests/simt's fibers. Each launch uses one order of threads, since tests/simt
// tests several orders.
//
// Compiled as one file with tests/simt/scheduler.cpp and collectives.cpp. The engine's state is global and
// belongs to the running operation.
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>

#include "tests/simt/engine.h"
#include "tests/standin/launch.h"

namespace gradwire::simt {
namespace {

// Holds the dynamic shared memory of a block. begin_block() fills the memory with poison.
struct SharedMemory {
  explicit SharedMemory(size_t bytes) {
    if (bytes > 0 && posix_memalign(&data, 16, bytes) != 0) throw std::bad_alloc();
  }
  ~SharedMemory() { std::free(data); }
  SharedMemory(const SharedMemory&) = delete;
  void* data = nullptr;
};

}  // namespace

uint32_t poison_word = 0;
size_t static_shared_bytes = 0;

Options& options() {
  static Options only;
  return only;
}

void fill_unchecked(void* data, size_t bytes, uint32_t word) {
  auto* to = static_cast<unsigned char*>(data);
  for (size_t i = 0; i + 4 <= bytes; i += 4) std::memcpy(to + i, &word, 4);
}

void* dynamic_shared() {
  return block.dynamic_memory;
}

// Runs blocks one after the other, in ascending or descending order.
void run_grid(const Grid& grid, void (*thread)(const void*), const void* arguments) {
  const SharedMemory shared(grid.shared_bytes);
  Random random{standin::draw()};
  const uint64_t count = uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  for (uint64_t done = 0; done < count; ++done) {
    const uint64_t at = options().seed % 2 == 0 ? done : count - 1 - done;
    block.grid = &grid;
    block.thread_main = thread;
    block.arguments = arguments;
    block.dynamic_memory = shared.data;
    block.index = {static_cast<unsigned>(at % grid.grid.x),
                   static_cast<unsigned>(at / grid.grid.x % grid.grid.y),
                   static_cast<unsigned>(at / grid.grid.x / grid.grid.y)};
    begin_block(random, random.next());
    if (!run_block()) throw Failure(describe_launch() + ": " + block.failure);
  }
}

}  // namespace gradwire::simt
