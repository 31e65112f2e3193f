// The engine of the CPU shim. The engine runs a grid block by block, with one fiber per CUDA thread.
// tests/simt/simt.h adds CUDA's language on top of the engine.
//
// Order: blocks run one after another in a shuffled order. Within a block, the next thread is drawn at random
// from the threads that can run. Some schedules draw uniformly. The other schedules let one warp run as far
// ahead as barriers allow. The two kinds of schedules find different bugs. A schedule is a pure function of
// (seed, kernel name, number of blocks, block, repetition), so tests that launch a kernel at many sizes try
// many orders.
//
// Every launch runs Options::schedules times, each time in another schedule and from the same memory, and
// must leave the same bits. The engine saves and restores every allocation into which a kernel parameter
// points. Different bits reveal a race: a missing barrier, an unordered float atomic or an uninitialized
// shared value.
//
// Blocks of a grid may depend on each other only through atomics that never wait. A grid barrier or a
// spinning look-back scan fails here as a livelock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/simt/vector_types.h"

namespace gradwire::simt {

// An error that the shim found in a kernel or its launch. The text names the kernel, block, warps and lanes.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  uint64_t seed = 1;        // value of GRADWIRE_TEST_SEED
  int schedules = 2;        // number of runs per launch; 1 for a kernel whose result may vary
  int multiprocessors = 1;  // small, so that grid-stride loops iterate
};
Options& options();

struct Grid {
  const char* kernel = "";
  const void* kernel_address = nullptr;
  dim3 grid, block;
  size_t shared_bytes = 0;
};

// Runs `thread(arguments)` for every thread of the grid. `parameters` are the bytes of each kernel parameter,
// in which the engine searches for pointers to memory to save and compare. Throws Failure.
void run(const Grid& grid, void (*thread)(const void* arguments), const void* arguments,
         std::span<const std::span<const std::byte>> parameters);

#ifdef GRADWIRE_STANDIN
// Runs a grid immediately on the calling thread, in one order of its threads. Throws Failure.
void run_grid(const Grid& grid, void (*thread)(const void* arguments), const void* arguments);
#endif

// Returns the number of launches of a kernel under this name. All schedules of a launch count as one launch.
int64_t launches(const std::string& kernel);

// The place where a thread waits: the source line of a collective in the kernel.
struct Where {
  const char* file;
  int line;
};

// Collective operations of a warp or block. Operations named `reading` return a value; see finish() in
// collectives.cpp.
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

// Blocks the running thread until every lane of `mask` has arrived. Returns the thread's result. `source` is
// the lane that a shuffle reads.
uint64_t warp_collective(Op op, unsigned mask, uint64_t value, int source, Where where);
int block_collective(Op op, bool predicate, Where where);
// Returns the index of the running thread's lane within its warp.
int lane_id();
unsigned lanes_alive();
// Lets another thread run. Every atomic operation calls preempt().
void preempt();
// Ends the launch with Failure(what), from inside a kernel.
[[noreturn]] void fail(const std::string& what);

void* dynamic_shared();

// Copies to shared memory that a thread has begun (kernels/cuda/copies.cuh), and the number of the group that
// its next copies belong to. A copy from null is of zeros.
struct AsyncCopies {
  struct Copy {
    void* to;
    const void* from;
    int bytes, group;
  };
  std::vector<Copy> waiting;
  int group = 0;
};
AsyncCopies& async_copies();  // of the running thread

// A `__shared__` declaration, identified by its source location; see shared_memory.cpp.
struct SharedSite {
  const char* file;
  int line;
  void* entry = nullptr;
  void enter();  // poisons the variable when a block first enters
};

}  // namespace gradwire::simt

// Built-in variables. One thread runs at a time, and the scheduler sets them before it resumes a thread.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;
