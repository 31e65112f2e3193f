#include "collectives/transport/tcp/tcp_links.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "collectives/net/contact.h"
#include "collectives/net/handshake.h"
#include "collectives/net/message.h"
#include "collectives/net/secret.h"
#include "collectives/transport/tcp/crc32c.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Binds a handshake to one listener, so that a connection cannot be relayed to another.
std::string purpose(const std::string& listener) {
  return "link " + listener;
}

constexpr const char* kFailedMeanwhile = "the group failed while its ranks connected";

// A flag in a frame's length: a checksum of 4 bytes follows the payload.
constexpr uint64_t kHasChecksum = uint64_t{1} << 63;
// With checksums, at most this much is sent at once, so that it is still in a cache when it is sent.
constexpr size_t kPiece = 128 << 10;

}  // namespace

TcpLinks::TcpLinks(int rank, int world, const std::string& address, const std::string& key, bool checksums,
                   const PortRange& ports)
    : rank_(rank),
      listener_(listen_within(ports, address)),
      address_(address),
      name_(random_secret()),
      key_(key),
      checksums_(checksums),
      links_(static_cast<size_t>(world)) {}

TcpLinks::~TcpLinks() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    helper_wake_.set();
  }
  work_.notify_all();
  helper_.join();
}

std::string TcpLinks::contact() const {
  return contact_of(listener_, address_, name_).text();
}

// Each rank connects to lower ranks and accepts connections from higher ranks.
void TcpLinks::connect(const std::vector<std::string>& contacts, SteadyClock::time_point deadline,
                       const std::function<void(const std::string&)>& rejected) {
  for (int r = 0; r < rank_; ++r) connect_to(r, contacts[static_cast<size_t>(r)], deadline);
  accept_others(deadline, rejected);
  listener_.close();
}

// Retries until the deadline: a host's network may not be up yet, and a flood of unauthenticated peers may
// push a connection out. A dead rank fails the group, which interrupts the retries.
void TcpLinks::connect_to(int rank, const std::string& contact, SteadyClock::time_point deadline) {
  const auto theirs = Contact::parse(contact);
  if (!theirs) {
    throw CommError(fmt::format(
        "connecting to rank {}: its address does not parse; are all ranks the same build?", rank));
  }
  const gradwire::Message me = gradwire::Message().add("rank", rank_);
  const gradwire::Frame hello{gradwire::Frame::Op::link, 0, "", me.encode()};
  const Credentials credentials{key_, purpose(theirs->name)};
  while (true) {
    Reach reached =
        reach(*theirs, credentials, {.deadline = deadline, .retry = true, .stop = caller_wake_.fd()});
    {
      std::lock_guard lock(mutex_);
      if (interrupted_) throw CommError(kFailedMeanwhile);
    }
    if (!reached.socket) throw CommError(fmt::format("connecting to rank {}: {}", rank, reached.why));
    if (!send_frame(*reached.socket, hello, deadline)) continue;
    expect_full_buffers(*reached.socket);
    links_[static_cast<size_t>(rank)].socket = std::move(*reached.socket);
    return;
  }
}

void TcpLinks::accept_others(SteadyClock::time_point deadline,
                             const std::function<void(const std::string&)>& rejected) {
  const Credentials credentials{key_, purpose(name_)};
  PendingCallers pending(listener_, credentials);
  const auto report = [&] {
    for (const std::string& line : pending.take_log()) {
      if (rejected) rejected(line);
    }
  };
  const auto missing = [&] {
    std::string ranks;
    for (size_t r = static_cast<size_t>(rank_) + 1; r < links_.size(); ++r) {
      if (!links_[r].socket) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
    }
    return ranks;
  };
  while (!missing().empty()) {
    {
      std::lock_guard lock(mutex_);
      if (interrupted_) throw CommError(kFailedMeanwhile);
    }
    std::vector<pollfd> entries = {{caller_wake_.fd(), POLLIN, 0}};
    pending.add_entries(entries);
    // Silent callers are also dropped.
    const std::chrono::milliseconds tick = pending.empty() ? std::chrono::hours(1) : kHandshakeTime / 5;
    const auto soon = SteadyClock::now() + pending.patience(tick);
    poll(entries.data(), entries.size(), milliseconds_until(std::min(soon, deadline)));
    if (!pending.refused().empty()) throw CommError("this rank " + pending.refused());
    if (SteadyClock::now() >= deadline) {
      const Contact mine = contact_of(listener_, address_, name_);
      throw CommError(
          fmt::format("not connected in time to rank {}, which connects to this one at {} port {}: is an "
                      "address of these reachable from there, and the port open",
                      missing(), fmt::join(mine.addresses, ", "), mine.port));
    }
    for (auto& caller : pending.advance(entries, links_.size())) accept_rank(std::move(caller));
    report();
  }
  pending.reject_all(kSaidNothing);  // all ranks are connected
  report();
}

