#include "collectives/net/listener.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "collectives/net/interfaces.h"
#include "runtime/threads/resources.h"
#include "runtime/util/error.h"
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

}  // namespace gradwire
