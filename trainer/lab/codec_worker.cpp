#include "trainer/lab/codec_worker.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

#include "runtime/util/error.h"
#include "trainer/lab/python_program.h"

namespace gradwire {
namespace {

constexpr int kDescriptor = 3;  // of the worker's end of the socket
constexpr size_t kHead = 1 + sizeof(int64_t);

}  // namespace

CodecWorker::CodecWorker(const std::string& file, std::chrono::milliseconds limit)
    : python_(path_of_python()), limit_(limit) {
  std::vector<std::string> words{python_, "-B", path_of_program("lab/codec_worker.py"), file,
                                 fmt::to_string(kDescriptor)};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(fmt::format("socketpair: {}", std::strerror(errno)));
  socket_ = FileDescriptor(ends[0]);
  const FileDescriptor theirs(ends[1]);
  process_ = fork();
  if (process_ < 0) throw Error(fmt::format("{} could not be started: {}", python_, std::strerror(errno)));
  if (process_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // dup2() of equal descriptors would keep the flag that closes them.
  const int other = theirs.fd() == kDescriptor ? dup(theirs.fd()) : theirs.fd();
  dup2(other, kDescriptor);
  execvp(argv[0], argv.data());
  _exit(kPythonNotStarted);
}

CodecWorker::~CodecWorker() {
  kill(process_, SIGKILL);
  while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

CodecWorker::Reply CodecWorker::ask(char letter, const std::vector<std::string_view>& parts) {
  const Deadline deadline = std::chrono::steady_clock::now() + limit_;
  const auto failed = [](std::string why) { return Reply{Reply::Kind::failed, std::move(why)}; };
  if (std::string why = send(letter, parts, deadline); !why.empty()) return failed(std::move(why));
  char head[kHead];
  if (std::string why = receive_bytes(head, kHead, deadline); !why.empty()) return failed(std::move(why));
  int64_t size = 0;
  std::memcpy(&size, head + 1, sizeof size);
  if (size < 0) return failed("its Python process sent a damaged answer");
  Reply reply{static_cast<Reply::Kind>(head[0]), std::string(static_cast<size_t>(size), '\0')};
  if (std::string why = receive_bytes(reply.bytes.data(), reply.bytes.size(), deadline); !why.empty())
    return failed(std::move(why));
  return reply;
}

void CodecWorker::abandon() {
  send('x', {}, std::chrono::steady_clock::now() + limit_);  // an error shows in the next step
}

std::string CodecWorker::send(char letter, const std::vector<std::string_view>& parts, Deadline deadline) {
  int64_t size = 0;
  for (const std::string_view part : parts) size += static_cast<int64_t>(part.size());
  char head[kHead] = {letter};
  std::memcpy(head + 1, &size, sizeof size);
  std::string why = send_bytes({head, kHead}, deadline);
  for (const std::string_view part : parts) {
    if (why.empty()) why = send_bytes(part, deadline);
  }
  return why;
}

std::string CodecWorker::send_bytes(std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      if (std::string why = wait(POLLOUT, deadline); !why.empty()) return why;
    } else if (errno != EINTR) {
      // The process may have sent the reason before it ended.
      return {};
    }
  }
  return {};
}

std::string CodecWorker::receive_bytes(char* to, size_t count, Deadline deadline) {
  while (count > 0) {
    const ssize_t got = ::recv(socket_.fd(), to, count, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      count -= static_cast<size_t>(got);
    } else if (got < 0 && errno == EAGAIN) {
      if (std::string why = wait(POLLIN, deadline); !why.empty()) return why;
    } else if (got == 0 || errno != EINTR) {
      return ended();
    }
  }
  return {};
}

std::string CodecWorker::wait(short events, Deadline deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  if (left.count() <= 0)
    return fmt::format("no answer within {:g} s", std::chrono::duration<double>(limit_).count());
  pollfd socket{.fd = socket_.fd(), .events = events, .revents = 0};
  poll(&socket, 1, static_cast<int>(std::min<int64_t>(left.count(), 1000)));
  return {};
}

// Describes the end of the process, which has closed its socket.
std::string CodecWorker::ended() {
  siginfo_t end{};
  for (int i = 0; i < 100 && end.si_pid == 0; ++i) {
    if (i > 0) usleep(10'000);
    if (waitid(P_PID, static_cast<id_t>(process_), &end, WEXITED | WNOWAIT | WNOHANG) != 0) break;
  }
  if (end.si_pid == 0) return "its Python process has closed its connection";
  if (end.si_code != CLD_EXITED)
    return fmt::format("its Python process was ended by signal {}", end.si_status);
  if (end.si_status == kPythonNotStarted) return python_not_started(python_);
  return fmt::format("its Python process ended with exit status {}", end.si_status);
}

}  // namespace gradwire
