// Console output: a progress bar on a terminal, otherwise a line every few steps.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"

namespace gradwire {

std::string human_bytes(double bytes);      // "1.11 MB", powers of 1000
std::string human_count(double count);      // "208,970"
std::string milliseconds(double ms);        // "0.25", "12.3"; "-": not measured
std::string human_seconds(double seconds);  // "3.2 s", "1:05", "2:03:10"

struct ConsoleOptions {
  std::FILE* out = stdout;
  bool terminal = false;   // draw a progress bar
  int64_t log_every = 1;   // without a terminal: steps per line; the last step always gets a line
  std::string label = {};  // shown before the bar, to identify the run among several runs
};

class Console final : public RunObserver {
 public:
  Console(const TrainConfig& config, ConsoleOptions options);
  ~Console() override;
  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override;
  void on_shrink(const ShrinkRecord& shrink) override;
  void on_grow(const GrowRecord& grow) override;
  void on_replan(const ReplanRecord& replan) override;
  void on_eval(const EvalRecord& eval) override;

 private:
  void print(const std::string& text);  // prints a whole line above the bar
  void draw_bar();
  void show(std::string line);
  void erase_bar();

  using Clock = std::chrono::steady_clock;
  const TrainConfig& config_;
  ConsoleOptions options_;
  StepRecord last_;
  int64_t first_step_ = 0, steps_done_ = 0;
  size_t bar_size_ = 0;  // of the bar on the terminal; 0: none
  Clock::time_point start_ = Clock::now(), drawn_{};
};

// Returns a finished run in one line.
std::string summary_line(const RunSummary& summary);
// Returns a table of the predicted and the measured parts of a step; empty without a prediction.
std::string prediction_text(const RunSummary& summary);
// Returns the straggler and the time for which the other ranks waited for it; empty if the time was
// negligible.
std::string straggler_text(const RunSummary& summary);
// Returns the shares of the step time: a line of parts whose sum is 100 % and, if the ranks communicated, a
// line for the parts that ran in parallel.
std::string shares_text(const RunSummary& summary);

}  // namespace gradwire
