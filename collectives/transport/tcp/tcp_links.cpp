#include "collectives/transport/tcp/tcp_links.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "collectives/net/handshake.h"
#include "collectives/net/reach.h"
#include "collectives/net/socket.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

// Largest number of bytes sent at once if messages have checksums, so that the data summed for the checksum
// is still in a cache when it is sent.
constexpr size_t kPiece = 128 << 10;
// With emulated links, bytes are sent at most this often, except for the end of a message.
constexpr std::chrono::microseconds kSendEvery{500};

}  // namespace

TcpLinks::TcpLinks(int rank, int world, const std::string& address, const std::string& key, bool checksums,
                   const PortRange& ports, const EmulatedLink& link)
    : listener_("link", address, key, ports),
      checksums_(checksums),
      rank_(rank),
      links_(static_cast<size_t>(world)) {
  if (link) pacer_.emplace(link, world);
}

TcpLinks::~TcpLinks() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    helper_poll_.wake.set();
  }
  work_.notify_all();
  helper_.join();
}

void TcpLinks::connect(const std::vector<std::string>& contacts, SteadyClock::time_point deadline,
                       const std::function<void(const std::string&)>& rejected) {
  std::vector<Socket> sockets(links_.size());
  for (int r = 0; r < rank_; ++r) {
    sockets[static_cast<size_t>(r)] = connect_to(r, contacts[static_cast<size_t>(r)], deadline);
  }
  accept_higher(sockets, deadline, rejected);
  listener_.close();
  std::lock_guard lock(mutex_);
  for (size_t r = 0; r < sockets.size(); ++r) links_[r].socket = std::move(sockets[r]);
}

// Connects to a rank. Retries until the deadline: a host's network may not be up yet, and a flood of
// unauthenticated peers may displace a connection. A dead rank fails the group, which interrupts the retries.
Socket TcpLinks::connect_to(int rank, const std::string& contact, SteadyClock::time_point deadline) {
  const auto theirs = Contact::parse(contact);
  require<CommError>(theirs.has_value(),
                     "connecting to rank {}: its address does not parse; are all ranks the same build?",
                     rank);
  const gradwire::Frame hello{gradwire::Frame::Op::link, 0, "",
                              gradwire::Message().add("rank", rank_).encode()};
  while (true) {
    Reach reached =
        reach(*theirs, {listener_.key(), "link " + theirs->name}, deadline, true, caller_.wake.fd());
    throw_if_group_failed();
    if (!reached.socket) throw CommError("connecting to rank {}: {}", rank, reached.why);
    if (!send_frame(*reached.socket, hello, deadline)) continue;
    expect_full_buffers(*reached.socket);
    return std::move(*reached.socket);
  }
}

void TcpLinks::accept_higher(std::vector<Socket>& sockets, SteadyClock::time_point deadline,
                             const std::function<void(const std::string&)>& rejected) {
  const auto report = [&] {
    for (const std::string& line : listener_.take_log()) {
      if (rejected) rejected(line);
    }
  };
  while (true) {
    std::vector<size_t> missing;
    for (size_t r = static_cast<size_t>(rank_) + 1; r < sockets.size(); ++r) {
      if (!sockets[r]) missing.push_back(r);
    }
    if (missing.empty()) break;
    throw_if_group_failed();
    std::vector<pollfd> entries = {{caller_.wake.fd(), POLLIN, 0}};
    listener_.add_entries(entries);
    const auto soon = SteadyClock::now() + listener_.tick();
    poll(entries.data(), entries.size(), milliseconds_until(std::min(soon, deadline)));
    if (!listener_.refused().empty()) throw CommError("this rank " + listener_.refused());
    if (SteadyClock::now() >= deadline) {
      const Contact mine = listener_.contact();
      throw CommError(
          "not connected in time to rank {}, which connects to this one at {} port {}: is an "
          "address of these reachable from there, and the port open",
          fmt::join(missing, ", "), fmt::join(mine.addresses, ", "), mine.port);
    }
    for (auto& caller : listener_.advance(entries, sockets.size())) {
      if (caller.first.op != gradwire::Frame::Op::link) continue;
      try {
        const int rank = gradwire::Message::decode(caller.first.value)
                             .number("rank", rank_ + 1, static_cast<int>(sockets.size()) - 1);
        Socket& socket = sockets[static_cast<size_t>(rank)];
        if (socket) continue;
        expect_full_buffers(caller.socket);
        socket = std::move(caller.socket);
      } catch (const CommError&) {  // the caller is not a rank
      }
    }
    report();
  }
  listener_.reject_all(kSaidNothing);  // no further rank is expected
  report();
}

