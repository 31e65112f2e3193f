#include "collectives/net/reach.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <sstream>

#include "collectives/net/listener.h"
#include "collectives/net/socket.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using std::chrono::milliseconds;

// Delays before an attempt at the next address if the current address does not answer: while connecting, and
// after the connection is established. An accepting rank may be busy for a long time, and each dropped
// connection would add a line to that rank's log.
constexpr milliseconds kNextAfter{200}, kNextAfterConnected{2000};
// Delay before another attempt at an address that did not answer; the address may be reachable by then.
constexpr milliseconds kConnectAnew{5000};
constexpr milliseconds kFirstPause{20}, kLongestPause{500};

// Connects to one address: waits for its start time, connects, performs the handshake, and, if allowed,
// retries after a failure.
struct Connector {
  enum class State { idle, connecting, proving, proved, ended };
  using Time = SteadyClock::time_point;

  const Address address;
  const Credentials& credentials;
  const bool retry;
  State state = State::idle;
  Time begin_at = Time::max(), began_at = {};
  milliseconds pause = kFirstPause;
  Socket socket = {};
  std::optional<Handshake> handshake = {};
  std::string why = "no answer";  // the latest failure
  bool writable = false, refused = false, failed = false;

  bool waits() const { return state == State::idle && begin_at == Time::max(); }
  bool other_secret() const { return why == kOtherSecret; }

  // Continues to connect; does nothing before the start time.
  void advance(Time now) {
    if (state == State::idle && now >= begin_at) {
      began_at = now;
      writable = false;
      std::string reason;
      auto begun = begin_connect(address, reason);
      if (!begun) return fail(reason, now);
      socket = std::move(*begun);
      state = State::connecting;
    }
    if (state == State::connecting && writable) {
      if (const int error = connect_error(socket); error != 0) {
        fail(std::strerror(error), SteadyClock::now());
        refused = error == ECONNREFUSED;
        return;
      }
      handshake.emplace(credentials, Handshake::Side::connector);
      state = State::proving;
    }
    if (state == State::connecting && now - began_at >= kConnectAnew && retry) return fail("no answer", now);
    if (state != State::proving) return;
    const Handshake::State proving = handshake->advance(socket);
    if (proving == Handshake::State::proved) state = State::proved;
    if (proving == Handshake::State::refused) fail(handshake->why(), now);
  }

  void fail(const std::string& reason, Time now) {
    why = reason;
    refused = false;
    failed = true;
    socket.close();
    // Another secret: the port belongs to another process now.
    state = retry && !other_secret() ? State::idle : State::ended;
    begin_at = now + pause;
    pause = std::min(2 * pause, kLongestPause);
  }

  // Returns when the next address may start.
  Time next_at() const {
    if (failed || state == State::ended) return Time::min();
    if (state == State::idle) return Time::max();
    return began_at + (state == State::proving ? kNextAfterConnected : kNextAfter);
  }
  // Returns the time at which advance() must run even if no data arrives; far in the future if it need not
  // run.
  Time wake_at() const {
    if (state == State::idle) return begin_at;
    return state == State::connecting && retry ? began_at + kConnectAnew : Time::max();
  }
};

}  // namespace

Reach reach(const Contact& contact, const Credentials& credentials, SteadyClock::time_point deadline,
            bool retry, int stop) {
  std::deque<Connector> all;
  Reach result;
  for (const std::string& address : addresses_to_try(contact)) {
    std::string why;
    for (const Address& a : resolve({address, contact.port}, why)) {
      all.push_back({.address = a, .credentials = credentials, .retry = retry});
    }
    if (!why.empty()) result.why = fmt::format("{}: {}", Endpoint{address, contact.port}.text(), why);
  }
  if (all.empty()) return result;
  all.front().begin_at = SteadyClock::now();
  while (true) {
    const auto now = SteadyClock::now();
    auto wake_at = deadline;
    bool all_ended = true;
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].waits() && i > 0) {
        const auto next_at = all[i - 1].next_at();
        if (next_at <= now) all[i].begin_at = now;
        wake_at = std::min(wake_at, next_at);
      }
      all[i].advance(now);
      if (all[i].state == Connector::State::proved) {
        result.socket = std::move(all[i].socket);
        prepare_for_messages(*result.socket);
        return result;
      }
      all_ended = all_ended && all[i].state == Connector::State::ended;
      wake_at = std::min(wake_at, all[i].wake_at());
    }
    if (all_ended || now >= deadline) break;
    std::vector<pollfd> entries = {{stop, POLLIN, 0}};
    for (const Connector& c : all) {  // poll() ignores closed sockets
      entries.push_back(
          {c.socket.fd(), static_cast<short>(c.state == Connector::State::connecting ? POLLOUT : POLLIN), 0});
    }
    poll(entries.data(), entries.size(), std::min(1000, milliseconds_until(wake_at)));
    if (entries[0].revents != 0) {
      result.why = "interrupted";
      return result;
    }
    for (size_t i = 0; i < all.size(); ++i) all[i].writable = entries[i + 1].revents != 0;
  }
  result.gone = result.other_secret = result.why.empty();
  for (const Connector& c : all) {
    result.gone = result.gone && (c.refused || c.other_secret());
    result.other_secret = result.other_secret && c.other_secret();
    result.why += fmt::format("{}{}: {}", result.why.empty() ? "" : "; ", c.address.text(), c.why);
  }
  return result;
}

