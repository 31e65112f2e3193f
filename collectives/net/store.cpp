#include "collectives/net/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <limits>
#include <sstream>
#include <utility>

#include "collectives/net/handshake.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

using Op = Frame::Op;

// Time limit for requests that the server answers at once. The limit is well below 5 s, within which every
// rank must report an error.
constexpr std::chrono::milliseconds kPromptly{2000};

constexpr const char* kGone = "rank 0, which runs the store, is gone";

void check_reply(const Frame& reply) {
  if (reply.op == Op::ok) return;
  if (reply.op == Op::again) throw CommError(reply.value);
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

// Returns the contact of the same server with only the address at which the server has answered.
Contact again(Contact server, const Socket& connected) {
  if (const std::string address = connected.peer_address(); !address.empty()) server.addresses = {address};
  return server;
}

}  // namespace

std::string StoreHello::encode() const {
  return Message().add("rank", rank).add("world", world).add("job", job).encode();
}

StoreHello StoreHello::decode(const std::string& text) {
  const Message message = Message::decode(text);
  constexpr int kLeast = std::numeric_limits<int>::min();  // the server validates rank and world
  return {message.number("rank", kLeast), message.number("world", kLeast), message.text("job")};
}

std::string RollCall::encode() const {
  Message message;
  for (const Entry& entry : ranks)
    message.add(std::string(1, static_cast<char>(entry.presence)), one_line(entry.state));
  return message.encode();
}

