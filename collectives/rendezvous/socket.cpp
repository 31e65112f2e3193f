#include "collectives/rendezvous/socket.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "runtime/error.h"

namespace gradwire {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const Endpoint& endpoint, int flags, std::string& why) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  int error = getaddrinfo(endpoint.host.empty() ? nullptr : endpoint.host.c_str(),
                          fmt::format("{}", endpoint.port).c_str(), &hints, &found);
  if (error != 0) why = gai_strerror(error);
  return {error == 0 ? found : nullptr, &freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = "";
  getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
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

// What every connection gets. A machine that loses power or its cable sends nothing; the kernel asks connections on
// which nothing arrives whether the other machine still answers, and ends them after kHostGoneAfter. A process that is merely
// stopped does not matter: its kernel answers.
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
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - SteadyClock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000));
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
  AddressList list = resolve({host, 0}, 0, ignored);
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    if (!is_loopback(numeric(a->ai_addr, a->ai_addrlen))) return true;
  }
  return false;
}

Socket listen_on(const Endpoint& endpoint) {
  std::string why;
  AddressList list = resolve(endpoint, AI_PASSIVE, why);
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    int on = 1;
    if (socket && setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.fd(), 1024) == 0) {
      return socket;
    }
    why = errno == EADDRNOTAVAIL
              ? fmt::format(
                    "it is not an address of this machine, whose addresses are {}; 0.0.0.0 stands for all",
                    fmt::join(own_addresses(), ", "))
              : std::strerror(errno);
  }
  throw CommError(fmt::format("cannot listen on {}: {}", endpoint.text(), why));
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
      fmt::format("none of the ports {} to {} is free; the last: {}", ports.first, ports.last, why));
}

int local_port(const Socket& socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(address).sin_port);
}

std::optional<Socket> accept_from(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) return std::nullopt;
  set_connection_options(socket.fd());
  return socket;
}

void expect_full_buffers(const Socket& socket) {
  const int none = 0;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &none, sizeof none);
}

std::optional<Socket> try_connect(const Endpoint& endpoint, SteadyClock::time_point deadline,
                                  std::string& why) {
  AddressList list = resolve(endpoint, 0, why);
  for (addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!socket) {
      why = std::strerror(errno);
      continue;
    }
    if (connect(socket.fd(), a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS) {
      why = std::strerror(errno);
      continue;
    }
    if (!wait_writable(socket.fd(), deadline)) {
      why = "no answer";
      continue;
    }
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) {
      why = std::strerror(error);
      continue;
    }
    set_connection_options(socket.fd());
    return socket;
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
  ifaddrs* list = nullptr;
  std::string address, names;
  if (getifaddrs(&list) == 0) {
    for (int family : {AF_INET, AF_INET6}) {
      for (ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
        if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != family || (i->ifa_flags & IFF_UP) == 0)
          continue;
        if (family == AF_INET) names += (names.empty() ? "" : ", ") + std::string(i->ifa_name);
        if (i->ifa_name != name || !address.empty()) continue;
        address = numeric(i->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      }
    }
    freeifaddrs(list);
  }
  if (address.empty()) {
    throw BadInput(fmt::format("no network interface '{}' with an address; there are {}", name, names));
  }
  return address;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    for (ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
      if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_UP) == 0)
        continue;
      std::string address = numeric(i->ifa_addr, sizeof(sockaddr_in));
      if (!address.empty() && !is_loopback(address)) addresses.push_back(address);
    }
    freeifaddrs(list);
  }
  addresses.push_back("127.0.0.1");
  return addresses;
}

}  // namespace gradwire
