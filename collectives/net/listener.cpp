#include "collectives/net/listener.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "collectives/net/reach.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {

Socket listen_on(const Endpoint& endpoint) {
  std::string why;
  std::vector<Address> addresses = resolve(endpoint, why, true);
  const auto is_v6 = [](const Address& address) { return address.bytes.ss_family == AF_INET6; };
  // [::] also serves IPv4. Hosts without IPv6 have only 0.0.0.0.
  if (endpoint.host.empty()) std::stable_partition(addresses.begin(), addresses.end(), is_v6);
  for (const Address& address : addresses) {
    Socket socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1, off = 0;
    if (socket && setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (!is_v6(address) || setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.length) == 0 &&
        listen(socket.fd(), 1024) == 0) {
      return socket;
    }
    why = errno == EADDRNOTAVAIL
              ? fmt::format(
                    "it is not an address of this machine, whose addresses are {}; 0.0.0.0 stands for all",
                    fmt::join(own_addresses(), ", "))
              : error_text(errno);
  }
  throw CommError("cannot listen on {}: {}", endpoint.text(), why);
}

void check_ports(const std::string& what, const PortRange& ports) {
  const bool any = ports.first == 0 && ports.last == 0;
  if (any || (1 <= ports.first && ports.first <= ports.last && ports.last <= 65535)) return;
  throw BadInput("{}: ports {} to {} are not a range; give ports from 1 to 65535, the lower one first", what,
                 ports.first, ports.last);
}

PortRange parse_ports(const std::string& what, const std::string& text) {
  const auto range = parse_pair(text.find('-') == std::string::npos ? text + "-" + text : text, '-', 0);
  if (!range || range->second == 0) {
    throw BadInput("{} is '{}'; give a range of ports such as 20000-20100", what, text);
  }
  const PortRange ports{range->first, range->second};
  check_ports(what, ports);
  return ports;
}

Socket listen_within(const PortRange& ports, const std::string& address) {
  std::string why;
  for (int port = ports.first; port <= ports.last; ++port) {
    try {
      return listen_on({address, port});
    } catch (const CommError& error) {
      if (ports.first == ports.last) throw;
      why = error.what();
    }
  }
  throw CommError(
      "none of the ports {} to {} is free (the last: {}); allow more of them, as GRADWIRE_PORTS "
      "or gw_comm_options.ports does",
      ports.first, ports.last, why);
}

int local_port(const Socket& socket) {
  Address address{.length = sizeof address.bytes};
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address.bytes), &address.length);
  return address.port();
}

std::optional<Socket> accept_from(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return std::nullopt;
  prepare_for_messages(socket);
  return socket;
}

Listener::Listener(const std::string& kind, const std::string& address, const std::string& key,
                   const PortRange& ports)
    : address_(address),
      name_(random_secret()),
      credentials_{key, kind + " " + name_},
      socket_(listen_within(ports, address)) {}

std::chrono::milliseconds Listener::tick() const {
  if (SteadyClock::now() < paused_until_) return kPause;
  // Silent callers are dropped when their time is over.
  return pending_.empty() ? std::chrono::hours(1) : kHandshakeTime / 5;
}

void Listener::add_entries(std::vector<pollfd>& entries) {
  entry_ = entries.size();
  // poll() ignores the descriptor -1.
  entries.push_back({SteadyClock::now() < paused_until_ ? -1 : socket_.fd(), POLLIN, 0});
  for (const Pending& caller : pending_) entries.push_back({caller.socket.fd(), POLLIN, 0});
}

std::vector<Listener::Caller> Listener::advance(const std::vector<pollfd>& entries, size_t ranks) {
  std::vector<Caller> ready;
  for (Pending& caller : pending_) {
    try {
      if (auto first = read_first(caller)) {
        ready.push_back({std::move(caller.socket), std::move(caller.address), std::move(*first)});
      }
    } catch (const CommError&) {
      caller.socket.close();  // the caller is not a rank
    }
  }
  std::erase_if(pending_, [](const Pending& caller) { return !caller.socket; });
  if (entries[entry_].revents == 0) return ready;
  for (size_t i = 0; i < kMaxUnauthenticated; ++i) {
    auto socket = accept_from(socket_);
    if (const int error = errno;
        !socket && (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM)) {
      const auto now = SteadyClock::now();
      if (refused_.empty()) refused_since_ = now;
      refused_ = "cannot accept a connection: " + error_text(error);
      paused_until_ = now + kPause;
      break;
    }
    refused_.clear();
    if (!socket) break;
    if (pending_.size() >= kMaxUnauthenticated + 2 * ranks) {
      log_rejected(pending_.front().address, kTooMany);
      pending_.erase(pending_.begin());
    }
    std::string address = socket->peer_address();
    pending_.push_back({std::move(*socket), std::move(address),
                        std::make_unique<Handshake>(credentials_, Handshake::Side::acceptor)});
  }
  return ready;
}

