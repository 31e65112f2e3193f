// Runs the grids of kernels on tests/simt's fibers. Each launch uses one order of threads, since tests/simt
// tests several orders.
//
// Compiled as one file with tests/simt/scheduler.cpp and collectives.cpp. The engine's state is global and
// belongs to the running operation. A kernel that waits for another rank's kernel saves this state while
// other kernels run.
#include <chrono>
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

// Runs blocks one after the other, in ascending or descending order. All ranks use the same order, because
// blocks with the same index wait for each other.
void run_grid(const Grid& grid, void (*thread)(const void*), const void* arguments) {
  const SharedMemory shared(grid.shared_bytes);
  Random random{standin::draw()};
  const uint64_t count = uint64_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  block.first_fiber = 0;
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

// Occasionally runs other streams, whose kernels use the engine in the meantime.
static void give_way() {
  if (block.random.next() >> 58 != 0) return;
  EngineState kept;
  kept.exchange();
  standin::let_other_streams_run();
  kept.exchange();
}

void store_signal(uint32_t* word, uint32_t value) {
  *word = value;
  block.spins = 0;
  preempt();
}

uint32_t load_signal(const uint32_t* word) {
  give_way();
  const uint32_t value = *word;
  block.spins = 0;  // a kernel may spin until its patience ends
  block.draw_any = true;
  make_ready(static_cast<size_t>(block.current / kWarp), current_bit());
  switch_out();
  return value;
}

uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace gradwire::simt
