#include "bench/harness/spawn.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "runtime/threads/resources.h"
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

struct Child {
  pid_t pid = -1;
  int errors = -1;
};

Child start(const std::vector<std::string>& arguments, int rank, int world) {
  Child child;
  child.errors = memfd_create("errors", MFD_CLOEXEC);
  if (child.errors < 0) throw_refused(fmt::format("cannot start rank {}", rank), errno);
  std::vector<std::string> words = {"gradwire-bench"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string rank_text = fmt::to_string(rank), world_text = fmt::to_string(world);
  const pid_t parent = getpid();
  std::fflush(stdout);
  child.pid = fork();
  if (child.pid < 0) throw_no_thread(fmt::format("the process of rank {}", rank));
  if (child.pid != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  dup2(child.errors, 2);
  if (rank > 0) dup2(child.errors, 1);
  for (const char* variable : {"RANK", "LOCAL_RANK"}) setenv(variable, rank_text.c_str(), 1);
  for (const char* variable : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) setenv(variable, world_text.c_str(), 1);
  execv("/proc/self/exe", argv.data());
  execv(reinterpret_cast<const char*>(getauxval(AT_EXECFN)), argv.data());  // /proc is not mounted
  _exit(127);
}

// Returns the last line of a child's output, without the program name.
std::string message_of(int fd) {
  const std::string text = last_line(fd), program = "gradwire-bench: ";
  return text.starts_with(program) ? text.substr(program.size()) : text;
}

}  // namespace

std::string last_line(int fd) {
  std::string text;
  char chunk[4096];
  lseek(fd, 0, SEEK_SET);
  for (ssize_t n; (n = read(fd, chunk, sizeof chunk)) > 0;) text.append(chunk, static_cast<size_t>(n));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);  // without a line break, the whole text, because npos + 1 is 0
}

ScratchFolder::ScratchFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "gradwire-bench-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr)
    throw Error(fmt::format("cannot create the folder {}; set TMPDIR to a writable one", name));
  path_ = name;
}
ScratchFolder::~ScratchFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void run_as_ranks(const std::vector<std::string>& arguments, int world) {
  std::vector<Child> children;
  for (int r = 0; r < world; ++r) children.push_back(start(arguments, r, world));
  std::string failure;
  // Wait for all ranks. Each rank has deadlines, so all ranks end.
  for (int r = 0; r < world; ++r) {
    int status = 0;
    waitpid(children[r].pid, &status, 0);
    if (status != 0 && failure.empty()) {
      failure = message_of(children[r].errors);
      if (WIFSIGNALED(status)) failure = fmt::format("rank {} was killed by signal {}", r, WTERMSIG(status));
      if (failure.empty()) failure = fmt::format("rank {} exited with code {}", r, WEXITSTATUS(status));
    }
    close(children[r].errors);
  }
  if (!failure.empty()) throw Error(failure);
}

}  // namespace gradwire::bench
