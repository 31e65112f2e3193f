#include "trainer/cli/report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

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
  std::string output;  // of stdout
};

std::string read_to_end(int fd) {
  std::string text;
  char part[1 << 16];
  while (true) {
    const ssize_t count = ::read(fd, part, sizeof(part));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(part, static_cast<size_t>(count));
  }
}

// Runs a program of trainer/report to its end. Its errors go to stderr.
ProgramResult run_program(const char* name, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{path_of_python(), "-B", path_of_program(std::string("report/") + name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw Error(fmt::format("pipe: {}", std::strerror(errno)));
  FileDescriptor from(ends[0]), to(ends[1]);
  const pid_t child = fork();
  if (child < 0) throw Error(fmt::format("{} could not be started: {}", words[0], std::strerror(errno)));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(to.fd(), STDOUT_FILENO);
    execvp(argv[0], argv.data());
    _exit(kPythonNotStarted);
  }
  to.close();
  ProgramResult result{.output = read_to_end(from.fd())};
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) throw Error(fmt::format("{} was ended by signal {}", name, WTERMSIG(status)));
  result.code = WEXITSTATUS(status);
  if (result.code == kPythonNotStarted) throw Error(python_not_started(words[0]));
  return result;
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
