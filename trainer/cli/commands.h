// `gradwire plan` predicts training steps on a cluster that one does not have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradwire {

struct PlanOptions {
  std::string cluster;
  std::optional<int> ranks;
  std::string model = "vit_b_32";
  int64_t batch_size = 32;
  std::vector<std::string> compression;
  std::vector<double> bucket_mb;
  std::string json;
};

// Prints the plan and, with options.json, writes it to a file. Throws BadInput.
void plan(const PlanOptions& options);

// `gradwire top`: follows a run through its log.

struct TopOptions {
  std::string log;
  bool prometheus = false;
};

// Displays the run's state. Returns when the run has ended or, without a terminal, after one reading. Throws
// BadInput if the file cannot be read or is not a run log.
void top(const TopOptions& options);

// `gradwire report` and `gradwire export`: start the Python programs of trainer/report.

struct ReportOptions {
  std::vector<std::string> files;
  std::string output = "report.html";
};

struct ExportOptions {
  std::vector<std::string> logs;
  std::string tensorboard;  // folder of the event files
};

// Write the page, or the event files. Return the exit code of the Python program, which prints its error as
// one line. Throw BadInput if a file cannot be read or written, and Error if Python cannot be started.
int write_report(const ReportOptions& options);
int export_events(const ExportOptions& options);

}  // namespace gradwire
