#include "collectives/net/interfaces.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "collectives/net/socket.h"
#include "runtime/threads/resources.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Returns the bytes of an address or of a network's mask; empty if the address is neither IPv4 nor IPv6.
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
  std::string name, address, mask;  // mask: the bytes of the network's mask
};

// Returns one entry per address of each interface that is up, IPv4 addresses first. Leaves out link-local
// addresses of IPv6 (fe80::), because they are meaningless without an interface of the connecting host.
// Throws OutOfResources if the system lacks the resources: without the list, other hosts could not reach this
// rank.
std::vector<Interface> interfaces() {
  std::vector<Interface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    // If the system forbids reading the list, as in some sandboxes, ranks of one host can still connect.
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
      Address its;
      its.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&its.bytes, i->ifa_addr, its.length);
      const std::string address = its.host();
      if (!address.empty()) found.push_back({i->ifa_name, address, bytes_of(i->ifa_netmask)});
    }
  }
  freeifaddrs(list);
  return found;
}

}  // namespace

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
  addresses.push_back(loopback_address());
  return addresses;
}

std::string loopback_address() {
  std::string address = "127.0.0.1";
  for (const Interface& i : interfaces()) {
    if (i.address.starts_with("127.")) return "127.0.0.1";
    if (i.address == "::1") address = i.address;
  }
  return address;
}

bool in_own_network(const std::string& address) {
  const std::string bytes = bytes_of(address);
  std::vector<Interface> all;
  try {
    all = interfaces();
  } catch (const OutOfResources&) {
    return false;  // the result only decides which address is tried first
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
