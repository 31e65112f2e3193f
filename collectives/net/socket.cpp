#include "collectives/net/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

#include "collectives/net/reach.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

// Which descriptors a Socket owns, and the highest that one has owned. 2^20 is the kernel's default limit.
std::atomic<bool> owned[1 << 20];
std::atomic<int> highest = -1;

void set_owned(int fd, bool value) {
  if (static_cast<size_t>(fd) >= std::size(owned)) return;
  owned[fd] = value;
  for (int before = highest; before < fd && !highest.compare_exchange_weak(before, fd);) {
  }
}

// Runs in the child of a fork, where other threads may have held any lock: makes only system calls.
void drop_parents_sockets() {
  const int nothing = eventfd(0, EFD_CLOEXEC);
  for (int fd = 0; fd <= highest; ++fd) {
    if (owned[fd] && (nothing < 0 || dup3(nothing, fd, O_CLOEXEC) < 0)) ::close(fd);
  }
  if (nothing >= 0) ::close(nothing);
}
[[maybe_unused]] const int forks = pthread_atfork(nullptr, nullptr, drop_parents_sockets);

template <typename Ask>
std::string address_of(int fd, Ask ask) {
  Address address{.length = sizeof address.bytes};
  if (ask(fd, reinterpret_cast<sockaddr*>(&address.bytes), &address.length) != 0) return "";
  return address.host();
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

}  // namespace

Socket::Socket(int fd) : fd_(above_standard_descriptors(fd)) {
  set_owned(fd_, true);
}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.fd_;
    other.fd_ = -1;
  }
  return *this;
}

void Socket::close() {
  set_owned(fd_, false);
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
  if (end <= now) return 0;  // includes time_point::min(), for which the subtraction below would overflow
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
  for (const Address& address : resolve({host, 0}, ignored)) {
    if (!is_loopback(address.host())) return true;
  }
  return false;
}

void expect_full_buffers(const Socket& socket) {
  const int none = 0;
  setsockopt(socket.fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &none, sizeof none);
}

// Sets the options of a connection. A machine that loses power or its cable sends nothing, so the kernel
// probes the other machine on idle connections, and ends a connection after kHostGoneAfter without an answer.
// A stopped process does not end a connection, because its kernel answers.
void prepare_for_messages(const Socket& socket) {
  constexpr int kIdle = 5, kBetweenProbes = 1, kProbes = static_cast<int>(kHostGoneAfter.count()) - kIdle;
  const auto set = [&](int level, int option, int value) {
    setsockopt(socket.fd(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdle);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kBetweenProbes);
  set(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(1000 * kHostGoneAfter.count()));
}

std::string Address::host() const {
  char buffer[NI_MAXHOST] = "";
  getnameinfo(reinterpret_cast<const sockaddr*>(&bytes), length, buffer, sizeof buffer, nullptr, 0,
              NI_NUMERICHOST);
  // A socket for IPv4 and IPv6 reports IPv4 addresses as "::ffff:10.0.0.1".
  const std::string_view mapped = "::ffff:", all = buffer;
  return std::string(all.starts_with(mapped) && all.find('.') != all.npos ? all.substr(mapped.size()) : all);
}

int Address::port() const {
  return ntohs(bytes.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bytes).sin6_port
                                           : reinterpret_cast<const sockaddr_in&>(bytes).sin_port);
}

std::string Address::text() const {
  return Endpoint{host(), port()}.text();
}