void TcpLinks::post(Message& message) {
  std::lock_guard lock(mutex_);
  if (interrupted_) throw CommError("interrupted");
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!link.lost.empty()) throw CommError(link.lost);
  message.frame_ = {message.tag, message.bytes | (checksums_ && message.sent ? kHasChecksum : 0)};
  if (message.sent) {
    if (pacer_) {
      message.flow_.from = rank_, message.flow_.to = message.peer, message.flow_.bytes = length(message);
      pacer_->post(message.flow_, LinkPacer::Time::clock::now());
    }
    link.sends.push_back(&message);
    if (link.sends.size() == 1) push(link);
  } else {
    link.receives.push_back(&message);
  }
}

void TcpLinks::hand_over() {
  std::lock_guard lock(mutex_);
  if (!has_work()) return;
  if (!helper_.joinable()) helper_ = Thread("a thread that sends and receives", [this] { help(); });
  helping_ = true;
  if (polling_) helper_poll_.wake.set();  // the helper is polling for transfers posted earlier
  work_.notify_one();
}

bool TcpLinks::wait(Message& message, SteadyClock::time_point deadline) {
  std::unique_lock lock(mutex_);
  helping_ = false;
  if (polling_) helper_poll_.wake.set();
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!message.done && !message.sent) pull(link);
  while (!message.done) {
    if (interrupted_) throw CommError("interrupted");
    if (!link.lost.empty()) throw CommError(link.lost);
    if (SteadyClock::now() >= deadline) return false;
    poll_once(lock, caller_, deadline);
  }
  return true;
}

void TcpLinks::drop() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  for (Link& link : links_) {
    for (Message* message : link.sends) {
      if (pacer_) pacer_->withdraw(message->flow_);
    }
    link.sends.clear();
    link.receives.clear();
  }
}

bool TcpLinks::has_work() const {
  return !interrupted_ && std::any_of(links_.begin(), links_.end(), [](const Link& l) {
    return l.lost.empty() && (!l.sends.empty() || (!l.receives.empty() && !l.mismatched));
  });
}

int TcpLinks::events_of(Link& link, LinkPacer::Time& again) {
  int events = 0;
  if (!link.sends.empty()) {
    Message& m = *link.sends.front();
    if (may_send(m) > 0) {
      events |= POLLOUT;
    } else {
      const auto enough = static_cast<size_t>(pacer_->link().payload_bytes_per_us() * kSendEvery.count());
      again = std::min(again, pacer_->earliest(m.flow_, enough));
    }
  }
  if (!link.receives.empty() && !link.mismatched) {
    if (may_receive(link) > 0) {
      events |= POLLIN;
    } else {
      again = std::min(again, pacer_->may_receive_at(rank_));
    }
  }
  return events;
}

void TcpLinks::push(Link& link) {
  while (!link.sends.empty()) {
    Message& m = *link.sends.front();
    size_t room = may_send(m);
    if (room == 0) return;
    iovec parts[3];
    int n_parts = 0;
    size_t before = 0;  // number of the message's bytes before the part
    auto add = [&](void* part, size_t size, size_t ready) {
      const size_t at = m.moved_ - std::min(m.moved_, before);
      const size_t sent = std::min(room, ready - std::min(at, ready));
      if (sent > 0) parts[n_parts++] = {static_cast<char*>(part) + at, sent};
      room -= sent;
      before += size;
    };
    add(&m.frame_, sizeof(Frame), sizeof(Frame));
    if (checksums_) {
      const size_t at = m.moved_ - std::min(m.moved_, sizeof(Frame)), end = std::min(m.bytes, at + kPiece);
      if (end > m.summed_) {
        m.sum_ = crc32c(static_cast<char*>(m.data) + m.summed_, end - m.summed_, m.sum_);
        m.summed_ = end;
      }
      add(m.data, m.bytes, m.summed_);
      if (m.summed_ == m.bytes) add(&m.sum_, sizeof m.sum_, sizeof m.sum_);
    } else {
      add(m.data, m.bytes, m.bytes);
    }
    msghdr header = {};
    header.msg_iov = parts;
    header.msg_iovlen = static_cast<size_t>(n_parts);
    const ssize_t n = sendmsg(link.socket.fd(), &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == ENOBUFS)) return;
    if (n < 0) {
      link.lost = std::strerror(errno);
      return;
    }
    m.moved_ += static_cast<size_t>(n);
    if (m.moved_ < length(m)) continue;
    m.done = true;
    link.sends.pop_front();
  }
}