void TcpLinks::accept_rank(PendingCallers::Caller caller) try {
  if (caller.first.op != gradwire::Frame::Op::link) return;
  const int world = static_cast<int>(links_.size());
  const int rank = gradwire::Message::decode(caller.first.value).number("rank", rank_ + 1, world - 1);
  Link& link = links_[static_cast<size_t>(rank)];
  if (link.socket) return;
  expect_full_buffers(caller.socket);
  link.socket = std::move(caller.socket);
} catch (const CommError&) {  // not a rank
}

// Returns the length on the connection. For a message being received, valid once its frame has arrived.
size_t TcpLinks::length(const Message& m) {
  return sizeof(Frame) + m.bytes + ((m.frame_.bytes & kHasChecksum) != 0 ? sizeof m.sum_ : 0);
}

void TcpLinks::post(Message& message) {
  std::lock_guard lock(mutex_);
  if (interrupted_) throw CommError("interrupted");
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!link.lost.empty()) throw LinkLost(link.lost);
  message.frame_ = {message.tag, message.bytes | (checksums_ && message.sent ? kHasChecksum : 0)};
  if (message.sent) {
    link.sends.push_back(&message);
    if (link.sends.size() == 1) push(link);
  } else {
    link.receives.push_back(&message);
  }
}

void TcpLinks::hand_over() {
  std::lock_guard lock(mutex_);
  if (!has_work()) return;
  if (!helper_.joinable()) helper_ = Thread("a thread that sends and receives", [this] { run(); });
  helping_ = true;
  if (polling_) helper_wake_.set();  // the helper is polling for work posted earlier
  work_.notify_one();
}

bool TcpLinks::wait(Message& message, SteadyClock::time_point deadline) {
  std::unique_lock lock(mutex_);
  helping_ = false;
  if (polling_) helper_wake_.set();
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!message.done && !message.sent) pull(link);
  while (!message.done) {
    if (interrupted_) throw CommError("interrupted");
    if (!link.lost.empty()) throw LinkLost(link.lost);
    if (SteadyClock::now() >= deadline) return false;
    poll_once(lock, caller_wake_, entries_, owners_, deadline);
  }
  return true;
}

void TcpLinks::interrupt() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  caller_wake_.set();
  if (polling_) helper_wake_.set();
}

void TcpLinks::drop() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  for (Link& link : links_) {
    link.sends.clear();
    link.receives.clear();
  }
}

bool TcpLinks::has_work() const {
  return !interrupted_ && std::any_of(links_.begin(), links_.end(), [](const Link& l) {
    return l.lost.empty() && (!l.sends.empty() || (!l.receives.empty() && !l.mismatched));
  });
}

void TcpLinks::push(Link& link) {
  while (!link.sends.empty()) {
    Message& m = *link.sends.front();
    iovec parts[3];
    int n_parts = 0;
    size_t before = 0;  // bytes of the message before the part
    auto add = [&](void* part, size_t size, size_t ready) {
      const size_t at = m.moved_ - std::min(m.moved_, before);
      if (at < ready) parts[n_parts++] = {static_cast<char*>(part) + at, ready - at};
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
    const ssize_t n = recv(link.socket.fd(), to, room, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      link.lost = n == 0 ? "closed by the peer" : std::strerror(errno);
      return;
    }
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

void TcpLinks::poll_once(std::unique_lock<std::mutex>& lock, WakeEvent& wake, std::vector<pollfd>& entries,
                         std::vector<Link*>& owners, SteadyClock::time_point deadline) {
  entries.assign(1, {wake.fd(), POLLIN, 0});
  owners.assign(1, nullptr);
  for (Link& link : links_) {
    if (!link.lost.empty()) continue;
    const int events =
        (link.sends.empty() ? 0 : POLLOUT) | (link.receives.empty() || link.mismatched ? 0 : POLLIN);
    if (events == 0) continue;
    entries.push_back({link.socket.fd(), static_cast<short>(events), 0});
    owners.push_back(&link);
  }
  lock.unlock();
  poll(entries.data(), entries.size(), milliseconds_until(deadline));
  lock.lock();
  if (entries[0].revents != 0) wake.clear();
  if (interrupted_) return;  // the memory of pending messages may soon be freed
  for (size_t i = 1; i < entries.size(); ++i) {
    if (entries[i].revents == 0) continue;
    push(*owners[i]);
    pull(*owners[i]);
  }
}

void TcpLinks::run() {
  std::vector<pollfd> entries;
  std::vector<Link*> owners;
  std::unique_lock lock(mutex_);
  while (!stop_) {
    work_.wait(lock, [&] { return stop_ || (helping_ && has_work()); });
    if (stop_) return;
    polling_ = true;
    try {
      poll_once(lock, helper_wake_, entries, owners, SteadyClock::time_point::max());
    } catch (const std::bad_alloc&) {
      helping_ = false;  // wait() does the work instead
    }
    polling_ = false;
    // wait() may already be polling for bytes that were moved here.
    if (!helping_) caller_wake_.set();
  }
}

}  // namespace gradwire