std::string Contact::text() const {
  const std::string at = addresses.size() > 1 && !host.empty() ? "@" + host : "";
  return fmt::format("{}{} {} {}", fmt::join(addresses, ","), at, port, name);
}

std::optional<Contact> Contact::parse(const std::string& text) {
  std::istringstream words(text);
  std::string where, port, address;
  Contact contact;
  if (!(words >> where >> port >> contact.name)) return std::nullopt;
  const auto number = parse_number(port, 1, 65535);
  if (!number) return std::nullopt;
  contact.port = *number;
  if (const size_t at = where.find('@'); at != std::string::npos) {
    contact.host = where.substr(at + 1);
    where.resize(at);
  }
  std::istringstream list(where);
  while (std::getline(list, address, ',')) {
    if (!address.empty()) contact.addresses.push_back(address);
  }
  if (contact.addresses.empty()) return std::nullopt;
  return contact;
}

Contact contact_of(const Socket& listener, const std::string& address, const std::string& name) {
  Contact contact{.addresses = {address}, .port = local_port(listener), .name = name};
  if (address.empty()) {
    contact.addresses = own_addresses();
    contact.host = host_id();
  }
  return contact;
}

std::string host_id() {
  static const std::string id = [] {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat space {};
    if (boot.empty() || stat("/proc/self/ns/net", &space) != 0) return std::string();
    return fmt::format("{}.{}.{}", boot, space.st_dev, space.st_ino);
  }();
  return id;
}

namespace {

struct Interface {
  std::string name, address, mask;  // mask: of the network, as an address
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
      const auto text = [&](const sockaddr* bytes) {
        Address address;
        address.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
        if (bytes != nullptr) std::memcpy(&address.bytes, bytes, address.length);
        return bytes == nullptr ? "" : address.host();
      };
      const std::string address = text(i->ifa_addr);
      if (!address.empty()) found.push_back({i->ifa_name, address, text(i->ifa_netmask)});
    }
  }
  freeifaddrs(list);
  return found;
}

// Returns whether an interface of this host is in the same network as this address.
bool in_own_network(const std::string& address) {
  // Returns the bytes of an address; empty if the text is not an address.
  const auto bytes = [](const std::string& text) {
    char data[sizeof(in6_addr)];
    if (inet_pton(AF_INET, text.c_str(), data) == 1) return std::string(data, sizeof(in_addr));
    return inet_pton(AF_INET6, text.c_str(), data) == 1 ? std::string(data, sizeof data) : "";
  };
  std::vector<Interface> all;
  try {
    all = interfaces();
  } catch (const OutOfResources&) {
    return false;  // the result only decides which address is tried first
  }
  for (const Interface& i : all) {
    const std::string mine = bytes(i.address), theirs = bytes(address), mask = bytes(i.mask);
    if (mine.empty() || mine.size() != theirs.size() || mine.size() != mask.size()) continue;
    bool same = true;
    for (size_t b = 0; b < mine.size(); ++b) same = same && ((mine[b] ^ theirs[b]) & mask[b]) == 0;
    if (same) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> addresses_to_try(const Contact& contact) {
  std::vector<std::string> addresses = contact.addresses;
  if (addresses.size() < 2 || contact.host.empty()) return addresses;
  if (contact.host == host_id()) {
    std::stable_partition(addresses.begin(), addresses.end(), is_loopback);
    return addresses;
  }
  std::erase_if(addresses, is_loopback);
  if (addresses.empty()) return contact.addresses;
  const std::vector<std::string> own = own_addresses();
  const auto is_own = [&](const std::string& a) { return std::find(own.begin(), own.end(), a) != own.end(); };
  const auto rest = std::stable_partition(addresses.begin(), addresses.end(),
                                          [&](const std::string& a) { return !is_own(a); });
  std::stable_partition(addresses.begin(), rest, in_own_network);
  return addresses;
}

std::string address_of_interface(const std::string& name) {
  std::string names;
  for (const Interface& i : interfaces()) {
    if (i.name == name) return i.address;
    if (names.find(i.name) == std::string::npos) names += (names.empty() ? "" : ", ") + i.name;
  }
  throw BadInput("no network interface '{}' with an address; there are {}", name, names);
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

}  // namespace gradwire