void TcpLinks::pull(Link& link) {
  while (!link.receives.empty() && !link.mismatched && link.lost.empty()) {
    Message& m = *link.receives.front();
    const size_t data = sizeof(Frame), end = data + m.bytes;
    const bool in_frame = m.moved_ < data;
    const bool summed = !in_frame && (m.frame_.bytes & kHasChecksum) != 0;
    if (m.moved_ == 0) m.frame_ = {};
    char* to = nullptr;
    size_t room = 0;
    if (in_frame) {
      to = reinterpret_cast<char*>(&m.frame_) + m.moved_, room = data - m.moved_;
    } else if (m.moved_ < end) {
      to = static_cast<char*>(m.data) + (m.moved_ - data), room = end - m.moved_;
      if (summed) room = std::min(room, kPiece);
    } else {
      to = reinterpret_cast<char*>(&m.theirs_) + (m.moved_ - end), room = length(m) - m.moved_;
    }
    room = std::min(room, may_receive(link));
    if (room == 0) return;
    const ssize_t n = recv(link.socket.fd(), to, room, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      link.lost = n == 0 ? "closed by the peer" : std::strerror(errno);
      return;
    }
    if (paced(link)) pacer_->received(rank_, static_cast<size_t>(n), LinkPacer::Time::clock::now());
    if (summed && m.moved_ < end) m.sum_ = crc32c(to, static_cast<size_t>(n), m.sum_);
    m.moved_ += static_cast<size_t>(n);
    if (in_frame && m.moved_ == data &&
        (m.frame_.tag != m.tag || (m.frame_.bytes & ~kHasChecksum) != m.bytes)) {
      link.mismatched = true;
      return;
    }
    if (m.moved_ < length(m)) continue;
    if (summed && m.sum_ != m.theirs_) {
      link.lost = fmt::format(
          "{} bytes from rank {} do not have the checksum that it sent with them: damaged on the way",
          m.bytes, m.peer);
      return;
    }
    m.done = true;
    link.receives.pop_front();
  }
}

void TcpLinks::poll_once(std::unique_lock<std::mutex>& lock, Poller& poller,
                         SteadyClock::time_point deadline) {
  auto& [wake, entries, owners] = poller;
  entries.assign(1, {wake.fd(), POLLIN, 0});
  owners.assign(1, nullptr);
  auto again = LinkPacer::Time::max();
  for (Link& link : links_) {
    if (!link.lost.empty()) continue;
    const int events = events_of(link, again);
    if (events == 0) continue;
    entries.push_back({link.socket.fd(), static_cast<short>(events), 0});
    owners.push_back(&link);
  }
  lock.unlock();
  const int max_ms = milliseconds_until(deadline);
  if (again == LinkPacer::Time::max()) {
    poll(entries.data(), entries.size(), max_ms);
  } else {
    std::chrono::nanoseconds time = again - LinkPacer::Time::clock::now();
    if (max_ms >= 0) time = std::min<std::chrono::nanoseconds>(time, std::chrono::milliseconds(max_ms));
    time = std::max(time, std::chrono::nanoseconds::zero());
    const timespec left{.tv_sec = time.count() / 1'000'000'000, .tv_nsec = time.count() % 1'000'000'000};
    ppoll(entries.data(), entries.size(), &left, nullptr);
  }
  lock.lock();
  if (entries[0].revents != 0) wake.clear();
  if (interrupted_) return;  // the caller may soon free the memory of pending messages
  for (size_t r = 0; pacer_ && r < links_.size(); ++r) {
    if (links_[r].lost.empty()) push(links_[r]);
  }
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].revents == 0) continue;
    push(*owners[i]);
    pull(*owners[i]);
  }
}

void TcpLinks::help() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    work_.wait(lock, [&] { return stop_ || (helping_ && has_work()); });
    if (stop_) return;
    polling_ = true;
    try {
      poll_once(lock, helper_poll_, SteadyClock::time_point::max());
    } catch (const std::bad_alloc&) {
      helping_ = false;  // wait() moves the remaining bytes instead
    }
    polling_ = false;
    // wait() may already be polling for bytes that the helper has moved.
    if (!helping_) caller_.wake.set();
  }
}

namespace {

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t by_instruction(const void* data, size_t bytes, uint32_t crc) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t wide = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t eight;
    std::memcpy(&eight, at, 8);
    wide = __builtin_ia32_crc32di(wide, eight);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes, ++at) narrow = __builtin_ia32_crc32qi(narrow, *at);
  return ~narrow;
}
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
#ifdef __x86_64__
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return by_instruction(data, bytes, crc);
#endif
  return crc32<kCrc32c>(data, bytes, crc);
}

}  // namespace gradwire
