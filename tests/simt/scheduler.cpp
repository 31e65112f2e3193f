// Fibers, one per CUDA thread of a block, and the choice of the next fiber.
//
// A fiber is created once and reused by all later blocks. A fiber runs a thread of the kernel, reports the
// end of the thread, and waits for the next thread. When a launch fails, the threads that are still inside
// the kernel are resumed once more and exit by an exception, so that their stacks are clean for the next
// launch.
#include <fmt/format.h>
#ifdef GRADWIRE_STANDIN  // compiled without sanitizers
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#else
#include <sanitizer/common_interface_defs.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/fiber.hpp>
#include <boost/context/preallocated.hpp>
#include <cstring>
#include <exception>
#include <map>

#include "tests/simt/engine.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace gradwire::simt {

Block block;

namespace {

constexpr size_t kStackBytes = 256 * 1024;  // virtual memory: untouched pages cost nothing
constexpr int64_t kMaxSpins = int64_t{1} << 21;

struct Abandon {};

// A stack with an unmapped page below it, so that an overflow faults.
struct Stack {
  Stack() {
    size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
      throw Failure("no memory for the stack of a CUDA thread");
    }
    bottom = static_cast<char*>(memory) + guard;
  }
  char* bottom;
};

struct NoAllocator {
  void deallocate(boost::context::stack_context&) {}
};

GW_SWITCHES int any_bit(unsigned mask) {
  int start = static_cast<int>(block.random.next() >> 59);
  return (std::countr_zero(std::rotr(mask, start)) + start) % kWarp;
}

GW_SWITCHES int favoured_bit(unsigned mask) {
  unsigned turned = std::rotr(mask, block.first_warp);
  int found = block.downward ? 31 - std::countl_zero(turned) : std::countr_zero(turned);
  return (found + block.first_warp) % kWarp;
}

GW_SWITCHES int take_next() {
  bool draw_any = block.draw_any, any = block.uniform || draw_any;
  block.draw_any = false;
  int warp = block.last_warp;
  // Even a uniform draw stays with a warp for a while, to reuse the CPU's cache.
  bool stay =
      block.uniform && !draw_any && (block.ready_warps >> warp & 1u) && block.random.next() >> 62 != 0;
  if (!stay) warp = any ? any_bit(block.ready_warps) : favoured_bit(block.ready_warps);
  block.last_warp = warp;
  Warp& chosen = block.warps[warp];
  int lane = any_bit(chosen.ready);
  chosen.ready &= ~(1u << lane);
  if (chosen.ready == 0) block.ready_warps &= ~(1u << warp);
  return warp * kWarp + lane;
}

// One side of a switch: a fiber, or the scheduler, which runs on the stack of the caller of launch().
struct Side {
  boost::context::fiber context;  // context that resumes this side
  void* asan_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
};

Side scheduler;
Side* running = &scheduler;
Side* came_from = nullptr;  // the side that switched to `running`

// The sides of all fibers. Never deleted, because idle fibers never end.
std::vector<Side*>& fibers = *new std::vector<Side*>();

GW_SWITCHES void arrive(boost::context::fiber&& from, Side& self) {
  __sanitizer_finish_switch_fiber(self.asan_stack, &came_from->bottom, &came_from->bytes);
  came_from->context = std::move(from);
}

// Resumes `target`. Returns when another side switches back.
GW_SWITCHES void switch_to(Side& target) {
  Side& self = *running;
  came_from = &self;
  running = &target;
  __sanitizer_start_switch_fiber(&self.asan_stack, target.bottom, target.bytes);
  arrive(std::move(target.context).resume(), self);
}

GW_SWITCHES void switch_to_thread(int index) {
  Thread& next = block.threads[index];
  next.state = Thread::State::ready;
  block.current = index;
  threadIdx = next.index;
  Side& fiber = *fibers[static_cast<size_t>(index)];
  if (&fiber != running) switch_to(fiber);
}

void switch_to_scheduler() {
  block.current = -1;
  switch_to(scheduler);
}

