#include "collectives/transport/tcp_links.h"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <sstream>

#include "runtime/error.h"

namespace gradwire {
namespace {

constexpr char kGreeting[8] = {'g', 'w', '-', 'l', 'i', 'n', 'k', '1'};
constexpr size_t kSecretCharacters = 32;
// How many connections that have not identified themselves are kept, beyond one per rank, before the oldest
// is closed.
constexpr size_t kMostStrangers = 64;

// The first bytes on a connection, sent by the rank that opened it.
struct Hello {
  char greeting[sizeof kGreeting];
  char secret[kSecretCharacters];  // of the listening rank
  int32_t rank;                    // of the connecting rank
};

std::string random_secret() {
  std::random_device device;
  std::string text;
  while (text.size() < kSecretCharacters) text += "0123456789abcdef"[device() % 16];
  return text;
}

int milliseconds_until(SteadyClock::time_point deadline) {
  if (deadline == SteadyClock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SteadyClock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
}

}  // namespace

TcpLinks::Bell::Bell() : socket_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!socket_) throw CommError(fmt::format("eventfd failed: {}", std::strerror(errno)));
}
void TcpLinks::Bell::ring() {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(socket_.fd(), &one, sizeof one);
}
void TcpLinks::Bell::silence() {
  uint64_t count;
  [[maybe_unused]] ssize_t n = read(socket_.fd(), &count, sizeof count);
}

TcpLinks::TcpLinks(int rank, int world, const std::string& address)
    : rank_(rank),
      listener_(listen_on({address, 0})),
      address_(address),
      secret_(random_secret()),
      links_(static_cast<size_t>(world)) {}

TcpLinks::~TcpLinks() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    helper_bell_.ring();
  }
  work_.notify_all();
  if (helper_.joinable()) helper_.join();
}

std::string TcpLinks::contact() const {
  return fmt::format("{} {} {}", address_, local_port(listener_), secret_);
}

// Each rank connects to those below it and accepts connections from those above it.
void TcpLinks::connect(const std::vector<std::string>& contacts, SteadyClock::time_point deadline) {
  for (int r = 0; r < rank_; ++r) {
    const std::string who = fmt::format("connecting to rank {}", r);
    std::istringstream contact(contacts[static_cast<size_t>(r)]);
    Endpoint endpoint;
    std::string secret;
    if (!(contact >> endpoint.host >> endpoint.port >> secret) || secret.size() != kSecretCharacters) {
      throw CommError(who + ": its address does not parse; are all ranks the same build?");
    }
    std::string why;
    auto socket = try_connect(endpoint, deadline, why);
    if (!socket) throw CommError(fmt::format("{} at {}: {}", who, endpoint.text(), why));
    Hello hello;
    std::memcpy(hello.greeting, kGreeting, sizeof kGreeting);
    std::memcpy(hello.secret, secret.data(), kSecretCharacters);
    hello.rank = rank_;
    if (!send_all(*socket, std::string(reinterpret_cast<const char*>(&hello), sizeof hello), deadline)) {
      throw CommError(fmt::format("{} at {}: it hung up", who, endpoint.text()));
    }
    links_[static_cast<size_t>(r)].socket = std::move(*socket);
  }
  accept_others(deadline);
  listener_.close();
}

void TcpLinks::accept_others(SteadyClock::time_point deadline) {
  struct Caller {
    Socket socket;
    std::string said;
  };
  std::deque<Caller> callers;
  auto missing = [&] {
    std::string ranks;
    for (size_t r = static_cast<size_t>(rank_) + 1; r < links_.size(); ++r) {
      if (!links_[r].socket) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
    }
    return ranks;
  };
  while (!missing().empty()) {
    {
      std::lock_guard lock(mutex_);
      if (interrupted_) throw CommError("the group failed while its ranks connected");
    }
    std::vector<pollfd> entries = {{listener_.fd(), POLLIN, 0}, {caller_bell_.fd(), POLLIN, 0}};
    for (const Caller& c : callers) entries.push_back({c.socket.fd(), POLLIN, 0});
    poll(entries.data(), entries.size(), milliseconds_until(deadline));
    if (SteadyClock::now() >= deadline) throw CommError("not connected in time to rank " + missing());
    for (Caller& c : callers) {
      char bytes[sizeof(Hello)];
      const ssize_t n = recv(c.socket.fd(), bytes, sizeof bytes - c.said.size(), MSG_DONTWAIT);
      if (n > 0) c.said.append(bytes, static_cast<size_t>(n));
      if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) c.socket.close();
      if (c.said.size() < sizeof(Hello)) continue;
      Hello hello;
      std::memcpy(&hello, c.said.data(), sizeof hello);
      const bool known = std::memcmp(hello.greeting, kGreeting, sizeof kGreeting) == 0 &&
                         std::memcmp(hello.secret, secret_.data(), kSecretCharacters) == 0 &&
                         hello.rank > rank_ && hello.rank < static_cast<int>(links_.size());
      if (known && !links_[static_cast<size_t>(hello.rank)].socket) {
        links_[static_cast<size_t>(hello.rank)].socket = std::move(c.socket);
      }
      c.socket.close();
    }
    std::erase_if(callers, [](const Caller& c) { return !c.socket; });
    while (auto socket = accept_from(listener_)) callers.push_back({std::move(*socket), ""});
    while (callers.size() > links_.size() + kMostStrangers) callers.pop_front();
  }
}

