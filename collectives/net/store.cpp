#include "collectives/net/store.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "collectives/net/handshake.h"
#include "runtime/threads/resources.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using Op = StoreMessage::Op;

constexpr uint32_t kMaxFrameBytes = 1 << 20;
// How long the server may take for requests that need no waiting. Well below the 5 s within which every rank
// must report an error.
constexpr std::chrono::milliseconds kPromptly{2000};

void put(std::string& bytes, uint32_t value) {
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
}

uint32_t take(const std::string& bytes, size_t at) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
  return value;
}

void check_reply(const StoreMessage& reply) {
  if (reply.op == Op::ok) return;
  if (reply.key == "again") throw CommError(reply.value);
  throw StoreRefused(reply.value);
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// Returns a connection authenticated with `key`.
Socket connect_to(const Contact& server, const std::string& key, SteadyClock::time_point deadline) {
  Reach reached = reach(server, {key, kStorePurpose}, {.deadline = deadline});
  if (reached.other_secret) throw OtherSecret(reached.why);
  if (!reached.socket) throw CommError(reached.why);
  return std::move(*reached.socket);
}

// Returns the same server's contact with the address at which it has answered.
Contact again(Contact server, const Socket& connected) {
  if (const std::string address = connected.peer_address(); !address.empty()) server.addresses = {address};
  return server;
}

}  // namespace

std::string StoreMessage::encode() const {
  std::string bytes;
  put(bytes, static_cast<uint32_t>(9 + key.size() + value.size()));
  bytes.push_back(static_cast<char>(op));
  put(bytes, id);
  put(bytes, static_cast<uint32_t>(key.size()));
  return bytes + key + value;
}

std::optional<StoreMessage> StoreMessage::decode(std::string& bytes) {
  if (bytes.size() < 4) return std::nullopt;
  uint32_t rest = take(bytes, 0);
  if (rest < 9 || rest > kMaxFrameBytes) throw CommError("what arrived is not a message of the store");
  if (bytes.size() < 4 + size_t{rest}) return std::nullopt;
  StoreMessage m;
  m.op = static_cast<Op>(bytes[4]);
  m.id = take(bytes, 5);
  uint32_t key_bytes = take(bytes, 9);
  if (m.op > Op::closing || key_bytes > rest - 9) {
    throw CommError("what arrived is not a message of the store");
  }
  m.key = bytes.substr(13, key_bytes);
  m.value = bytes.substr(13 + key_bytes, rest - 9 - key_bytes);
  bytes.erase(0, 4 + size_t{rest});
  return m;
}

std::optional<StoreMessage> receive_message(Socket& socket, std::string& bytes,
                                            SteadyClock::time_point deadline) {
  while (true) {
    if (auto message = StoreMessage::decode(bytes)) return message;
    if (!wait_readable(socket.fd(), deadline)) return std::nullopt;
    char chunk[1024];
    const ssize_t n = recv(socket.fd(), chunk, sizeof chunk, 0);
    if (n > 0) {
      bytes.append(chunk, static_cast<size_t>(n));
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      socket.close();
      return std::nullopt;
    }
  }
}

std::string RollCall::encode() const {
  std::string text;
  for (const Entry& entry : ranks) text += static_cast<char>(entry.presence) + one_line(entry.state) + "\n";
  return text;
}

RollCall RollCall::decode(const std::string& text) {
  RollCall roll;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) roll.ranks.push_back({static_cast<Presence>(line[0]), line.substr(1)});
  }
  return roll;
}

std::string RollCall::absent() const {
  std::string text;
  auto list = [&](Presence presence, const char* label) {
    std::vector<size_t> these;
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (ranks[r].presence == presence) these.push_back(r);
    }
    if (these.empty()) return;
    text += fmt::format("{}{} rank{} {}", text.empty() ? "" : "; ", label, these.size() == 1 ? "" : "s",
                        fmt::join(these, ", "));
  };
  list(Presence::silent, "no answer from");
  list(Presence::gone, "gone:");
  list(Presence::left, "left before:");
  list(Presence::never_came, "never came:");
  return text;
}

// The second connection is made after the first is accepted, so that a process with a wrong secret adds only
// one line to the server's log.
StoreClient::StoreClient(const Contact& server, const std::string& key, int rank, int world,
                         SteadyClock::time_point deadline, const std::string& job)
    : world_(world),
      command_(connect_to(server, key, deadline)),
      watch_(connect_to(again(server, command_), key, deadline)) {
  std::string me = fmt::format("{} {} {}", rank, world, one_line(job));
  request({Op::hello, 0, "command", me}, deadline);
  std::string bytes = StoreMessage{Op::hello, 0, "watch", me}.encode();
  char head[4];
  std::string answer;
  if (send_all(watch_, bytes, deadline) && receive_exactly(watch_, head, 4, deadline)) {
    answer.assign(head, 4);
    uint32_t rest = take(answer, 0);
    if (rest <= kMaxFrameBytes) {
      answer.resize(4 + rest);
      if (!receive_exactly(watch_, answer.data() + 4, rest, deadline)) answer.clear();
    }
  }
  auto reply = answer.empty() ? std::nullopt : StoreMessage::decode(answer);
  if (!reply) throw CommError("the store does not answer");
  check_reply(*reply);
}