// Switches from the running thread, which cannot continue, to the next thread, or to the scheduler if no
// thread can run.
GW_SWITCHES void hand_over() {
  if (block.ready_warps != 0 && block.failure.empty()) {
    switch_to_thread(take_next());
  } else {
    switch_to_scheduler();
  }
}

void run_thread() {
  try {
    block.thread_main(block.arguments);
    if (!current_thread().copies.waiting.empty()) fail("a thread ended before it waited for its copies");
  } catch (const Abandon&) {
  } catch (const std::exception& error) {
    if (block.failure.empty()) block.failure = std::string("the kernel threw an exception: ") + error.what();
  }
}

boost::context::fiber fiber_main(boost::context::fiber&& from) {
  arrive(std::move(from), *running);
  while (true) {
    run_thread();
    current_thread().state = Thread::State::exited;
    --block.unfinished;
    block.spins = 0;
    hand_over();
  }
}

void make_fibers(size_t count) {
  while (fibers.size() < count) {
    Stack memory;
    // The stacks are staggered, because stacks with the same end offset in a page would compete for a few
    // cache sets.
    boost::context::stack_context stack;
    stack.size = kStackBytes - fibers.size() % 61 * 256;
    stack.sp = memory.bottom + stack.size;
    auto* fiber = new Side();
    fiber->bottom = memory.bottom;
    fiber->bytes = stack.size;
    fiber->context =
        boost::context::fiber(std::allocator_arg, boost::context::preallocated(stack.sp, stack.size, stack),
                              NoAllocator(), fiber_main);
    fibers.push_back(fiber);
  }
}

void place_threads() {
  dim3 size = block.grid->block;
  block.threads.assign(size_t{size.x} * size.y * size.z, Thread{});
  block.warps.assign((block.threads.size() + kWarp - 1) / kWarp, Warp{});
  uint3 index{0, 0, 0};
  for (size_t i = 0; i < block.threads.size(); ++i) {
    block.threads[i].index = index;
    block.warps[i / kWarp].existing |= 1u << (i % kWarp);
    if (++index.x == size.x) {
      index.x = 0;
      if (++index.y == size.y) index.y = 0, ++index.z;
    }
  }
  make_fibers(block.threads.size());
  block.ready_warps = 0;
  block.last_warp = 0;
  for (size_t w = 0; w < block.warps.size(); ++w) make_ready(w, block.warps[w].existing);
}

std::string dimensions(const dim3& d) {
  return fmt::format("({},{},{})", d.x, d.y, d.z);
}

// Formats a range of numbers: "3", or "3-7".
template <typename Number>
std::string range(Number first, Number last) {
  return last > first ? fmt::format("{}-{}", first, last) : fmt::to_string(first);
}

std::string lane_list(unsigned lanes) {
  std::string text;
  for (int i = 0; i < kWarp; ++i) {
    if (!(lanes >> i & 1u)) continue;
    int last = i;
    while (last + 1 < kWarp && (lanes >> (last + 1) & 1u)) ++last;
    text += (text.empty() ? "" : ",") + range(i, last);
    i = last;
  }
  return text;
}

std::string describe_state(const Thread& t) {
  if (t.state == Thread::State::exited) return "exited";
  if (t.state == Thread::State::ready) return "could run";
  if (t.state == Thread::State::idle) return "had not started";
  const std::string mask =
      t.state == Thread::State::in_warp_op ? fmt::format(" with mask {:#010x}", t.mask) : "";
  return fmt::format("wait at {}{} ({}:{})", op_name(t.op), mask, t.where.file, t.where.line);
}

std::string describe_warp(size_t warp) {
  std::map<std::string, unsigned> groups;
  for (int lane = 0; lane < kWarp; ++lane) {
    size_t i = warp * kWarp + static_cast<size_t>(lane);
    if (i < block.threads.size()) groups[describe_state(block.threads[i])] |= 1u << lane;
  }
  std::string text;
  for (const auto& [state, lanes] : groups)
    text += (text.empty() ? "lanes " : "; lanes ") + lane_list(lanes) + " " + state;
  return text;
}

