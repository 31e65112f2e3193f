// Runs grids of several ranks concurrently. A block runs until it reads or writes a signal, and then another
// block may run. So a rank may be as far ahead of the other ranks as its barriers allow.
#include <fmt/format.h>

#include <cstdlib>
#include <memory>

#include "tests/simt/engine.h"

namespace gradwire::simt {
namespace {

constexpr int64_t kMostIdleLooks = int64_t{1} << 20;
constexpr uint64_t kLookNs = 1000;

uint64_t clock_ns = 0;
int64_t idle_looks = 0;  // number of signal reads since the last event that could end a block's wait

struct Resident {
  Block state;
  size_t rank = 0;
};

class Crowd {
 public:
  Crowd(const std::vector<std::vector<QueuedLaunch>>& ranks, int repetition)
      : ranks_(ranks), repetition_(repetition), next_(ranks.size()), unfinished_(ranks.size()) {
    for (const auto& launches : ranks) {
      for (const QueuedLaunch& launch : launches) {
        const dim3 size = launch.grid.block;
        fibers_per_block_ = std::max(fibers_per_block_, size_t{size.x} * size.y * size.z);
      }
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (!ranks[r].empty()) random_ = random_for(ranks[r].front().grid, repetition);
    }
  }
  ~Crowd() {
    for (auto& resident : residents_) std::free(resident->state.dynamic_memory);
    block = Block{};
  }
  Crowd(const Crowd&) = delete;

  void run() {
    for (size_t r = 0; r < ranks_.size(); ++r) launch(r);
    while (!residents_.empty()) {
      const size_t chosen = random_.next() % residents_.size();
      if (!run_one(*residents_[chosen])) fail_all(chosen);
      if (residents_[chosen]->state.unfinished == 0) remove(chosen);
    }
  }

 private:
  // Starts the rank's next kernel after the rank's previous kernel has ended.
  void launch(size_t rank) {
    if (next_[rank] == ranks_[rank].size()) return;
    const QueuedLaunch& launch = ranks_[rank][next_[rank]++];
    const dim3 grid = launch.grid.grid;
    const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
    for (uint64_t at = 0; at < count; ++at) {
      auto& resident = *residents_.emplace_back(std::make_unique<Resident>());
      resident.rank = rank;
      Block& b = resident.state;
      b.grid = &launch.grid;
      b.thread_main = launch.thread;
      b.arguments = launch.arguments.get();
      b.index = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                 static_cast<unsigned>(at / grid.x / grid.y)};
      b.beside_others = true;
      b.first_fiber = take_place() * fibers_per_block_;
      if (launch.grid.shared_bytes > 0 &&
          posix_memalign(&b.dynamic_memory, 16, launch.grid.shared_bytes) != 0) {
        throw std::bad_alloc();
      }
      std::swap(block, b);
      begin_block(random_, static_cast<uint64_t>(repetition_) + at + rank);
      std::swap(block, b);
    }
    unfinished_[rank] = count;
  }

  bool run_one(Resident& resident) {
    std::swap(block, resident.state);
    bring_shared_back();
    const bool fine = run_block();
    if (block.unfinished > 0) put_shared_away();
    std::swap(block, resident.state);
    return fine;
  }

  void remove(size_t which) {
    Resident& resident = *residents_[which];
    std::free(resident.state.dynamic_memory);
    places_.push_back(resident.state.first_fiber / fibers_per_block_);
    const size_t rank = resident.rank;
    std::swap(residents_[which], residents_.back());
    residents_.pop_back();
    idle_looks = 0;
    if (--unfinished_[rank] == 0) launch(rank);
  }

  // Fails the launch after block `which` has failed and its threads have exited. Makes the threads of all
  // other blocks exit.
  [[noreturn]] void fail_all(size_t which) {
    std::swap(block, residents_[which]->state);
    const std::string text =
        fmt::format("rank {}: {}: {}", residents_[which]->rank, describe_launch(), block.failure);
    std::swap(block, residents_[which]->state);
    for (size_t i = 0; i < residents_.size(); ++i) {
      if (i == which) continue;
      std::swap(block, residents_[i]->state);
      block.failure = "another block failed";
      abandon_block();
      std::swap(block, residents_[i]->state);
    }
    throw Failure(text);
  }

  size_t take_place() {
    if (places_.empty()) return most_places_++;
    const size_t place = places_.back();
    places_.pop_back();
    return place;
  }

  const std::vector<std::vector<QueuedLaunch>>& ranks_;
  const int repetition_;
  Random random_{0};
  std::vector<size_t> next_;          // [rank]: index of the next launch
  std::vector<uint64_t> unfinished_;  // [rank]: number of unfinished blocks
  std::vector<std::unique_ptr<Resident>> residents_;
  size_t fibers_per_block_ = 1, most_places_ = 0;
  std::vector<size_t> places_;
};

void let_others_run(bool other_blocks) {
  block.draw_any = true;
  block.gives_way = other_blocks;
  make_ready(static_cast<size_t>(block.current / kWarp), current_bit());
  switch_out();
}

}  // namespace

void run_together(const std::vector<std::vector<QueuedLaunch>>& ranks, int repetition) {
  idle_looks = 0;
  Crowd(ranks, repetition).run();
}

void store_signal(uint32_t* word, uint32_t value) {
  *word = value;
  idle_looks = 0;
  if (!block.beside_others) return preempt();
  if (block.random.next() >> 63 != 0) let_others_run(true);
}

uint32_t load_signal(const uint32_t* word) {
  const uint32_t value = *word;
  clock_ns += kLookNs;
  if (!block.beside_others) {
    preempt();
    return value;
  }
  if (++idle_looks > kMostIdleLooks) {
    fail("deadlock: blocks of several ranks wait for signals that none of them sends" + describe_threads());
  }
  let_others_run(block.random.next() >> 62 == 0);
  return value;
}

uint64_t nanoseconds() {
  return clock_ns;
}

}  // namespace gradwire::simt