StoreClient::~StoreClient() {
  if (watcher_.joinable()) {
    wake_.set();
    watcher_.join();
  }
  // Wait until the store has recorded the departure and hangs up, so that a rank that then sees this rank's
  // connections close can find out why.
  const auto deadline = SteadyClock::now() + kPromptly;
  if (!send_on_watch({Op::bye, 0, "", ""})) return;
  shutdown(watch_.fd(), SHUT_WR);
  if (silent_) return;
  char rest[256];
  while (wait_readable(watch_.fd(), deadline)) {
    const ssize_t n = recv(watch_.fd(), rest, sizeof rest, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return;
  }
}

// One request at a time. Late replies to abandoned requests are recognized by their id and skipped.
StoreMessage StoreClient::request(StoreMessage message, SteadyClock::time_point deadline) {
  std::lock_guard lock(mutex_);
  message.id = next_id_++;
  const char* const gone = "rank 0, which runs the store, is gone";
  if (!send_all(command_, message.encode(), deadline)) throw CommError(gone);
  while (true) {
    while (auto reply = StoreMessage::decode(received_)) {
      if (reply->id != message.id) continue;
      check_reply(*reply);
      return std::move(*reply);
    }
    if (!wait_readable(command_.fd(), deadline)) {
      throw CommError("rank 0, which runs the store, does not answer");
    }
    char chunk[4096];
    ssize_t n = recv(command_.fd(), chunk, sizeof chunk, 0);
    if (n == 0) throw CommError(gone);
    if (n > 0) received_.append(chunk, static_cast<size_t>(n));
    if (n < 0 && errno != EAGAIN && errno != EINTR) throw CommError(gone);
  }
}

void StoreClient::set(const std::string& key, const std::string& value) {
  request({Op::set, 0, key, value}, SteadyClock::now() + kPromptly);
}

std::string StoreClient::get(const std::string& key, SteadyClock::time_point deadline,
                             const std::string& what) {
  auto start = SteadyClock::now();
  try {
    return request({Op::get, 0, key, ""}, deadline).value;
  } catch (const CommError& error) {
    if (SteadyClock::now() < deadline) throw CommError(fmt::format("{}: {}", what, error.what()));
    auto waited = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - start).count();
    throw CommError(fmt::format("{}: nothing after {} ms", what, waited));
  }
}

std::string StoreClient::look(const std::string& key) {
  return request({Op::look, 0, key, ""}, SteadyClock::now() + kPromptly).value;
}

int64_t StoreClient::add(const std::string& key) {
  const std::string text = request({Op::add, 0, key, ""}, SteadyClock::now() + kPromptly).value;
  if (const auto count = parse_number<int64_t>(text)) return *count;
  throw CommError(fmt::format("the store's count of {} is '{}'", key, text));
}

void StoreClient::drop(const std::string& key) {
  std::lock_guard lock(mutex_);
  send_all(command_, StoreMessage{Op::drop, 0, key, ""}.encode(), SteadyClock::now() + kPromptly);
}

void StoreClient::send_message(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (!send_all(command_, StoreMessage{Op::message, 0, "", message}.encode(),
                SteadyClock::now() + kPromptly)) {
    throw CommError("rank 0, which runs the store, is gone");
  }
}

bool StoreClient::send_on_watch(const StoreMessage& message) {
  std::lock_guard lock(sending_watch_);
  return send_all(watch_, message.encode(), SteadyClock::now() + kPromptly);
}

bool StoreClient::note(const std::string& text) {
  return send_on_watch({Op::note, 0, "", one_line(text)});
}

std::optional<std::string> StoreClient::report(const std::string& what) {
  try {
    return request({Op::fail, 0, one_line(what), ""}, SteadyClock::now() + kPromptly).value;
  } catch (const CommError&) {
    silent_ = true;
    return std::nullopt;
  }
}

RollCall StoreClient::roll_call() {
  try {
    if (!silent_) {
      const auto deadline = SteadyClock::now() + StoreServer::kRollTime + Milliseconds(500);
      RollCall roll = RollCall::decode(request({Op::roll, 0, "", ""}, deadline).value);
      if (roll.ranks.size() == static_cast<size_t>(world_)) return roll;
    }
  } catch (const CommError&) {
  }
  RollCall roll;
  roll.ranks.resize(static_cast<size_t>(world_), {RollCall::Presence::here, ""});
  roll.ranks[0].presence = RollCall::Presence::silent;
  return roll;
}

void StoreClient::watch(std::function<void(const std::string&)> on_failure,
                        std::function<std::string()> where) {
  on_failure_ = std::move(on_failure);
  where_ = std::move(where);
  watcher_ = Thread("the thread that watches the store", [this] { watch_loop(); });
}

void StoreClient::watch_loop() {
  std::string received;
  bool told = false;
  auto tell = [&](const std::string& cause) {
    if (!told) on_failure_(cause);
    told = true;
  };
  try {
    while (true) {
      pollfd entries[] = {{watch_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
      if (poll(entries, 2, -1) < 0 && errno != EINTR) return;
      if (entries[1].revents != 0) return;
      if (entries[0].revents == 0) continue;
      char chunk[4096];
      ssize_t n = recv(watch_.fd(), chunk, sizeof chunk, 0);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (n <= 0) throw CommError("rank 0 is gone: its process ended or its machine cut the connection");
      received.append(chunk, static_cast<size_t>(n));
      while (auto message = StoreMessage::decode(received)) {
        if (message->op == Op::closing) return;
        if (message->op != Op::failed) continue;
        tell(message->value);
        send_on_watch({Op::state, 0, "", one_line(where_())});
      }
    }
  } catch (const std::exception& error) {
    try {
      tell(text_of(error));
    } catch (const std::exception&) {  // no memory: this rank's calls end at their deadline
    }
  }
}

}  // namespace gradwire