std::vector<Address> resolve(const Endpoint& endpoint, std::string& why, bool listens) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = (listens ? AI_PASSIVE : 0) | AI_NUMERICSERV;
  // The hosts file of a machine whose loopback has IPv6 only may still contain 127.0.0.1.
  const std::string host = endpoint.host == "localhost" ? loopback_address() : endpoint.host;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                fmt::format("{}", endpoint.port).c_str(), &hints, &found);
  if (error != 0) {
    why = error == EAI_SYSTEM ? error_text(errno) : gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
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

namespace {

constexpr uint32_t kMaxFrameBytes = 1 << 20;
constexpr uint32_t kFrameHeader = 9;  // bytes of the operation, the id and the length of the key
constexpr size_t kLength = 4;

void put(std::string& bytes, size_t value) {
  for (size_t i = 0; i < kLength; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
}

uint32_t take(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < kLength; ++i)
    value |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
  return value;
}

int number_in(std::string_view key, const std::string& value, int least, int most) {
  if (const auto number = parse_number(value, least, most)) return *number;
  throw CommError("a control message has {}='{}', which must be a number from {} to {}", key, value, least,
                  most);
}

}  // namespace

Message& Message::add(std::string_view key, std::string_view value) {
  fields_.emplace_back(key, value);
  return *this;
}

Message& Message::add(std::string_view key, int64_t value) {
  return add(key, std::string_view(std::to_string(value)));
}

const std::string& Message::text(std::string_view key) const {
  const auto found = std::ranges::find(fields_, key, &Fields::value_type::first);
  if (found == fields_.end()) throw CommError("a control message lacks '{}'", key);
  return found->second;
}

int Message::number(std::string_view key, int least, int most) const {
  return number_in(key, text(key), least, most);
}

std::vector<std::string> Message::texts(std::string_view key) const {
  std::vector<std::string> values;
  for (const auto& [its_key, value] : fields_) {
    if (its_key == key) values.push_back(value);
  }
  return values;
}

std::vector<int> Message::numbers(std::string_view key, int least, int most) const {
  std::vector<int> values;
  for (const std::string& value : texts(key)) values.push_back(number_in(key, value, least, most));
  return values;
}

std::string Message::encode() const {
  std::string bytes;
  for (const auto& [key, value] : fields_) {
    put(bytes, key.size());
    put(bytes, value.size());
    bytes += key;
    bytes += value;
  }
  return bytes;
}

Message Message::decode(std::string_view bytes) {
  Message message;
  while (!bytes.empty()) {
    const size_t header = 2 * kLength;
    const size_t key = bytes.size() < header ? 0 : take(bytes, 0);
    const size_t value = bytes.size() < header ? 0 : take(bytes, kLength);
    if (bytes.size() < header || bytes.size() - header < key || bytes.size() - header - key < value) {
      throw CommError("a control message is incomplete");
    }
    message.add(bytes.substr(header, key), bytes.substr(header + key, value));
    bytes.remove_prefix(header + key + value);
  }
  return message;
}

std::string Frame::encode() const {
  std::string bytes;
  put(bytes, kFrameHeader + key.size() + value.size());
  bytes.push_back(static_cast<char>(op));
  put(bytes, id);
  put(bytes, key.size());
  return bytes + key + value;
}

std::optional<Frame> Frame::decode(std::string& bytes) {
  constexpr const char* kNotAFrame = "received bytes that are not a control message of this version";
  if (bytes.size() < kLength) return std::nullopt;
  const uint32_t rest = take(bytes, 0);
  if (rest < kFrameHeader || rest > kMaxFrameBytes) throw CommError(kNotAFrame);
  if (bytes.size() < kLength + rest) return std::nullopt;
  Frame frame{.op = static_cast<Op>(bytes[4]), .id = take(bytes, 5)};
  const uint32_t key_bytes = take(bytes, 9);
  if (frame.op > Op::last || key_bytes > rest - kFrameHeader) throw CommError(kNotAFrame);
  const size_t key_at = kLength + kFrameHeader;
  frame.key = bytes.substr(key_at, key_bytes);
  frame.value = bytes.substr(key_at + key_bytes, rest - kFrameHeader - key_bytes);
  bytes.erase(0, kLength + rest);
  return frame;
}

size_t Frame::missing(const std::string& bytes) {
  return kLength + (bytes.size() < kLength ? 0 : take(bytes, 0)) - bytes.size();
}

bool send_frame(const Socket& socket, const Frame& frame, SteadyClock::time_point deadline) {
  return send_all(socket, frame.encode(), deadline);
}

std::optional<Frame> receive_frame(Socket& socket, std::string& bytes, SteadyClock::time_point deadline) {
  while (true) {
    if (auto frame = Frame::decode(bytes)) return frame;
    if (!wait_readable(socket.fd(), deadline)) return std::nullopt;
    char chunk[4096];
    const ssize_t n = recv(socket.fd(), chunk, sizeof chunk, 0);
    if (n > 0) {
      bytes.append(chunk, static_cast<size_t>(n));
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      socket.close();
      return std::nullopt;
    }
  }
}

}  // namespace gradwire
