#include "tests/processes/faults.h"

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace gradwire::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Sendmsg = ssize_t (*)(int, const msghdr*, int);

Sendmsg real_sendmsg() {
  static auto real = reinterpret_cast<Sendmsg>(dlsym(RTLD_NEXT, "sendmsg"));
  return real;
}

std::atomic<bool> corrupt{false}, corrupt_frame{false}, corrupt_payload{false}, reset{false};

// Delays sent bytes. The object is leaked together with its thread, because it must outlive every writer.
class DelayLine {
 public:
  void start(std::chrono::milliseconds delay) {
    delay_ = delay;
    std::thread([this] { deliver(); }).detach();
    on_ = true;
  }
  bool on() const { return on_; }
  size_t put(int fd, const iovec* parts, int count) {
    Packet packet{Clock::now() + delay_, fd, {}};
    for (int i = 0; i < count; ++i) {
      const char* data = static_cast<const char*>(parts[i].iov_base);
      packet.bytes.insert(packet.bytes.end(), data, data + parts[i].iov_len);
    }
    const size_t size = packet.bytes.size();
    std::lock_guard lock(mutex_);
    packets_.push_back(std::move(packet));
    changed_.notify_one();
    return size;
  }

 private:
  struct Packet {
    Clock::time_point due;
    int fd;
    std::vector<char> bytes;
  };

  void deliver() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !packets_.empty(); });
      Packet packet = std::move(packets_.front());
      packets_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(packet.due);
      for (size_t sent = 0; sent < packet.bytes.size();) {
        ssize_t n = send(packet.fd, packet.bytes.data() + sent, packet.bytes.size() - sent, MSG_NOSIGNAL);
        if (n > 0) {
          sent += static_cast<size_t>(n);
        } else if (n < 0 && errno == EAGAIN) {
          pollfd entry = {packet.fd, POLLOUT, 0};
          poll(&entry, 1, 100);
        } else {
          break;  // the connection is gone
        }
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Packet> packets_;
  std::chrono::milliseconds delay_{0};
  std::atomic<bool> on_{false};
};

DelayLine& delay_line() {
  static auto* line = new DelayLine;
  return *line;
}

// Returns whether the parts are a header. The frame is the first part; Gradwire's headers begin with
// "grdwire".
bool is_header(const iovec* parts, int count) {
  return count >= 2 && parts[1].iov_len >= 8 && std::memcmp(parts[1].iov_base, "grdwire", 7) == 0;
}

ssize_t spoiled(int fd, const iovec* parts, int count, int flags, int part, size_t byte) {
  std::vector<iovec> copy(parts, parts + count);
  const char* data = static_cast<const char*>(parts[part].iov_base);
  std::vector<char> bytes(data, data + parts[part].iov_len);
  bytes.at(byte) = static_cast<char>(bytes[byte] ^ 4);
  copy[part].iov_base = bytes.data();
  msghdr message = {};
  message.msg_iov = copy.data();
  message.msg_iovlen = copy.size();
  return real_sendmsg()(fd, &message, flags);
}

}  // namespace

void delay_what_is_sent(std::chrono::milliseconds delay) {
  delay_line().start(delay);
}
void corrupt_next_header() {
  corrupt = true;
}
void corrupt_next_frame() {
  corrupt_frame = true;
}
void corrupt_next_payload() {
  corrupt_payload = true;
}
void reset_next_connection() {
  reset = true;
}

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const iovec* parts = message->msg_iov;
  const int count = static_cast<int>(message->msg_iovlen);
  if (reset.exchange(false)) {
    sockaddr nobody = {};
    nobody.sa_family = AF_UNSPEC;
    connect(fd, &nobody, sizeof nobody);  // on Linux, this call resets the connection (RST)
  }
  if (corrupt && is_header(parts, count) && corrupt.exchange(false))
    return spoiled(fd, parts, count, flags, 1, 2);
  if (corrupt_frame.exchange(false)) return spoiled(fd, parts, count, flags, 0, 8);
  if (corrupt_payload && count >= 2 && parts[1].iov_len > 1000 && corrupt_payload.exchange(false))
    return spoiled(fd, parts, count, flags, 1, 999);
  if (delay_line().on()) return static_cast<ssize_t>(delay_line().put(fd, parts, count));
  return real_sendmsg()(fd, message, flags);
}

}  // namespace gradwire::testing
