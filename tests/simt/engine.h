// State shared by the parts of the shim's engine: the running launch and the running block. The engine itself
// is compiled without sanitizers, for speed. The kernels are compiled with sanitizers.
//   launch.cpp         limits, schedules, saved memory, log, watchdog
//   scheduler.cpp      fibers, and the choice of the next fiber
//   collectives.cpp    barriers, shuffles, votes
//   shared_memory.cpp  poison at block start
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/simt/runtime.h"

namespace gradwire::simt {

inline constexpr int kWarp = 32;

// Generates random numbers with SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), which does not depend on the
// version of the standard library.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

struct Thread {
  enum class State : uint8_t { idle, ready, in_warp_op, in_block_op, exited };
  State state = State::idle;  // idle: the thread has not started
  Op op{};
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0, result = 0;
  Where where{};
  uint3 index{};
  AsyncCopies copies{};
};

// Sets of a warp's lanes. Bit i is lane i.
struct Warp {
  unsigned existing = 0, ready = 0, in_warp_op = 0;
};

struct Block {
  const Grid* grid = nullptr;
  void (*thread_main)(const void*) = nullptr;
  const void* arguments = nullptr;
  uint3 index{};
  void* dynamic_memory = nullptr;  // the block's dynamic shared memory
  int64_t serial = 0;              // number of this block among all started blocks
  int repetition = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned ready_warps = 0;
  int unfinished = 0, at_barrier = 0;
  int predicates = 0;  // number of threads at the barrier with a true predicate
  int64_t spins = 0;   // number of preemptions since a thread last made progress
  Random random{0};
  // true: draw any thread, staying with the last warp for a while; false: favour warps in a fixed order.
  bool uniform = true;
  int first_warp = 0;      // first warp of the fixed order
  bool downward = false;   // whether the fixed order is descending
  int last_warp = 0;       // warp of the last drawn thread
  bool draw_any = false;   // whether the next draw is uniform in either mode
  int current = -1;        // index of the running thread; -1: the scheduler
  bool abandoned = false;  // whether resumed threads exit
  std::string failure;     // text of the first failure
};
extern Block block;

// The word that fills shared memory in the next block: a NaN or a random word.
extern uint32_t poison_word;
extern size_t static_shared_bytes;  // size in bytes of the running block's variables so far

// Access memory that the sanitizers would report (guards, redzones), by plain loads and stores.
void fill_unchecked(void* data, size_t bytes, uint32_t word);
void copy_unchecked(void* to, const void* from, size_t bytes);        // writes only bytes that differ
size_t first_difference(const void* a, const void* b, size_t bytes);  // index; `bytes` if a and b are equal

// Prepares `block` to begin: sets its number and thread order, and poisons shared memory. The caller has set
// the block's grid, index, thread_main, arguments and dynamic_memory.
void begin_block(Random& random, uint64_t way);
// Runs the block. Returns false if the block failed: block.failure is set and
// the block's threads have exited.
bool run_block();
// Makes the threads that are inside the kernel exit.
void abandon_block();
// Marks functions that are part of each switch. The engine is compiled as one file, so all callers see the
// definitions.
#define GW_SWITCHES [[gnu::always_inline]] inline
// Switches from the running thread to the next thread. Returns when the thread is resumed.
GW_SWITCHES void switch_out();
// Returns "kernel 'x', block (0,0,0) of (1,1,1), threads (64,1,1), seed 1".
std::string describe_launch();
// Returns "kernel 'x', blocks (1,1,1), threads (64,1,1)".
std::string describe(const Grid& grid);
// Returns one line per group of warps in the same state.
std::string describe_threads();

inline Thread& current_thread() {
  return block.threads[block.current];
}
inline Warp& current_warp() {
  return block.warps[block.current / kWarp];
}
inline unsigned current_bit() {
  return 1u << (block.current % kWarp);
}

inline void make_ready(size_t warp, unsigned lanes) {
  block.warps[warp].ready |= lanes;
  if (block.warps[warp].ready != 0) block.ready_warps |= 1u << warp;
}

}  // namespace gradwire::simt