std::string diagnose() {
  bool in_warp_op = false;
  int waiting = 0;
  for (const Thread& t : block.threads) {
    in_warp_op |= t.state == Thread::State::in_warp_op;
    waiting += t.state == Thread::State::in_block_op;
  }
  if (in_warp_op) return "a warp collective waits for lanes of its mask that will not come";
  return fmt::format("divergent barrier: {} of {} threads wait at a barrier that the others will not reach",
                     waiting, block.threads.size());
}

}  // namespace

std::string describe_launch() {
  const Grid& grid = *block.grid;
  return fmt::format("kernel '{}', block {} of {}, threads {}, seed {}", grid.kernel,
                     dimensions(dim3(block.index)), dimensions(grid.grid), dimensions(grid.block),
                     options().seed);
}

std::string describe(const Grid& grid) {
  return fmt::format("kernel '{}', blocks {}, threads {}", grid.kernel, dimensions(grid.grid),
                     dimensions(grid.block));
}

std::string describe_threads() {
  std::string text;
  for (size_t first = 0; first < block.warps.size();) {
    std::string state = describe_warp(first);
    size_t last = first;
    while (last + 1 < block.warps.size() && describe_warp(last + 1) == state) ++last;
    text += fmt::format("\n  warp {}: {}", range(first, last), state);
    first = last + 1;
  }
  return text;
}

void begin_block(Random& random, uint64_t way) {
  static int64_t blocks = 0;
  block.serial = ++blocks;
  block.random = random;
  const uint64_t draw = random.next();
  const uint64_t warps =
      (uint64_t{block.grid->block.x} * block.grid->block.y * block.grid->block.z + kWarp - 1) / kWarp;
  block.uniform = way % 3 == 0;
  // Warp 0 runs last in this order. Warp 0 often has a special part, such as reading data written by the
  // other warps, that must run after them.
  block.first_warp = way % 3 == 1 ? 0 : static_cast<int>(draw % warps);
  block.downward = way % 3 == 1 || (draw >> 8 & 1u);
  poison_word = draw >> 9 & 1u ? 0xffffffffu : static_cast<uint32_t>(draw >> 32);
  if (block.dynamic_memory != nullptr)
    fill_unchecked(block.dynamic_memory, block.grid->shared_bytes, poison_word);
  place_threads();
  block.unfinished = static_cast<int>(block.threads.size());
  block.at_barrier = block.predicates = 0;
  block.spins = 0;
  block.abandoned = false;
  block.failure.clear();
}

bool run_block() {
  blockIdx = block.index;
  blockDim = block.grid->block;
  gridDim = block.grid->grid;
  while (block.unfinished > 0 && block.failure.empty()) {
    if (block.ready_warps == 0) {
      block.failure = diagnose() + describe_threads();
      break;
    }
    switch_to_thread(take_next());
  }
  if (block.failure.empty()) return true;
  abandon_block();
  return false;
}

void abandon_block() {
  block.abandoned = true;
  for (size_t i = 0; i < block.threads.size(); ++i) {
    auto state = block.threads[i].state;
    if (state != Thread::State::idle && state != Thread::State::exited) switch_to_thread(static_cast<int>(i));
  }
}

GW_SWITCHES void switch_out() {
  hand_over();
  if (block.abandoned) throw Abandon{};
}

void preempt() {
  if (block.random.next() >> 62 != 0) return;
  if (++block.spins > kMaxSpins) {
    fail(
        "livelock: millions of atomics and no thread gets ahead. Blocks run one after the other here, so a "
        "block "
        "cannot wait for another one." +
        describe_threads());
  }
  block.draw_any = true;  // prevents a spinning thread from starving the other threads
  make_ready(static_cast<size_t>(block.current / kWarp), current_bit());
  switch_out();
}

void fail(const std::string& what) {
  if (block.current < 0) throw Failure(what);
  if (block.failure.empty()) block.failure = what;
  throw Abandon{};
}

}  // namespace gradwire::simt
