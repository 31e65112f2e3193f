// Console output: a progress bar on a terminal, otherwise a line every few steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trainer/config/settings.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"

namespace gradwire {

std::string human_bytes(double bytes);      // "1.11 MB", powers of 1000
std::string human_count(double count);      // "208,970"
std::string milliseconds(double ms);        // "0.25", "12.3"; "-": not measured
std::string human_seconds(double seconds);  // "3.2 s", "1:05", "2:03:10"
// Returns the width of the terminal, or `otherwise` if the file is not a terminal.
int terminal_columns(std::FILE* out, int otherwise);

class Console final : public RunObserver {
 public:
  // `terminal`: draws a progress bar, after `label`, which identifies the run among several runs. Otherwise a
  // line every `log_every` steps, or every 5 s if log_every is 0. The first and the last step always get a
  // line.
  Console(const TrainConfig& config, std::FILE* out, bool terminal, int64_t log_every,
          std::string label = {});
  ~Console() override;
  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override;
  void on_group(const GroupRecord& group) override;
  void on_replan(const ReplanRecord& replan) override;
  void on_eval(const EvalRecord& eval) override;

 private:
  void print(const std::string& text);  // prints a whole line above the bar
  void draw_bar();
  void show(std::string line);
  void erase_bar();

  using Clock = std::chrono::steady_clock;
  const TrainConfig& config_;
  std::FILE* const out_;
  const bool terminal_;
  const int64_t log_every_;
  const std::string label_;
  StepRecord last_;
  int64_t first_step_ = 0, steps_done_ = 0;
  size_t bar_size_ = 0;  // of the bar on the terminal; 0: none
  Clock::time_point start_ = Clock::now(), drawn_{};
};

// Returns a finished run as aligned lines.
std::string summary_text(const RunSummary& summary);
// Returns a table of the predicted and the measured parts of a step; empty without a prediction.
std::string prediction_text(const RunSummary& summary);
// Returns the straggler and the time for which the other ranks waited for it; empty if the time was
// negligible.
std::string straggler_text(const RunSummary& summary);
// Returns the shares of the step time: the parts whose sum is 100 % and, if the ranks communicated, the parts
// that ran in parallel.
std::pair<std::string, std::string> shares_text(const RunSummary& summary);

// The state of a run according to its log so far, for `gradwire top`.

class LiveRun {
 public:
  // Updates the state from the next line of the log. Throws BadInput if the first line is not a run record.
  void read(const std::string& line);
  // Returns whether the log ends with its summary.
  bool finished() const { return finished_; }

  // Returns the state as readable text: progress, the straggler, and each rank's waits.
  std::string text() const;
  // Returns the state in Prometheus's text format.
  std::string metrics() const;

 private:
  bool begun_ = false, finished_ = false;
  std::string title() const;  // "vit_tiny on 4 ranks (processes, host), int8, schedule ring"
  Json settings_;             // the latest run or resume record
  int64_t steps_ = 0, done_ = 0;
  std::optional<size_t> ranks_now_;  // set after ranks were lost or joined
  StepRecord last_;                  // the latest step's loss and measurements
  double total_wire_bytes_ = 0;
  std::vector<std::vector<double>> waited_s_;
  WaitHistory waits_;
};

}  // namespace gradwire