void TcpLinks::post(Message& message) {
  std::lock_guard lock(mutex_);
  if (interrupted_) throw CommError("interrupted");
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!link.lost.empty()) throw LinkLost(link.lost);
  message.frame_ = {message.tag, message.bytes};
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
  if (!helper_.joinable()) helper_ = std::thread([this] { run(); });
  helping_ = true;
  if (polling_) helper_bell_.ring();  // it polls for what was posted before
  work_.notify_one();
}

bool TcpLinks::wait(Message& message, SteadyClock::time_point deadline) {
  std::unique_lock lock(mutex_);
  helping_ = false;
  if (polling_) helper_bell_.ring();
  Link& link = links_.at(static_cast<size_t>(message.peer));
  if (!message.done && !message.sent) pull(link);
  while (!message.done) {
    if (interrupted_) throw CommError("interrupted");
    if (!link.lost.empty()) throw LinkLost(link.lost);
    if (SteadyClock::now() >= deadline) return false;
    poll_once(lock, caller_bell_, entries_, owners_, deadline);
  }
  return true;
}

void TcpLinks::interrupt() {
  std::lock_guard lock(mutex_);
  interrupted_ = true;
  caller_bell_.ring();
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
  return std::any_of(links_.begin(), links_.end(), [](const Link& l) {
    return l.lost.empty() && (!l.sends.empty() || (!l.receives.empty() && !l.mismatched));
  });
}

void TcpLinks::push(Link& link) {
  while (!link.sends.empty()) {
    Message& m = *link.sends.front();
    iovec parts[2];
    int n_parts = 0;
    if (m.moved_ < sizeof(Frame)) {
      parts[n_parts++] = {reinterpret_cast<char*>(&m.frame_) + m.moved_, sizeof(Frame) - m.moved_};
    }
    const size_t at = m.moved_ - std::min(m.moved_, sizeof(Frame));
    if (m.bytes > 0) parts[n_parts++] = {static_cast<char*>(m.data) + at, m.bytes - at};
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
    if (m.moved_ < sizeof(Frame) + m.bytes) continue;
    m.done = true;
    link.sends.pop_front();
  }
}

void TcpLinks::pull(Link& link) {
  while (!link.receives.empty() && !link.mismatched && link.lost.empty()) {
    Message& m = *link.receives.front();
    const bool in_frame = m.moved_ < sizeof(Frame);
    if (m.moved_ == 0) m.frame_ = {};
    char* to = in_frame ? reinterpret_cast<char*>(&m.frame_) + m.moved_
                        : static_cast<char*>(m.data) + (m.moved_ - sizeof(Frame));
    const size_t room = (in_frame ? sizeof(Frame) : sizeof(Frame) + m.bytes) - m.moved_;
    const ssize_t n = recv(link.socket.fd(), to, room, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      link.lost = n == 0 ? "closed by the peer" : std::strerror(errno);
      return;
    }
    m.moved_ += static_cast<size_t>(n);
    if (in_frame && m.moved_ == sizeof(Frame) && (m.frame_.tag != m.tag || m.frame_.bytes != m.bytes)) {
      link.mismatched = true;
      return;
    }
    if (m.moved_ < sizeof(Frame) + m.bytes) continue;
    m.done = true;
    link.receives.pop_front();
  }
}

void TcpLinks::poll_once(std::unique_lock<std::mutex>& lock, Bell& bell, std::vector<pollfd>& entries,
                         std::vector<Link*>& owners, SteadyClock::time_point deadline) {
  entries.assign(1, {bell.fd(), POLLIN, 0});
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
  if (entries[0].revents != 0) bell.silence();
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
    poll_once(lock, helper_bell_, entries, owners, SteadyClock::time_point::max());
    polling_ = false;
    // wait() may poll by now, for bytes that were moved here.
    if (!helping_) caller_bell_.ring();
  }
}

}  // namespace gradwire