RollCall RollCall::decode(const std::string& text) {
  constexpr std::string_view kPresences = "hsgln";
  const Message message = Message::decode(text);
  RollCall roll;
  for (const auto& [presence, state] : message.fields()) {
    if (presence.size() != 1 || kPresences.find(presence[0]) == kPresences.npos) {
      throw CommError("a roll call has an unknown kind of presence");
    }
    roll.ranks.push_back({static_cast<Presence>(presence[0]), state});
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

// Makes the second connection only after the server has accepted the first connection, so that a process with
// a wrong secret adds only one line to the server's log.
StoreClient::StoreClient(const Contact& server, const std::string& key, int rank, int world,
                         SteadyClock::time_point deadline, const std::string& job)
    : world_(world),
      command_(connect_to(server, key, deadline)),
      watch_(connect_to(again(server, command_), key, deadline)) {
  const std::string me = StoreHello{rank, world, one_line(job)}.encode();
  request({Op::hello, 0, "command", me}, deadline);
  std::optional<Frame> reply;
  if (send_frame(watch_, {Op::hello, 0, "watch", me}, deadline)) {
    reply = receive_frame(watch_, watch_received_, deadline);
  }
  if (!reply) throw CommError("the store does not answer");
  check_reply(*reply);
}

StoreClient::~StoreClient() {
  if (watcher_.joinable()) {
    wake_.set();
    watcher_.join();
  }
  // Wait until the store has recorded the departure and hangs up. Other ranks that then see this rank's
  // connections close can ask the store for the reason.
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

// Sends a request and returns the reply, one request at a time. Skips late replies to abandoned requests,
// which it recognizes by their ids.
Frame StoreClient::request(Frame frame, SteadyClock::time_point deadline) {
  std::lock_guard lock(mutex_);
  frame.id = next_id_++;
  if (!send_frame(command_, frame, deadline)) throw CommError(kGone);
  while (auto reply = receive_frame(command_, received_, deadline)) {
    if (reply->id != frame.id) continue;
    check_reply(*reply);
    return std::move(*reply);
  }
  throw CommError(command_ ? "rank 0, which runs the store, does not answer" : kGone);
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
    if (SteadyClock::now() < deadline) throw CommError("{}: {}", what, error.what());
    auto waited = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - start).count();
    throw CommError("{}: nothing after {} ms", what, waited);
  }
}

std::string StoreClient::look(const std::string& key) {
  return request({Op::look, 0, key, ""}, SteadyClock::now() + kPromptly).value;
}

int64_t StoreClient::add(const std::string& key) {
  const std::string text = request({Op::add, 0, key, ""}, SteadyClock::now() + kPromptly).value;
  if (const auto count = parse_number<int64_t>(text)) return *count;
  throw CommError("the store's count of {} is '{}'", key, text);
}

void StoreClient::drop(const std::string& key) {
  std::lock_guard lock(mutex_);
  send_frame(command_, {Op::drop, 0, key, ""}, SteadyClock::now() + kPromptly);
}

void StoreClient::send_message(const std::string& message) {
  std::lock_guard lock(mutex_);
  if (!send_frame(command_, {Op::message, 0, "", message}, SteadyClock::now() + kPromptly)) {
    throw CommError(kGone);
  }
}

bool StoreClient::send_on_watch(const Frame& frame) {
  std::lock_guard lock(sending_watch_);
  return send_frame(watch_, frame, SteadyClock::now() + kPromptly);
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
      const auto deadline = SteadyClock::now() + kRollTime + Milliseconds(500);
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
  watcher_ = Thread("the thread that watches the store", [this] {
    bool failed = false;
    const auto fail = [&](const std::string& cause) {
      if (!failed) on_failure_(cause);
      failed = true;
    };
    try {
      watch_until_closed(fail);
    } catch (const std::exception& error) {
      try {
        fail(text_of(error));
      } catch (const std::exception&) {  // no memory: this rank's calls end at their deadlines
      }
    }
  });
}

void StoreClient::watch_until_closed(const std::function<void(const std::string&)>& fail) {
  while (true) {
    while (auto frame = Frame::decode(watch_received_)) {
      if (frame->op == Op::closing) return;
      if (frame->op != Op::failed) continue;
      fail(frame->value);
      send_on_watch({Op::state, 0, "", one_line(where_())});
    }
    pollfd entries[] = {{watch_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
    if (poll(entries, 2, -1) < 0 && errno != EINTR) return;
    if (entries[1].revents != 0) return;
    if (entries[0].revents == 0) continue;
    char chunk[4096];
    const ssize_t n = recv(watch_.fd(), chunk, sizeof chunk, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) throw CommError("rank 0 is gone: its process ended or its machine cut the connection");
    watch_received_.append(chunk, static_cast<size_t>(n));
  }
}

namespace {

constexpr const char* kFileMagic = "gradwire-rendezvous-1";
constexpr char kHostMark = '@';

// Returns the content of the rendezvous file; "" until the file is readable.
std::string read_rendezvous_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  if (!S_ISREG(status.st_mode)) {
    throw BadInput("rendezvous file://{0}: {0} is {1}; name a regular file, or a new one", path,
                   kind_of_file(status.st_mode));
  }
  try {
    return read_regular_file(path);
  } catch (const BadInput&) {  // the file was removed or replaced concurrently
    return "";
  }
}

}  // namespace

// Returns the text to publish: the magic word on the first line. The second line contains the secret, the
// port, the addresses, and, after a mark, the host's id.
std::string StoreLocation::text() const {
  std::string text =
      fmt::format("{}\n{} {} {}", kFileMagic, secret, store.port, fmt::join(store.addresses, " "));
  if (!store.host.empty()) text += fmt::format(" {}{}", kHostMark, store.host);
  return text + "\n";
}

StoreLocation StoreLocation::parse(const std::string& text) {
  std::istringstream words(text);
  std::string magic, port;
  StoreLocation location;
  const bool complete = text.ends_with('\n');  // a file system without rename shows the text as it grows
  if (!complete || !(words >> magic >> location.secret >> port) || magic != kFileMagic) return {};
  const auto number = parse_number(port, 1, 65535);
  if (!number) return {};
  location.store.port = *number;
  for (std::string word; words >> word;) {
    if (word[0] == kHostMark) {
      location.store.host = word.substr(1);
    } else {
      location.store.addresses.push_back(word);
    }
  }
  return location;
}

bool is_store_location(const std::string& text) {
  return !StoreLocation::parse(text).store.addresses.empty();
}

RendezvousCallbacks file_callbacks(const std::string& path) {
  return {.publish = [path](const std::string& text) { write_private_file(path, text); },
          .read = [path] { return read_rendezvous_file(path); }};
}

void remove_rendezvous_file(const std::string& path, const std::string& secret,
                            const std::string& key) noexcept try {
  if (secret + StoreLocation::parse(read_rendezvous_file(path)).secret == key) remove_output(path);
} catch (const std::exception&) {
}

std::string path_of_rendezvous(const std::string& rendezvous) {
  const std::string path = rendezvous.substr(std::string("file://").size());
  if (path.starts_with("/")) return path;
  throw BadInput(
      "rendezvous '{}': '{}' is not an absolute path, which file:// needs; give file:///path, "
      "here file://{}",
      rendezvous, path, std::filesystem::absolute(path).string());
}

Endpoint endpoint_of_rendezvous(const std::string& rendezvous) {
  const auto bad = [&](const std::string& why) {
    return BadInput(
        fmt::format("rendezvous '{}': {}; give tcp://host:port or file:///path", rendezvous, why));
  };
  const std::string rest = rendezvous.substr(std::string("tcp://").size());
  const size_t colon = rest.rfind(':');
  if (colon == std::string::npos || colon == 0) throw bad("no host and port");
  const auto port = parse_number(rest.substr(colon + 1), 1, 65535);
  if (!port) throw bad(fmt::format("'{}' is not a port", rest.substr(colon + 1)));
  std::string host = rest.substr(0, colon);
  if (host.starts_with("[") && host.ends_with("]")) host = host.substr(1, host.size() - 2);
  return {host, *port};
}

void write_private_file(const std::string& path, const std::string& text) {
  OutputFile(path, OutputFile::Kind::private_file).write(text);
}

}  // namespace gradwire
