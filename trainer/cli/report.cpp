#include "trainer/cli/report.h"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "runtime/threads/child_process.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/cli/session.h"
#include "trainer/log/console.h"

namespace gradwire {
namespace {

namespace fs = std::filesystem;

struct ProgramResult {
  int code = 0;
  std::string output;
};

// Returns the path of a program of trainer/report relative to the executable, which is in a bundle, an
// installation or a build folder.
std::string path_of_program(const char* name) {
  std::error_code no_proc;
  fs::path program = fs::read_symlink("/proc/self/exe", no_proc);
  if (no_proc) program = fs::canonical(reinterpret_cast<const char*>(getauxval(AT_EXECFN)));
  const fs::path here = program.parent_path();
  for (const char* folder : {"../share/gradwire/report", "../../trainer/report"}) {
    const fs::path path = here / folder / name;
    if (fs::exists(path)) return path.lexically_normal().string();
  }
  throw Error(
      fmt::format("{} was not found, because gradwire is in {}; start gradwire from build/bin of its "
                  "sources, or from bin of a bundle",
                  name, here.string()));
}

// Runs a program of trainer/report to its end, with GRADWIRE_PYTHON or the system's Python. Debian's Python
// has Debian's packages, but may not be the first on PATH. Python uses UTF-8 in any locale, and ignores its
// variables, which could keep it from starting or replace its modules; the programs append the folders of
// PYTHONPATH to sys.path. Its errors go to stderr. Its output is all that it delivers (read_results.py);
// other prints, such as those of an imported module, are dropped.
ProgramResult run_program(const char* name, const std::vector<std::string>& arguments) {
  constexpr std::string_view kMark("\0gradwire\0", 10);
  const FileDescriptor output(memfd_create("output", MFD_CLOEXEC));
  if (!output) throw_refused("a file in memory", errno);
  const char* given = path_in_environment("GRADWIRE_PYTHON");
  const char* system = access("/usr/bin/python3", X_OK) == 0 ? "/usr/bin/python3" : "python3";
  std::vector<std::string> words{
      given != nullptr ? given : system, "-E", "-B", "-X", "utf8", path_of_program(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::optional<ChildProcess> child;
  try {
    child.emplace(words, ChildProcess::Descriptors{{output.fd(), STDOUT_FILENO}});
  } catch (const ChildProcess::NotStarted& error) {
    throw Error(fmt::format("{}; install python3, or name a Python in GRADWIRE_PYTHON", error.what()));
  }
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
