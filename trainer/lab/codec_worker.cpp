#include "trainer/lab/codec_worker.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "runtime/util/error.h"
#include "trainer/lab/python_program.h"

namespace gradwire {
namespace {

constexpr int kDescriptor = 3;  // of the worker's end of the socket
constexpr size_t kHead = 1 + sizeof(int64_t);

}  // namespace

CodecWorker::CodecWorker(const std::string& file, std::chrono::milliseconds limit) : limit_(limit) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(fmt::format("socketpair: {}", std::strerror(errno)));
  socket_ = FileDescriptor(ends[0]);
  const FileDescriptor theirs(ends[1]);
  try {
    process_ = start_python("lab/codec_worker.py", {file, fmt::to_string(kDescriptor)},
                            {{theirs.fd(), kDescriptor}});
  } catch (const Error& error) {  // a codec that cannot run is bad input, as on any later error
    throw BadInput(error.what());
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
  return "its Python process " + process_->wait(std::chrono::seconds(1)).text;
}

}  // namespace gradwire
