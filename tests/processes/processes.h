// Tests whose ranks are processes. A test starts this same executable once per rank and names a rank program,
// which is registered with RANK_PROGRAM:
//
//   RANK_PROGRAM(SaysHello) { std::printf("rank %d\n", me.rank); }
//   TEST(Processes, SayHello) {
//     auto ranks = run_processes("SaysHello", 3);
//     EXPECT_EQ(ranks[2].output, "rank 2\n");
//   }
//
// An exception ends a rank program with its text on stdout and exit code 2 (BadInput), 3 (CommError) or 4. No
// process outlives its test: processes that run at the limit are killed, and the kernel kills all of them if
// the test dies.
#pragma once

#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "tests/support/thinned.h"

namespace gradwire::testing {

using namespace std::chrono_literals;

// Returns the number of runs of a randomized test.
inline int random_runs(int runs) {
  return full_sweeps() ? 10 * runs : runs;
}

// Returns a variable's value: the duration or the first seed of a test.
inline int number_from_environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoi(text);
}

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
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  bool ended_by_itself = true;  // false: killed at the limit
  std::chrono::milliseconds took{0};
  std::string output;  // stdout and stderr
};

struct ProcessOptions {
  std::string rendezvous = {};  // empty: a new file
  std::chrono::milliseconds timeout{20'000};
  // Time after which running ranks are killed.
  std::chrono::milliseconds limit{60'000};
  // Ranks that cannot end by themselves, such as stopped ones: killed once the others have ended.
  std::vector<int> never_ending = {};
  std::map<std::string, std::string> options = {};
  // Which ranks to start; empty: all.
  std::vector<int> only = {};
};

std::vector<Outcome> run_processes(const std::string& program, int world, const ProcessOptions& options = {});

// Stops the calling process for `time`, as a debugger or a suspended virtual machine does.
void pause_for(std::chrono::milliseconds time);

// Returns "tcp://127.0.0.1:port" with a port that was just free.
std::string free_tcp_rendezvous();
// Returns a path in this test run's temporary folder.
std::string scratch_path(const std::string& name);

// Returns whether every rank ended with exit code 0; a gtest failure if not.
bool all_succeeded(const std::vector<Outcome>& ranks);

using Program = void (*)(const Me&);
struct RegisterProgram {
  RegisterProgram(const char* name, Program program);
};
// Runs the rank program named by the arguments; returns -1 if they name none.
int run_rank_program(int argc, char** argv);

}  // namespace gradwire::testing

#define RANK_PROGRAM(Name)                                                                  \
  static void Name##Program(const ::gradwire::testing::Me& me);                             \
  static const ::gradwire::testing::RegisterProgram Name##Registered(#Name, Name##Program); \
  static void Name##Program([[maybe_unused]] const ::gradwire::testing::Me& me)
