// State shared by the parts of the shim's engine: the running launch and block. The engine
// itself is compiled without sanitizers, for speed; the kernels are not.
//   launch.cpp         limits, schedules, saved memory, log, watchdog
//   together.cpp       grids of several ranks side by side
//   scheduler.cpp      fibers, and the choice of the next one
//   collectives.cpp    barriers, shuffles, votes
//   shared_memory.cpp  poison at block start
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/simt/runtime.h"

namespace gradwire::simt {

inline constexpr int kWarp = 32;

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): good enough, and independent of the library's version.
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
};

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes;
  int group;
};

struct Thread {
  enum class State : uint8_t { idle, ready, in_warp_op, in_block_op, exited };
  State state = State::idle;  // idle: not started
  Op op{};
  unsigned mask = 0;
  int source = 0;
  uint64_t value = 0, result = 0;
  Where where{};
  uint3 index{};
  std::vector<AsyncCopy> copies;  // not yet arrived
  int groups = 0;                 // number of groups that have ended
};

// Masks of a warp's lanes. Bit i is lane i.
struct Warp {
  unsigned existing = 0, ready = 0, in_warp_op = 0;
};

// A shared variable used by a block that has yielded to others, and its bytes until that block resumes.
struct KeptVariable {
  void* variable;  // in shared_memory.cpp
  std::vector<unsigned char> bytes;
};

struct Block {
  const Grid* grid = nullptr;
  void (*thread_main)(const void*) = nullptr;
  const void* arguments = nullptr;
  uint3 index{};
  // Fibers of the block's threads. Blocks that are alive at the same time have separate fibers.
  size_t first_fiber = 0;
  void* dynamic_memory = nullptr;  // its dynamic shared memory
  int64_t serial = 0;              // number of the block among all blocks ever started
  std::vector<KeptVariable> shared;
  int repetition = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned ready_warps = 0;
  int unfinished = 0, at_barrier = 0;
  int predicates = 0;  // threads at the barrier with a true predicate
  int64_t spins = 0;   // preemptions since a thread last made progress
  Random random{0};
  // Draw any thread, preferring the last warp for a while; otherwise favour warps in a fixed order.
  bool uniform = true;
  int first_warp = 0;          // start of that order
  bool downward = false;       // direction of that order
  int last_warp = 0;           // the warp of the thread drawn last
  bool draw_any = false;       // the next draw is uniform in either mode
  int current = -1;            // the running thread, -1: the scheduler
  bool abandoned = false;      // resumed threads exit
  bool beside_others = false;  // blocks of other grids also run, and may be waited for
  bool gives_way = false;      // the scheduler lets another block run
  std::string failure;         // the first one wins
};
extern Block block;

// The word that fills shared memory in the next block: a NaN, or anything.
extern uint32_t poison_word;
extern size_t static_shared_bytes;  // of the variables declared so far by the running block

// Plain loads and stores, for memory that the sanitizers would report (guards, redzones).
void fill_unchecked(void* data, size_t bytes, uint32_t word);
void copy_unchecked(void* to, const void* from, size_t bytes);        // writes only what differs
size_t first_difference(const void* a, const void* b, size_t bytes);  // `bytes` when there is none

// Prepares `block` to begin: number, order, poisoned shared memory. Its grid, index, thread_main, arguments,
// first_fiber and dynamic_memory are set.
void begin_block(Random& random, uint64_t way);
// Runs the block to its end, or until it yields. Returns false if block.failure was set and its threads have
// exited.
bool run_block();
// Makes the threads that are inside the kernel exit.
void abandon_block();
// Switches between two blocks that are alive: shared variables are statics, so each block's values are saved
// while others run.
void put_shared_away();
void bring_shared_back();
// The launches of several ranks that run concurrently, in one of the schedules.
struct QueuedLaunch {
  Grid grid;
  void (*thread)(const void*);
  std::shared_ptr<const void> arguments;
  std::vector<std::span<const std::byte>> parameters;
};
void run_together(const std::vector<std::vector<QueuedLaunch>>& ranks, int repetition);
// Returns the seed of a launch's schedules.
Random random_for(const Grid& grid, int repetition);
// Part of each switch. The engine is compiled as one file, so all callers see the definitions.
#define GW_SWITCHES [[gnu::always_inline]] inline
// Switches from the running thread to the next one; returns when it is resumed.
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
