#include "runtime/threads/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/threads/thread.h"
#include "runtime/util/file.h"

namespace gradwire {

ChildProcess::ChildProcess(std::vector<std::string> words, const Descriptors& descriptors,
                           const Variables& variables)
    : program_(words.front()) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw_refused(fmt::format("a pipe to {}", program_), errno);
  const FileDescriptor from(ends[0]);
  FileDescriptor to(ends[1]);  // closed by execvp(), or gets its errno
  const pid_t parent = getpid();
  std::fflush(stdout);
  pid_ = fork();
  if (pid_ < 0) throw_no_thread(fmt::format("the process of {}", program_));
  if (pid_ != 0) {
    to.close();
    int error = 0;
    while (read(from.fd(), &error, sizeof error) < 0 && errno == EINTR) {
    }
    if (error == 0) return;
    wait();
    throw NotStarted("{} could not be started: {}", program_, std::strerror(error));
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  for (const auto& [here, there] : descriptors) {
    // dup2() of equal descriptors would keep the flag that closes them.
    if (here == there ? fcntl(here, F_SETFD, 0) < 0 : dup2(here, there) < 0) _exit(1);
  }
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  execvp(argv[0], argv.data());
  write_fully(to.fd(), {reinterpret_cast<const char*>(&errno), sizeof errno});
  _exit(1);
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || end_) return;
  kill(pid_, SIGKILL);
  try {
    wait();
  } catch (const Error&) {  // the end is of no interest here
  }
}

const ChildProcess::End& ChildProcess::wait() {
  for (int status = 0; !end_;) {
    const pid_t ended = waitpid(pid_, &status, 0);
    if (ended > 0 && WIFSIGNALED(status)) {
      end_ = {0, WTERMSIG(status), fmt::format("was ended by signal {}", WTERMSIG(status))};
    } else if (ended > 0) {
      end_ = {WEXITSTATUS(status), 0, fmt::format("ended with exit status {}", WEXITSTATUS(status))};
    } else if (errno != EINTR) {
      pid_ = -1;
      throw Error("how {} ended is unknown: {}", program_, std::strerror(errno));
    }
  }
  return *end_;
}

}  // namespace gradwire
