// A child process: how commands start a program, wait for it, and end it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/util/error.h"

namespace gradwire {

class ChildProcess {
 public:
  struct NotStarted : Error {
    using Error::Error;
  };
  struct End {
    int code = 0, signal = 0;  // exit status, or the signal that ended the process
    std::string text = {};     // "ended with exit status 5", "was ended by signal 9"
  };

  using Descriptors = std::vector<std::pair<int, int>>;  // of this process, and their numbers in the child
  using Variables = std::vector<std::pair<std::string, std::string>>;  // added to the environment

  // Starts a program, searched in PATH, with its arguments. The child is killed when the calling thread ends.
  // Throws NotStarted if the program cannot be executed, and OutOfResources.
  ChildProcess(std::vector<std::string> words, const Descriptors& descriptors,
               const Variables& variables = {});
  // Kills the child if it still runs.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;

  const std::string& program() const { return program_; }
  // Blocks until the child has ended. Throws Error if the end is unknown.
  const End& wait();

 private:
  const std::string program_;
  pid_t pid_ = -1;  // -1: there is no process to kill
  std::optional<End> end_;
};

}  // namespace gradwire
