#include "collectives/net/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "runtime/threads/resources.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList look_up(const Endpoint& endpoint, int flags, std::string& why) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  int error = getaddrinfo(endpoint.host.empty() ? nullptr : endpoint.host.c_str(),
                          fmt::format("{}", endpoint.port).c_str(), &hints, &found);
  if (error != 0) why = error == EAI_SYSTEM ? error_text(errno) : gai_strerror(error);
  return {error == 0 ? found : nullptr, &freeaddrinfo};
}

// Converts an address to text. A socket for IPv4 and IPv6 reports IPv4 addresses as "::ffff:10.0.0.1".
std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = "";
  getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  const std::string_view mapped = "::ffff:", all = text;
  return std::string(all.starts_with(mapped) && all.find('.') != all.npos ? all.substr(mapped.size()) : all);
}

int port_of(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

template <typename Ask>
std::string address_of(int fd, Ask ask) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  if (ask(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  return numeric(reinterpret_cast<sockaddr*>(&address), length);
}

bool wait_for(int fd, short events, SteadyClock::time_point deadline) {
  while (true) {
    const bool late = SteadyClock::now() >= deadline;
    pollfd entry = {fd, events, 0};
    const int ready = poll(&entry, 1, late ? 0 : milliseconds_until(deadline));
    if (ready > 0) return true;
    if (ready == 0 && late) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

// Sets the options of every connection. A machine that loses power or its cable sends nothing. The kernel
// probes the other machine on idle connections, and ends them after kHostGoneAfter without an answer. A
// stopped process does not end a connection: its kernel answers.
void set_connection_options(int fd) {
  constexpr int kIdle = 5, kBetweenProbes = 1, kProbes = static_cast<int>(kHostGoneAfter.count()) - kIdle;
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdle);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kBetweenProbes);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(1000 * kHostGoneAfter.count()));
}

// Returns the bytes of an address, or of a network's mask; empty if it is neither IPv4 nor IPv6.
std::string bytes_of(const sockaddr* address) {
  if (address != nullptr && address->sa_family == AF_INET) {
    const in_addr& bytes = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    return {reinterpret_cast<const char*>(&bytes), sizeof bytes};
  }
  if (address != nullptr && address->sa_family == AF_INET6) {
    const in6_addr& bytes = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    return {reinterpret_cast<const char*>(&bytes), sizeof bytes};
  }
  return "";
}

std::string bytes_of(const std::string& address) {
  char bytes[sizeof(in6_addr)];
  if (inet_pton(AF_INET, address.c_str(), bytes) == 1) return {bytes, sizeof(in_addr)};
  if (inet_pton(AF_INET6, address.c_str(), bytes) == 1) return {bytes, sizeof(in6_addr)};
  return "";
}

struct Interface {
  std::string name, address, mask;  // the mask's bytes
};

// Returns the interfaces that are up, with each of their addresses; IPv4 first. Link-local addresses of IPv6
// (fe80::) are left out: they are meaningless without an interface of the connecting host. Throws
// OutOfResources: without the list other hosts could not reach this rank.
std::vector<Interface> interfaces() {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    // If the list is forbidden, as in some sandboxes, ranks of one host can still connect.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      throw_refused("the list of network interfaces", errno);
    return found;
  }
  for (int family : {AF_INET, AF_INET6}) {
    for (ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || (i->ifa_flags & IFF_UP) == 0)
        continue;
      if (family == AF_INET6 &&
          IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(i->ifa_addr)->sin6_addr)) {
        continue;
      }
      const auto length =
          static_cast<socklen_t>(family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      const std::string address = numeric(i->ifa_addr, length);
      if (!address.empty()) found.push_back({i->ifa_name, address, bytes_of(i->ifa_netmask)});
    }
  }
  freeifaddrs(list);
  return found;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string Socket::local_address() const {
  return address_of(fd_, getsockname);
}
std::string Socket::peer_address() const {
  return address_of(fd_, getpeername);
}

bool Socket::hung_up() const {
  pollfd entry = {fd_, POLLRDHUP, 0};
  return poll(&entry, 1, 0) > 0 && entry.revents != 0;
}

