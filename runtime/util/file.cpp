#include "runtime/util/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iterator>
#include <new>

#include "runtime/util/error.h"

namespace gradwire {

bool FileDescriptor::close() {
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0;
}

const char* kind_of_file(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return S_ISREG(mode) ? "a regular file" : "a device";
}

bool is_unsupported(int error) {
  return error == ENOSYS || error == EOPNOTSUPP || error == EPERM || error == EINVAL || error == EACCES ||
         error == EBADF || error == EISDIR;
}

FileDescriptor open_regular_file(const std::string& path) {
  struct stat status {};
  auto fail = [&](const std::string& why) { throw BadInput(fmt::format("{}: {}", path, why)); };
  auto check_kind = [&] {
    if (!S_ISREG(status.st_mode))
      fail(fmt::format("not a regular file but {}", kind_of_file(status.st_mode)));
  };
  if (stat(path.c_str(), &status) != 0) fail(errno == ENOENT ? "no such file" : std::strerror(errno));
  check_kind();  // checked before open(), because opening a device may have side effects
  // O_NONBLOCK: a FIFO that has replaced the file since the check must not block.
  FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file || fstat(file.fd(), &status) != 0) fail(std::strerror(errno));
  check_kind();
  return file;
}

std::string read_regular_file(const std::string& path) {
  return read_from_start(open_regular_file(path).fd(), path);
}

std::string read_from_start(int fd, const std::string& name) {
  std::string text;
  char chunk[1 << 16];
  lseek(fd, 0, SEEK_SET);
  while (true) {
    const ssize_t got = read(fd, chunk, sizeof chunk);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw BadInput(fmt::format("{}: {}", name, std::strerror(errno)));
    if (got == 0) return text;
    text.append(chunk, static_cast<size_t>(got));
  }
}

int write_fully(int fd, std::string_view bytes) {
  // SIGPIPE and SIGXFSZ are sent to the writing thread: block these signals, and consume the signals that
  // arrived.
  sigset_t signals, before, pending;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  sigaddset(&signals, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &signals, &before);
  sigpending(&pending);
  int error = 0;
  while (!bytes.empty()) {
    const ssize_t done = write(fd, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0 && errno == EAGAIN) {  // another process made the pipe non-blocking
      pollfd room{.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&room, 1, -1);
      continue;
    }
    if (done <= 0) {
      error = done < 0 ? errno : EIO;
      break;
    }
    bytes.remove_prefix(static_cast<size_t>(done));
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (sigismember(&pending, signal) == 1) sigdelset(&signals, signal);  // not raised by this write
  }
  const timespec now{};
  while (error != 0 && sigtimedwait(&signals, nullptr, &now) > 0) continue;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

void print_error_line(std::string_view text) noexcept {
  try {
    fmt::memory_buffer line;
    fmt::format_to(std::back_inserter(line), "gradwire: {}\n", text);
    std::fflush(stdout);
    write_fully(STDERR_FILENO, {line.data(), line.size()});
  } catch (const std::bad_alloc&) {
    for (const std::string_view part : {std::string_view("gradwire: "), text, std::string_view("\n")})
      write_fully(STDERR_FILENO, part);
  }
}

}  // namespace gradwire
