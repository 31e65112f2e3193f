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
#include <fstream>
#include <memory>
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

// The attempts at one address: waits for its start time, connects, performs the handshake, and, if allowed,
// retries after a failure.
class Attempt {
 public:
  Attempt(const Address& address, const Credentials& credentials, bool retry)
      : address_(address), credentials_(credentials), retry_(retry), why_("no answer") {}

  // Continues the attempt; does nothing before the start time. Returns whether the handshake has succeeded.
  bool advance(SteadyClock::time_point now) {
    if (state_ == State::idle && now >= begin_at_) begin(now);
    if (state_ == State::connecting && writable_) finish_connecting();
    if (state_ == State::connecting && now - began_at_ >= kConnectAnew && retry_) fail("no answer", now);
    if (state_ == State::proving) prove(now);
    return state_ == State::proved;
  }

  pollfd entry() const {
    if (state_ == State::connecting) return {socket_.fd(), POLLOUT, 0};
    if (state_ == State::proving) return {socket_.fd(), POLLIN, 0};
    return {-1, 0, 0};
  }
  void polled(const pollfd& entry) { writable_ = state_ == State::connecting && entry.revents != 0; }

  // Returns the time at which advance() must run even if no data arrives; far in the future if advance() need
  // not run.
  SteadyClock::time_point wake_at() const {
    if (state_ == State::idle) return begin_at_;
    if (state_ == State::connecting && retry_) return began_at_ + kConnectAnew;
    return SteadyClock::time_point::max();
  }
  // Returns when the attempt at the next address may start.
  SteadyClock::time_point next_at() const {
    if (failed_ || state_ == State::ended) return SteadyClock::time_point::min();
    if (state_ == State::idle) return SteadyClock::time_point::max();
    return began_at_ + (state_ == State::proving ? kNextAfterConnected : kNextAfter);
  }

  void begin_at(SteadyClock::time_point time) { begin_at_ = time; }
  bool waits() const { return state_ == State::idle && begin_at_ == SteadyClock::time_point::max(); }
  bool ended() const { return state_ == State::ended; }
  bool refused() const { return refused_; }
  bool other_secret() const { return why_ == kOtherSecret; }
  std::string why() const { return fmt::format("{}: {}", address_.text(), why_); }
  Socket take() { return std::move(socket_); }

 private:
  enum class State { idle, connecting, proving, proved, ended };

  void begin(SteadyClock::time_point now) {
    began_at_ = now;
    writable_ = false;
    std::string why;
    auto socket = begin_connect(address_, why);
    if (!socket) return fail(why, now);
    socket_ = std::move(*socket);
    state_ = State::connecting;
  }

  void finish_connecting() {
    const int error = connect_error(socket_);
    if (error != 0) {
      fail(std::strerror(error), SteadyClock::now());
      refused_ = error == ECONNREFUSED;
      return;
    }
    introduction_ = std::make_unique<Introduction>(credentials_);
    state_ = State::proving;
  }

  void prove(SteadyClock::time_point now) {
    switch (introduction_->advance(socket_)) {
      case Introduction::State::proved:
        state_ = State::proved;
        break;
      case Introduction::State::refused:
        fail(introduction_->why(), now);
        break;
      case Introduction::State::waiting:
        break;
    }
  }

  void fail(const std::string& why, SteadyClock::time_point now) {
    why_ = why;
    refused_ = false;
    failed_ = true;
    socket_.close();
    // The port belongs to another process now.
    const bool again = retry_ && !other_secret();
    state_ = again ? State::idle : State::ended;
    begin_at_ = now + pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
  }

  const Address address_;
  const Credentials& credentials_;
  const bool retry_;
  State state_ = State::idle;
  SteadyClock::time_point begin_at_ = SteadyClock::time_point::max(), began_at_ = {};
  milliseconds pause_ = kFirstPause;
  Socket socket_;
  std::unique_ptr<Introduction> introduction_;
  std::string why_;
  bool writable_ = false, refused_ = false, failed_ = false;
};

}  // namespace

Reach reach(const Contact& contact, const Credentials& credentials, const ReachOptions& options) {
  std::vector<std::unique_ptr<Attempt>> attempts;
  Reach result;
  for (const std::string& address : addresses_to_try(contact)) {
    std::string why;
    for (const Address& a : resolve({address, contact.port}, why)) {
      attempts.push_back(std::make_unique<Attempt>(a, credentials, options.retry));
    }
    if (!why.empty()) result.why = fmt::format("{}: {}", Endpoint{address, contact.port}.text(), why);
  }
  if (attempts.empty()) return result;
  attempts.front()->begin_at(SteadyClock::now());
  const auto far = SteadyClock::time_point::max();
  while (true) {
    const auto now = SteadyClock::now();
    auto wake_at = options.deadline;
    bool all_ended = true;
    for (size_t i = 0; i < attempts.size(); ++i) {
      Attempt& attempt = *attempts[i];
      if (attempt.waits() && i > 0) {
        const auto next_at = attempts[i - 1]->next_at();
        if (next_at <= now) attempt.begin_at(now);
        if (next_at != far) wake_at = std::min(wake_at, next_at);
      }
      if (attempt.advance(now)) {
        result.socket = attempt.take();
        prepare_for_messages(*result.socket);
        return result;
      }
      all_ended = all_ended && attempt.ended();
      wake_at = std::min(wake_at, attempt.wake_at());
    }
    if (all_ended || now >= options.deadline) break;
    // An attempt that has just failed lets the next attempt start.
    bool begin = false;
    for (size_t i = 1; i < attempts.size(); ++i) {
      begin = begin || (attempts[i]->waits() && attempts[i - 1]->next_at() <= now);
    }
    if (begin) continue;
    std::vector<pollfd> entries = {{options.stop, POLLIN, 0}};
    for (const auto& attempt : attempts) entries.push_back(attempt->entry());
    poll(entries.data(), entries.size(), std::min(1000, milliseconds_until(wake_at)));
    if (entries[0].revents != 0) {
      result.why = "interrupted";
      return result;
    }
    for (size_t i = 0; i < attempts.size(); ++i) attempts[i]->polled(entries[i + 1]);
  }
  result.gone = result.other_secret = result.why.empty();
  for (const auto& attempt : attempts) {
    result.gone = result.gone && (attempt->refused() || attempt->other_secret());
    result.other_secret = result.other_secret && attempt->other_secret();
    result.why += (result.why.empty() ? "" : "; ") + attempt->why();
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

std::string with_address(const std::string& contact, const std::string& address) {
  auto parsed = Contact::parse(contact);
  if (!parsed || address.empty() || is_loopback(address) ||
      std::find(parsed->addresses.begin(), parsed->addresses.end(), address) != parsed->addresses.end()) {
    return contact;
  }
  parsed->addresses.push_back(address);
  return parsed->text();
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
  throw BadInput("no network interface '{}' with an address; there are {}", name, names);
}

void check_interface(const std::string& what, const std::string& name) {
  try {
    address_of_interface(name);
  } catch (const BadInput& error) {
    throw BadInput("{}: {}", what, error.what());
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
