#include "trainer/cli/report.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "runtime/threads/resources.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/output_file.h"
#include "trainer/cli/session.h"
#include "trainer/lab/python_program.h"
#include "trainer/log/console.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

struct ProgramResult {
  int code = 0;
  std::string output;
};

// Runs a program of trainer/report to its end. Its errors go to stderr. Its output is all that it delivers
// (read_results.py); other prints, such as those of an imported module, are dropped.
ProgramResult run_program(const char* name, const std::vector<std::string>& arguments) {
  constexpr std::string_view kMark("\0gradwire\0", 10);
  const FileDescriptor output(memfd_create("output", MFD_CLOEXEC));
  if (!output) throw_refused("a file in memory", errno);
  const auto child = start_python(std::string("report/") + name, arguments, {{output.fd(), STDOUT_FILENO}});
  const ChildProcess::End& end = child->wait();
  const std::string text = read_from_start(output.fd(), "a file in memory");
  const size_t first = text.find(kMark), last = text.rfind(kMark);
  if (end.signal != 0 || first == last) {
    throw Error(fmt::format(
        "{}: {} {} before all output was written; GRADWIRE_PYTHON must name a Python 3, or a script that "
        "passes its arguments on to one",
        name, child->program(), end.text));
  }
  return {end.code, text.substr(first + kMark.size(), last - first - kMark.size())};
}

}  // namespace

int write_report(const ReportOptions& options) {
  for (const std::string& file : options.files) open_regular_file(file);
  OutputFile output(options.output);
  const ProgramResult page = run_program("report.py", options.files);
  if (page.code != 0) return page.code;
  output.write(page.output);
  if (output.is_regular()) {
    say(fmt::format("Report: {}, {}", options.output, human_bytes(static_cast<double>(page.output.size()))));
  }
  return 0;
}

int export_events(const ExportOptions& options) {
  for (const std::string& log : options.logs) open_regular_file(log);
  if (fs::exists(options.tensorboard) && !fs::is_directory(options.tensorboard)) {
    throw BadInput(fmt::format("--tensorboard {}: not a folder", options.tensorboard));
  }
  std::vector<std::string> arguments{options.tensorboard};
  arguments.insert(arguments.end(), options.logs.begin(), options.logs.end());
  const ProgramResult events = run_program("export_tensorboard.py", arguments);
  std::fputs(events.output.c_str(), stdout);
  return events.code;
}

}  // namespace gradwire
