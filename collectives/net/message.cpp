#include "collectives/net/message.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
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
  throw CommError(fmt::format("a control message has {}='{}', which must be a number from {} to {}", key,
                              value, least, most));
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
  const auto found =
      std::find_if(fields_.begin(), fields_.end(), [&](const auto& field) { return field.first == key; });
  if (found == fields_.end()) throw CommError(fmt::format("a control message lacks '{}'", key));
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
