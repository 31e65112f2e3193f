// Tests whose ranks are processes. A test starts this same executable once per rank and names a rank program,
// which is registered with RANK_PROGRAM:
//
//   RANK_PROGRAM(SaysHello) { std::printf("rank %d\n", me.rank); }
//   TEST(Processes, SayHello) {
//     auto ranks = run_processes("SaysHello", 3);
//     EXPECT_EQ(ranks[2].output, "rank 2\n");
//   }
//
// An exception ends a rank program. The exception's text is on stdout, and the exit code is 2 (BadInput), 3
// (CommError) or 4 (other exceptions). No process outlives its test: processes that still run at the limit
// are killed, and the kernel kills all processes if the test dies.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/thinned.h"

namespace gradwire::testing {

using namespace std::chrono_literals;

// Returns the number of runs of a randomized test: `runs`, or 10 * `runs` with GRADWIRE_FULL_SWEEPS.
inline int random_runs(int runs) {
  return full_sweeps() ? 10 * runs : runs;
}

// The seeds of a randomized test: GRADWIRE_TEST_SEED (or 1) and its successors, at least `least` seeds and as
// many as begin within GRADWIRE_SOAK_S seconds. Thread-safe.
class SoakSeeds {
 public:
  explicit SoakSeeds(uint32_t least);
  std::optional<uint32_t> next();
  const uint32_t first;

 private:
  const uint32_t least_;
  const std::chrono::steady_clock::time_point until_;
  std::atomic<uint32_t> drawn_ = 0;
};

// The arguments of a rank program.
struct Me {
  int rank = 0, world = 1;
  std::string rendezvous;
  std::chrono::milliseconds timeout{20'000};
  std::map<std::string, std::string> options = {};

  std::string option(const std::string& key) const { return options.at(key); }
  int number(const std::string& key) const { return std::stoi(options.at(key)); }
};

struct Outcome {
  int exit_code = -1;  // -1: a signal ended the process
  int signal = 0;
  bool ended_by_itself = true;  // false: the process was killed at the limit
  std::chrono::milliseconds took{0};
  std::string output;  // text on stdout and stderr
};

struct ProcessOptions {
  std::string rendezvous = {};  // empty: file:// with a new file
  std::chrono::milliseconds timeout{20'000};
  // Time after which running ranks are killed.
  std::chrono::milliseconds limit{60'000};
  // Ranks that cannot end by themselves, such as stopped ranks. They are killed once the other ranks have
  // ended.
  std::vector<int> never_ending = {};
  std::map<std::string, std::string> options = {};
  // The ranks to start; empty: all ranks.
  std::vector<int> only = {};
};

std::vector<Outcome> run_processes(const std::string& program, int world, const ProcessOptions& options = {});

// Stops the calling process for `time`, as a debugger or a suspended virtual machine does.
void pause_for(std::chrono::milliseconds time);

// Returns "tcp://127.0.0.1:port" with a port that was free during this call.
std::string free_tcp_rendezvous();
// Returns a path in this test run's temporary folder.
std::string scratch_path(const std::string& name);
// Blocks until the file exists, at most for `limit`.
void wait_for_file(const std::string& path, std::chrono::milliseconds limit = 120s);

// Returns whether every rank ended with exit code 0. Adds a gtest failure for other ranks.
bool all_succeeded(const std::vector<Outcome>& ranks);

using ProcessMain = void (*)(const Me&);
struct RegisterProgram {
  RegisterProgram(const char* name, ProcessMain program);
};
// Runs the rank program named by the arguments; returns -1 if the arguments name no rank program.
int run_rank_program(int argc, char** argv);

}  // namespace gradwire::testing

#define RANK_PROGRAM(Name)                                                                  \
  static void Name##Program(const ::gradwire::testing::Me& me);                             \
  static const ::gradwire::testing::RegisterProgram Name##Registered(#Name, Name##Program); \
  static void Name##Program([[maybe_unused]] const ::gradwire::testing::Me& me)
