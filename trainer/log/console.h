// What a person sees of a run: a progress bar on a terminal, a line every few steps otherwise; and the table
// of compare.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "trainer/config/run.h"
#include "trainer/log/records.h"

namespace gradwire {

std::string human_bytes(double bytes);      // "1.11 MB", powers of 1000
std::string human_count(double count);      // "208,970"
std::string human_seconds(double seconds);  // "3.2 s", "1:05", "2:03:10"

struct ConsoleOptions {
  std::FILE* out = stdout;
  bool terminal = false;  // draw a progress bar
  int64_t log_every = 1;  // not on a terminal: a line every so many steps, and for the last
};

class Console final : public RunObserver {
 public:
  Console(const TrainConfig& config, ConsoleOptions options);
  ~Console() override;
  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override;
  void on_eval(const EvalRecord& eval) override;

 private:
  void print(const std::string& text);  // a whole line, above the bar
  void draw_bar();
  void erase_bar();

  using Clock = std::chrono::steady_clock;
  const TrainConfig& config_;
  ConsoleOptions options_;
  StepRecord last_;
  int64_t first_step_ = 0, steps_done_ = 0;
  bool bar_shown_ = false;
  Clock::time_point start_ = Clock::now(), drawn_{};
};

// The table that compares runs, one line each; the first run is what the others are measured against.
std::string compare_table(const std::vector<ComparedRun>& runs);
// One line about a finished run.
std::string summary_line(const RunSummary& summary);
// What its steps spent their time on: a line of parts that add up to 100 %, and, when there was
// communication, one of what went on beside them.
std::string shares_text(const RunSummary& summary);

}  // namespace gradwire