// Reads available bytes and returns the caller's first frame once it is complete. Closes the socket of a
// caller that is rejected or hangs up.
std::optional<Frame> Listener::read_first(Pending& caller) {
  const auto reject = [&](const std::string& why) {
    log_rejected(caller.address, why);
    caller.socket.close();
    return std::nullopt;
  };
  if (caller.handshake) {
    const Handshake::State state = caller.handshake->advance(caller.socket);
    if (state == Handshake::State::refused) return reject(caller.handshake->why());
    if (state == Handshake::State::waiting) return std::nullopt;
    caller.handshake = nullptr;
  }
  while (true) {
    if (auto frame = Frame::decode(caller.received)) return frame;
    char bytes[256];
    const size_t wanted = std::min(sizeof bytes, Frame::missing(caller.received));
    const ssize_t n = recv(caller.socket.fd(), bytes, wanted, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      caller.socket.close();
      return std::nullopt;
    }
    caller.received.append(bytes, static_cast<size_t>(n));
  }
  if (SteadyClock::now() >= caller.until) return reject(kSaidNothing);
  return std::nullopt;
}

namespace {

using Op = Frame::Op;

constexpr std::chrono::milliseconds kNotifyEvery{1000}, kInvitation{1000};
constexpr const char* kEnded = "the run has ended or no longer admits ranks";

// Sends a frame to a joiner without waiting. The connection's buffer has room unless the joiner has not read
// from the connection for hours.
bool notify(const Socket& socket, Op op, const std::string& value = "") {
  const std::string bytes = Frame{op, 0, "", value}.encode();
  return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

}  // namespace

void AdmissionQueue::close() {
  std::lock_guard lock(mutex_);
  validate_ = [](const std::string&) { return kEnded; };
  for (const Joiner& joiner : waiting_) notify(joiner.socket, Op::rejected, kEnded);
  waiting_.clear();
  count_ = 0;
}

void AdmissionQueue::request(Socket socket, const Message& request, int ranks) {
  const std::string &contact = request.text("contact"), &about = request.text("about");
  std::lock_guard lock(mutex_);
  const size_t waiting = waiting_.size();
  std::string why;
  if (!validate_) {
    why = "this group takes no new ranks";
  } else if (ranks + static_cast<int>(waiting) >= most_) {
    why = fmt::format("there are {} ranks{}, and at most {} are allowed", ranks,
                      waiting == 0 ? "" : fmt::format(" and {} more that wait to join", waiting), most_);
  } else {
    why = validate_(about);
  }
  if (why.empty()) {
    waiting_.push_back({contact, std::move(socket)});
    ++count_;
    return;
  }
  const std::string from = socket.peer_address();
  print_error_line(
      fmt::format("a process at {} cannot join: {}", from.empty() ? "an unknown address" : from, why));
  notify(socket, Op::rejected, why);
}

void AdmissionQueue::update() {
  std::lock_guard lock(mutex_);
  const auto now = SteadyClock::now();
  const bool notifies = now - notified_at_ >= kNotifyEvery;
  if (notifies) notified_at_ = now;
  std::erase_if(waiting_, [&](const Joiner& joiner) {
    return joiner.socket.hung_up() || (notifies && !notify(joiner.socket, Op::wait));
  });
  count_ = static_cast<int>(waiting_.size());
}

std::vector<AdmissionQueue::Joiner> AdmissionQueue::invite() {
  std::vector<Joiner> asked, present;
  {
    std::lock_guard lock(mutex_);
    asked = std::exchange(waiting_, {});
    count_ = 0;
  }
  std::erase_if(asked, [](const Joiner& joiner) { return !notify(joiner.socket, Op::check); });
  const auto deadline = SteadyClock::now() + kInvitation;
  for (Joiner& joiner : asked) {
    std::string bytes;
    try {
      const auto reply = receive_frame(joiner.socket, bytes, deadline);
      if (reply && reply->op == Op::present) present.push_back(std::move(joiner));
    } catch (const CommError&) {  // the peer is not a joiner
    }
  }
  return present;
}

}  // namespace gradwire
