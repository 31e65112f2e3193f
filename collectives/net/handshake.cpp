#include "collectives/net/handshake.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

const std::string kGreeting = "gw-rank1";
constexpr size_t kChallenge = 32;
constexpr size_t kProof = sizeof(Digest);
constexpr const char* kHungUp = "it hung up";

std::string fresh_challenge() {
  std::string bytes(kChallenge, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error("no random numbers from the kernel");
  }
  return bytes;
}

Digest proof(const Credentials& credentials, const char* side, const std::string& connectors,
             const std::string& acceptors) {
  // Challenges have a fixed length and come last, so different inputs give different texts.
  return hmac_sha256(credentials.key,
                     std::string(side) + " " + credentials.purpose + " " + connectors + acceptors);
}

std::string text_of(const Digest& digest) {
  return {digest.begin(), digest.end()};
}

Digest digest_at(const std::string& bytes, size_t at) {
  Digest digest;
  std::memcpy(digest.data(), bytes.data() + at, digest.size());
  return digest;
}

}  // namespace

Challenge::Challenge(const Credentials& credentials) : credentials_(credentials), mine_(fresh_challenge()) {}

Challenge::State Challenge::refuse(const char* why) {
  why_ = why;
  return State::refused;
}

Challenge::State Challenge::advance(const Socket& socket) {
  while (true) {
    const size_t wanted = theirs_.empty() ? kGreeting.size() + kChallenge : kProof;
    char bytes[std::max(size_t{8} + kChallenge, kProof)];
    const ssize_t n = recv(socket.fd(), bytes, wanted - received_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return expired() ? refuse(kSaidNothing) : State::waiting;
    if (n <= 0) return refuse("hung up");
    received_.append(bytes, static_cast<size_t>(n));
    const size_t greeted = std::min(received_.size(), kGreeting.size());
    if (theirs_.empty() && received_.compare(0, greeted, kGreeting, 0, greeted) != 0) {
      return refuse("not a rank of this version");
    }
    if (received_.size() < wanted) continue;
    if (!theirs_.empty()) {
      const bool right = equal(digest_at(received_, 0), proof(credentials_, "connector", theirs_, mine_));
      return right ? State::proved : refuse("wrong secret");
    }
    theirs_ = received_.substr(kGreeting.size());
    received_.clear();
    const std::string answer = mine_ + text_of(proof(credentials_, "acceptor", theirs_, mine_));
    // The answer fits into a new connection's buffer.
    if (send(socket.fd(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT) !=
        static_cast<ssize_t>(answer.size())) {
      return refuse("hung up");
    }
  }
}

std::string RejectedConnections::note(const std::string& from, const std::string& why) {
  const std::pair who(from, why);
  const bool named = counts_.contains(who) || counts_.size() < kMostNamed;
  uint64_t& count = named ? counts_[who] : others_;
  if (!std::has_single_bit(++count)) return "";
  std::string text =
      fmt::format("rejected a connection from {}: {}", from.empty() ? "a peer that is gone" : from, why);
  if (!named) {
    text += fmt::format(" ({} so far from more addresses than are named)", count);
  } else if (count > 1) {
    text += fmt::format(" ({} so far)", count);
  }
  return text;
}

Introduction::Introduction(const Credentials& credentials)
    : credentials_(credentials), mine_(fresh_challenge()) {}

Introduction::State Introduction::refuse(const char* why) {
  why_ = why;
  return State::refused;
}

Introduction::State Introduction::advance(const Socket& socket) {
  // All bytes of the handshake fit into a new connection's buffer.
  const auto sent = [&](const std::string& bytes) {
    return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(bytes.size());
  };
  if (!greeted_) {
    greeted_ = true;
    if (!sent(kGreeting + mine_)) return refuse(kHungUp);
  }
  while (received_.size() < kChallenge + kProof) {
    char bytes[kChallenge + kProof];
    const ssize_t n = recv(socket.fd(), bytes, sizeof bytes - received_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return State::waiting;
    if (n <= 0) return refuse(kHungUp);
    received_.append(bytes, static_cast<size_t>(n));
  }
  const std::string theirs = received_.substr(0, kChallenge);
  const bool right = equal(digest_at(received_, kChallenge), proof(credentials_, "acceptor", mine_, theirs));
  // Send the proof even if the acceptor's proof is wrong, so that the acceptor can distinguish a wrong secret
  // from a lost connection.
  const bool answered = sent(text_of(proof(credentials_, "connector", mine_, theirs)));
  if (!right) return refuse(kOtherSecret);
  return answered ? State::proved : refuse(kHungUp);
}

}  // namespace gradwire
