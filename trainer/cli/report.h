// `gradwire report` and `gradwire export`: start the Python programs of trainer/report.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

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
