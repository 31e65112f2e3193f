// The engine of the CPU shim: runs a grid block by block, one fiber per CUDA thread. On top of it,
// tests/simt/simt.h gives kernels CUDA's language.
//
// Order. Blocks run one after another in a shuffled order; within a block the next thread is drawn at random
// from those that can run. Half of the schedules draw uniformly, the other half let one warp run as far ahead
// as barriers allow, because the two miss different bugs. A schedule is a pure function of (seed, kernel
// name, number of blocks, block, repetition): tests that launch a kernel at many sizes try many orders.
//
// Every launch is run under Options::schedules schedules, each from the same memory (every allocation that a
// kernel parameter points into is saved and restored), and must leave the same bits. That is the race
// detector: a missing barrier, an unordered float atomic or an uninitialized shared value gives different
// bits.
//
// Blocks of a grid may depend on each other only through atomics that never wait: a grid barrier, or a
// look-back scan that spins, fails here as a livelock. Only the grids of several ranks, launched through
// Together, may wait for each other: their blocks are all alive at once, alternate in random order, and pass
// signals (store_signal, load_signal).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "tests/simt/vector_types.h"

namespace gradwire::simt {

// An error that the shim found in a kernel or its launch. The text names kernel, block, warps and lanes.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  uint64_t seed = 1;        // GRADWIRE_TEST_SEED
  int schedules = 2;        // runs per launch; 1 for a kernel whose result may vary
  int multiprocessors = 1;  // few, so that grid-stride loops do loop
  // Plants a bug: no thread waits at this barrier of each kernel over several ranks.
  int unheeded_barrier = -1;
};
Options& options();

struct Grid {
  const char* kernel = "";
  const void* kernel_address = nullptr;
  dim3 grid, block;
  size_t shared_bytes = 0;
};

// Runs `thread(arguments)` for every thread of the grid. `parameters` are the bytes of each kernel parameter;
// they are searched for pointers to the memory to save and compare. Throws Failure.
void run(const Grid& grid, void (*thread)(const void* arguments), std::shared_ptr<const void> arguments,
         std::span<const std::span<const std::byte>> parameters);

#ifdef GRADWIRE_STANDIN
// Runs a grid immediately on the calling thread, in one order of its threads. Throws Failure.
void run_grid(const Grid& grid, void (*thread)(const void* arguments), const void* arguments);
#endif

// Runs kernels of several ranks concurrently. During the lifetime of a Together, the launches of its thread
// are queued; run() runs them: each rank's in order, as on a stream, the ranks' concurrently.
class Together {
 public:
  explicit Together(int ranks);
  ~Together();
  Together(const Together&) = delete;
  void rank(int rank) { rank_ = rank; }  // the rank of the launches that follow
  void run();                            // throws Failure
  void keep(const Grid& grid, void (*thread)(const void*), std::shared_ptr<const void> arguments,
            std::span<const std::span<const std::byte>> parameters);

 private:
  struct Queues;
  std::unique_ptr<Queues> queues_;
  int rank_ = 0;
};
// A word that blocks of other ranks read or write. Other blocks may run before these functions return.
void store_signal(uint32_t* word, uint32_t value);
uint32_t load_signal(const uint32_t* word);
// Returns a clock that advances by 1 us with each load_signal.
uint64_t nanoseconds();

// Returns how often a kernel was launched under this name, counting all schedules of a launch once.
int64_t launches(const std::string& kernel);

// The place where a thread waits: the line of the collective in the kernel's source.
struct Where {
  const char* file;
  int line;
};

// Collective operations of a warp or block. `reading` ones return a value; see finish() in collectives.cpp.
enum class Op : uint8_t {
  sync_warp,
  shuffle4,
  shuffle8,
  ballot,
  any,
  all,
  match_any,
  match_all,
  add_signed,
  add_unsigned,
  min_signed,
  min_unsigned,
  max_signed,
  max_unsigned,
  bit_and,
  bit_or,
  bit_xor,
  sync_block,
  sync_block_and,
  sync_block_or,
  sync_block_count,
};
const char* op_name(Op op);

// Called by the running thread. Returns the thread's result once every lane of `mask` has arrived. `source`
// is the lane that a shuffle reads.
uint64_t warp_collective(Op op, unsigned mask, uint64_t value, int source, Where where);
int block_collective(Op op, bool predicate, Where where);
// Returns the lane of the running thread within its warp.
int lane_id();
unsigned lanes_alive();
// Lets another thread run. Every atomic calls it.
void preempt();
// Ends the launch with Failure(what), from inside a kernel.
[[noreturn]] void fail(const std::string& what);

void* dynamic_shared();

// Delays a thread's asynchronous copies as long as possible: until the thread waits for their group.
void keep_copy(void* to, const void* from, int bytes);
void end_group();
void wait_for_groups(int last);  // Waits for all groups that have ended except the last ones.

// One `__shared__` declaration, identified by its place in the source: see shared_memory.cpp.
struct SharedSite {
  const char* file;
  int line;
  void* entry = nullptr;
  void enter();  // poisons the variable on the block's first visit
};

}  // namespace gradwire::simt

// Built-in variables. One thread runs at a time, and the scheduler sets them before it resumes a thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;