std::string Endpoint::text() const {
  bool v6 = host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

int milliseconds_until(SteadyClock::time_point deadline) {
  const auto end = SteadyClock::slice_end(deadline);
  if (end == SteadyClock::time_point::max()) return -1;
  const auto now = SteadyClock::now();
  if (end <= now) return 0;  // includes time_point::min(), from which nothing can be subtracted
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - now).count();
  return static_cast<int>(std::min<int64_t>(left, 1'000'000));
}

bool wait_readable(int fd, SteadyClock::time_point deadline) {
  return wait_for(fd, POLLIN, deadline);
}
bool wait_writable(int fd, SteadyClock::time_point deadline) {
  return wait_for(fd, POLLOUT, deadline);
}

bool faces_network(const std::string& host) {
  if (host.empty()) return true;
  std::string ignored;
  AddressList list = look_up({host, 0}, 0, ignored);
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (!is_loopback(numeric(a->ai_addr, a->ai_addrlen))) return true;
  }
  return false;
}

Socket listen_on(const Endpoint& endpoint) {
  std::string why;
  AddressList list = look_up(endpoint, AI_PASSIVE, why);
  std::vector<const addrinfo*> addresses;
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) addresses.push_back(a);
  // [::] also serves IPv4; 0.0.0.0 on hosts without IPv6.
  if (endpoint.host.empty()) {
    std::stable_partition(addresses.begin(), addresses.end(),
                          [](const addrinfo* a) { return a->ai_family == AF_INET6; });
  }
  for (const addrinfo* a : addresses) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    const int on = 1, off = 0;
    if (socket && setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (a->ai_family != AF_INET6 ||
         setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.fd(), 1024) == 0) {
      return socket;
    }
    why = errno == EADDRNOTAVAIL
              ? fmt::format(
                    "it is not an address of this machine, whose addresses are {}; 0.0.0.0 stands for all",
                    fmt::join(own_addresses(), ", "))
              : error_text(errno);
  }
  throw CommError(fmt::format("cannot listen on {}: {}", endpoint.text(), why));
}

void check_ports(const std::string& what, const PortRange& ports) {
  const bool any = ports.first == 0 && ports.last == 0;
  if (any || (1 <= ports.first && ports.first <= ports.last && ports.last <= 65535)) return;
  throw BadInput(
      fmt::format("{}: ports {} to {} are not a range; give ports from 1 to 65535, the lower one first", what,
                  ports.first, ports.last));
}

PortRange parse_ports(const std::string& what, const std::string& text) {
  const auto range = parse_pair(text.find('-') == std::string::npos ? text + "-" + text : text, '-', 0);
  if (!range || range->second == 0) {
    throw BadInput(fmt::format("{} is '{}'; give a range of ports such as 20000-20100", what, text));
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
      fmt::format("none of the ports {} to {} is free (the last: {}); allow more of them, as GRADWIRE_PORTS "
                  "or gw_comm_options.ports does",
                  ports.first, ports.last, why));
}

int local_port(const Socket& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  return port_of(address);
}

std::optional<Socket> accept_from(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return std::nullopt;
  prepare_for_messages(socket);
  return socket;
}

void expect_full_buffers(const Socket& socket) {
  const int none = 0;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &none, sizeof none);
}

void prepare_for_messages(const Socket& socket) {
  set_connection_options(socket.fd());
}

std::string Address::text() const {
  const auto* address = reinterpret_cast<const sockaddr*>(&bytes);
  return Endpoint{numeric(address, length), port_of(bytes)}.text();
}

std::vector<Address> resolve(const Endpoint& endpoint, std::string& why) {
  std::vector<Address> addresses;
  AddressList list = look_up(endpoint, 0, why);
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Address& address = addresses.emplace_back();
    address.length = std::min<socklen_t>(a->ai_addrlen, sizeof address.bytes);
    std::memcpy(&address.bytes, a->ai_addr, address.length);
  }
  return addresses;
}

