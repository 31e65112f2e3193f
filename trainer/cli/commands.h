// The commands except train.
#pragma once

#include <string>
#include <vector>

#include "trainer/config/settings.h"

namespace gradwire {

// `gradwire compare`: one run per compression, bucket size and seed, then one table. Throws BadInput before
// the first run starts, and the exceptions of a run. Skips runs that an earlier call with the same --json
// finished with the same settings.
void compare(const RunOptions& options);

// `gradwire doctor` reports which features this machine and this build support, and why other features
// are off. With several ranks, also reports the speed of their links and recommends a compression.

// Returns the default options of doctor and plan, which differ from the defaults of train: vit_b_32, batches
// of 32, a timeout of 10 s.
RunOptions doctor_defaults();
// Prints the report on rank 0 and, with options.json, writes it to a file. Collective if a launcher has
// started several processes. Blocks for seconds. Throws CommError when a rank does not answer in time.
void doctor(RunOptions options);

// `gradwire plan` predicts training steps on a cluster that one does not have. Prints the plan and, with
// options.json, writes it to a file. Throws BadInput.
void plan(const RunOptions& options);

// The options of the commands that only read files.
struct FileOptions {
  std::string log;                 // top: of the run
  bool prometheus = false;         // top
  std::vector<std::string> files;  // report and export: logs and results
  std::string page = "report.html",
              tensorboard;  // the output of report, and the folder of export's event files
};

// `gradwire top` follows a run through its log. Returns when the run has ended or, without a terminal, after
// one reading. Throws BadInput if the file cannot be read or is not a run log.
void top(const FileOptions& options);

// `gradwire report` and `gradwire export` start the Python programs of trainer/report. Return the exit code
// of the program, which prints its error as one line. Throw BadInput if a file cannot be read or written, and
// Error if Python cannot be started.
int write_report(const FileOptions& options);
int export_events(const FileOptions& options);

}  // namespace gradwire
