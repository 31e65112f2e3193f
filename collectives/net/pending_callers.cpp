#include "collectives/net/pending_callers.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "runtime/util/error.h"

namespace gradwire {

void PendingCallers::add_entries(std::vector<pollfd>& entries) {
  entry_ = entries.size();
  entries.push_back({acceptor_.fd(), POLLIN, 0});
  for (const Pending& caller : pending_) entries.push_back({caller.socket.fd(), POLLIN, 0});
}

std::vector<PendingCallers::Caller> PendingCallers::advance(const std::vector<pollfd>& entries,
                                                            size_t ranks) {
  std::vector<Caller> ready;
  for (Pending& caller : pending_) {
    try {
      if (auto first = read_first(caller)) {
        ready.push_back({std::move(caller.socket), std::move(caller.address), std::move(*first)});
      }
    } catch (const CommError&) {
      caller.socket.close();  // the caller is not a rank
    }
  }
  std::erase_if(pending_, [](const Pending& caller) { return !caller.socket; });
  if (entries[entry_].revents == 0) return ready;
  for (size_t i = 0; i < kMaxUnauthenticated; ++i) {
    auto socket = acceptor_.accept();
    if (!socket) break;
    if (pending_.size() >= kMaxUnauthenticated + 2 * ranks) {
      log_rejected(pending_.front().address, kTooMany);
      pending_.erase(pending_.begin());
    }
    std::string address = socket->peer_address();
    pending_.push_back({std::move(*socket), std::move(address), std::make_unique<Challenge>(credentials_)});
  }
  return ready;
}

// Reads available bytes and returns the caller's first frame once it is complete. Closes the socket of a
// caller that is rejected or hangs up.
std::optional<Frame> PendingCallers::read_first(Pending& caller) {
  const auto reject = [&](const std::string& why) {
    log_rejected(caller.address, why);
    caller.socket.close();
    return std::nullopt;
  };
  if (caller.challenge) {
    const Challenge::State state = caller.challenge->advance(caller.socket);
    if (state == Challenge::State::refused) return reject(caller.challenge->why());
    if (state == Challenge::State::waiting) return std::nullopt;
    caller.challenge = nullptr;
  }
  while (true) {
    if (auto frame = Frame::decode(caller.received)) return frame;
    char bytes[256];
    const size_t wanted = std::min(sizeof bytes, Frame::missing(caller.received));
    const ssize_t n = recv(caller.socket.fd(), bytes, wanted, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      caller.socket.close();
      return std::nullopt;
    }
    caller.received.append(bytes, static_cast<size_t>(n));
  }
  if (SteadyClock::now() >= caller.until) return reject(kSaidNothing);
  return std::nullopt;
}

void PendingCallers::log_rejected(const std::string& address, const std::string& why) {
  if (std::string line = rejected_.note(address, why); !line.empty()) log_.push_back(std::move(line));
}

void PendingCallers::reject_all(const std::string& why) {
  for (const Pending& caller : pending_) log_rejected(caller.address, why);
}

std::vector<std::string> PendingCallers::take_log() {
  return std::exchange(log_, {});
}

}  // namespace gradwire