std::optional<Socket> begin_connect(const Address& address, std::string& why) {
  Socket socket(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket &&
      (connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address.bytes), address.length) == 0 ||
       errno == EINPROGRESS)) {
    return socket;
  }
  why = error_text(errno);
  return std::nullopt;
}

int connect_error(const Socket& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

std::optional<Socket> Acceptor::accept() {
  if (resting()) return std::nullopt;
  auto socket = accept_from(listener_);
  const int error = errno;
  const bool refused = !socket && (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM);
  const auto now = SteadyClock::now();
  if (!refused) {
    why_.clear();
    return socket;
  }
  if (why_.empty()) since_ = now;
  why_ = "cannot accept a connection: " + error_text(error);
  rests_until_ = now + kRest;
  return std::nullopt;
}

std::string Acceptor::refused() const {
  return !why_.empty() && SteadyClock::now() >= since_ + kGrace ? why_ : "";
}

std::chrono::milliseconds Acceptor::patience(std::chrono::milliseconds at_most) const {
  return resting() ? std::min(at_most, kRest) : at_most;
}

WakeEvent::WakeEvent() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw_refused("cannot make an event", errno);
}

void WakeEvent::set() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_.fd(), &one, sizeof one);
}

void WakeEvent::clear() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(event_.fd(), &count, sizeof count);
}

std::optional<Socket> try_connect(const Endpoint& endpoint, SteadyClock::time_point deadline,
                                  std::string& why) {
  for (const Address& address : resolve(endpoint, why)) {
    auto socket = begin_connect(address, why);
    if (!socket) continue;
    const int error = wait_writable(socket->fd(), deadline) ? connect_error(*socket) : ETIMEDOUT;
    if (error == 0) {
      prepare_for_messages(*socket);
      return socket;
    }
    why = error == ETIMEDOUT ? "no answer" : std::strerror(error);
  }
  return std::nullopt;
}

bool send_all(const Socket& socket, const std::string& data, SteadyClock::time_point deadline) {
  for (size_t sent = 0; sent < data.size();) {
    ssize_t n = ::send(socket.fd(), data.data() + sent, data.size() - sent, MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (n < 0 && errno == EAGAIN) {
      if (!wait_writable(socket.fd(), deadline)) return false;
    } else if (n < 0 && errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool receive_exactly(const Socket& socket, char* data, size_t bytes, SteadyClock::time_point deadline) {
  for (size_t got = 0; got < bytes;) {
    ssize_t n = ::recv(socket.fd(), data + got, bytes - got, 0);
    if (n > 0) {
      got += static_cast<size_t>(n);
    } else if (n == 0) {
      return false;
    } else if (errno == EAGAIN) {
      if (!wait_readable(socket.fd(), deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

std::string address_of_interface(const std::string& name) {
  std::string names;
  for (const Interface& i : interfaces()) {
    if (i.name == name) return i.address;
    if (names.find(i.name) == std::string::npos) names += (names.empty() ? "" : ", ") + i.name;
  }
  throw BadInput(fmt::format("no network interface '{}' with an address; there are {}", name, names));
}

void check_interface(const std::string& what, const std::string& name) {
  try {
    address_of_interface(name);
  } catch (const BadInput& error) {
    throw BadInput(fmt::format("{}: {}", what, error.what()));
  }
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  for (const Interface& i : interfaces()) {
    if (!is_loopback(i.address)) addresses.push_back(i.address);
  }
  addresses.push_back("127.0.0.1");
  return addresses;
}

bool in_own_network(const std::string& address) {
  const std::string bytes = bytes_of(address);
  std::vector<Interface> all;
  try {
    all = interfaces();
  } catch (const OutOfResources&) {
    return false;  // this only decides which address is tried first
  }
  for (const Interface& i : all) {
    const std::string mine = bytes_of(i.address);
    if (mine.empty() || mine.size() != bytes.size() || mine.size() != i.mask.size()) continue;
    bool same = true;
    for (size_t b = 0; b < mine.size(); ++b) same = same && ((mine[b] ^ bytes[b]) & i.mask[b]) == 0;
    if (same) return true;
  }
  return false;
}

}  // namespace gradwire
