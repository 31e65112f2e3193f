#include "runtime/util/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace gradwire {
namespace {

// Runs `child` in a process without standard input and output. Returns its exit code.
int without_standard_descriptors(const std::function<int()>& child) {
  const pid_t process = fork();
  if (process == 0) {
    close(STDIN_FILENO);
    close(STDOUT_FILENO);
    _exit(child());
  }
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(StandardDescriptors, LibraryDescriptorsAreAboveStandardOnes) {
  const int code = without_standard_descriptors([] {
    int pipes[2];
    if (pipe(pipes) != 0 || pipes[0] != STDIN_FILENO || pipes[1] != STDOUT_FILENO) return 1;
    const int reading = above_standard_descriptors(pipes[0]), writing = above_standard_descriptors(pipes[1]);
    char byte = 'x';
    if (reading <= STDERR_FILENO || writing <= STDERR_FILENO) return 2;
    if (write(writing, &byte, 1) != 1 || read(reading, &byte, 1) != 1) return 3;
    return fcntl(STDIN_FILENO, F_GETFD) == -1 && fcntl(STDOUT_FILENO, F_GETFD) == -1 ? 0 : 4;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(above_standard_descriptors(-1), -1);
}

TEST(StandardDescriptors, ProgramsOpenMissingStandardDescriptors) {
  const int code = without_standard_descriptors([] {
    prepare_standard_descriptors();
    char byte = 'x';
    if (read(STDIN_FILENO, &byte, 1) != 0) return 1;
    if (write(STDOUT_FILENO, &byte, 1) != 1) return 2;
    const int next = open("/dev/null", O_RDONLY);
    return next > STDERR_FILENO ? 0 : 3;
  });
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace gradwire
