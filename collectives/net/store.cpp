#include "collectives/net/store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <set>
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

void check_reply(const Frame& reply) {
  if (reply.op == Op::ok) return;
  if (reply.op == Op::again) throw CommError(reply.value);
  throw StoreRefused(reply.value);
}

// Returns a connection authenticated with `key`.
Socket connect_to(const Contact& server, const std::string& key, SteadyClock::time_point deadline) {
  Reach reached = reach(server, {key, kStorePurpose}, deadline);
  if (reached.other_secret) throw OtherSecret(reached.why);
  if (!reached.socket) throw CommError(reached.why);
  return std::move(*reached.socket);
}

}  // namespace

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string StoreHello::encode() const {
  return Message().add("rank", rank).add("world", world).add("job", job).encode();
}

StoreHello StoreHello::decode(const std::string& text) {
  const Message message = Message::decode(text);
  constexpr int kMin = std::numeric_limits<int>::min();  // the server validates rank and world
  return {message.number("rank", kMin), message.number("world", kMin), message.text("job")};
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

std::string RollCall::activities(int rank, int waited_for) const {
  std::string text = absent();
  if (!text.empty()) text = "; " + text;
  const int world = static_cast<int>(ranks.size());
  std::set<int> listed = {rank};
  const auto list = [&](int r) {
    const auto& [presence, state] = ranks[static_cast<size_t>(r)];
    if (presence != Presence::here || state.empty() || !listed.insert(r).second) return false;
    text += fmt::format("; rank {} is {}", r, state);
    return true;
  };
  for (int r = waited_for; r >= 0 && r < world && listed.size() < 6 && list(r);) {
    const std::string& state = ranks[static_cast<size_t>(r)].state;
    const size_t at = state.rfind(kWaiting);
    if (at == std::string::npos) break;
    r = parse_number<int>(state.substr(at + kWaiting.size())).value_or(-1);
  }
  for (int r = 0; r < world && listed.size() < 5; ++r) list(r);
  return text;
}

// Makes the second connection only after the server has accepted the first connection, so that a process with
// a wrong secret adds only one line to the server's log.
StoreClient::StoreClient(const Contact& server, const std::string& key, int rank, int world,
                         SteadyClock::time_point deadline, const std::string& job)
    : world_(world), command_(connect_to(server, key, deadline)) {
  Contact same = server;
  if (const std::string address = peer_address(); !address.empty()) same.addresses = {address};
  watch_ = connect_to(same, key, deadline);
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

int64_t StoreClient::add(const std::string& key) {
  const std::string text = request({Op::add, 0, key, ""}, SteadyClock::now() + kPromptly).value;
  if (const auto count = parse_number<int64_t>(text)) return *count;
  throw CommError("the store's count of {} is '{}'", key, text);
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

void write_private_file(const std::string& path, const std::string& text) {
  OutputFile(path, OutputFile::Kind::private_file).write(text);
}

}  // namespace gradwire
