// Tests each side of the handshake (collectives/net/handshake.h) against a faulty other end. An input
// describes how the bytes in transit are cut into pieces, which bits are flipped, and which bytes follow. The
// other end knows the secret, so that every rejection is due to these changes.
#include "collectives/net/handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <stdexcept>
#include <thread>

#include "runtime/util/error.h"
#include "tests/fuzz/targets.h"
#include "tests/support/sockets.h"

namespace gradwire::fuzz {
namespace {

constexpr size_t kGreeting = 8, kChallenge = 32, kProof = 32;
const Credentials kCredentials{"the run's secret", kStorePurpose};

struct Ends {
  Socket here, there;
  Ends() {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
      throw Error("no sockets");
    here = Socket(fds[0]);
    there = Socket(fds[1]);
  }
};

void check(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// Returns the proof that the protocol prescribes for the other end.
std::string proof(const char* side, const std::string& connectors, const std::string& acceptors) {
  const Digest digest = hmac_sha256(
      kCredentials.key, std::string(side) + " " + kCredentials.purpose + " " + connectors + acceptors);
  return {digest.begin(), digest.end()};
}

// Flips the bits of `text` that are set in `mask` from `at` on. Returns whether any bit was flipped.
bool flip(std::string& text, Input mask, size_t at) {
  bool any = false;
  for (size_t i = 0; i < text.size() && at + i < mask.size(); ++i) {
    text[i] = static_cast<char>(text[i] ^ static_cast<char>(mask[at + i]));
    any |= mask[at + i] != 0;
  }
  return any;
}

std::string what_is_there(const Socket& socket) {
  std::string all;
  char bytes[512];
  for (ssize_t n; (n = recv(socket.fd(), bytes, sizeof bytes, MSG_DONTWAIT)) > 0;)
    all.append(bytes, static_cast<size_t>(n));
  return all;
}

// Sends `text` in pieces, and advances the acceptor after each piece.
Handshake::State say(const Ends& ends, Handshake& challenge, const std::string& text, size_t piece) {
  auto state = Handshake::State::waiting;
  for (size_t at = 0; at < text.size() && state == Handshake::State::waiting; at += piece) {
    const std::string part = text.substr(at, piece);
    if (send(ends.there.fd(), part.data(), part.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(part.size()))
      break;
    state = challenge.advance(ends.here);
  }
  return state;
}

}  // namespace

// Tests the acceptor. Input: bytes per piece, then the mask of the connector's greeting, challenge and proof,
// then the bytes that follow.
void handshake_in(Input input) {
  if (input.empty()) return;
  const size_t piece = 1 + input[0];
  const Input mask = input.subspan(1);
  const Ends ends;
  Handshake challenge(kCredentials, Handshake::Side::acceptor);
  const std::string connectors(kChallenge, 'c');
  std::string words = "gw-rank1" + connectors;
  bool wrong = flip(words, mask, 0);
  const bool greeted = words.starts_with("gw-rank1");
  auto state = say(ends, challenge, words, piece);
  check(state == (greeted ? Handshake::State::waiting : Handshake::State::refused), "the greeting");
  const std::string answer = what_is_there(ends.there);
  if (!greeted) return check(answer.empty() && !challenge.why().empty(), "an answer before a valid greeting");
  check(answer.size() == kChallenge + kProof, "the answer's size");
  const std::string acceptors = answer.substr(0, kChallenge), heard = words.substr(kGreeting);
  check(answer.substr(kChallenge) == proof("acceptor", heard, acceptors), "the acceptor's proof");
  words = proof("connector", connectors, acceptors);
  wrong |= flip(words, mask, kGreeting + kChallenge);
  std::string rest;
  for (size_t i = kGreeting + kChallenge + kProof; i < mask.size(); ++i) rest += static_cast<char>(mask[i]);
  state = say(ends, challenge, words + rest, piece < kProof ? piece : words.size() + rest.size());
  check(state == (wrong ? Handshake::State::refused : Handshake::State::proved), "the connector's proof");
  if (piece >= kProof) check(what_is_there(ends.here) == rest, "bytes after the handshake were read");
}

std::vector<Bytes> handshake_in_seeds() {
  Bytes sound(1 + kGreeting + kChallenge + kProof + 20), late = sound, early = sound;
  sound[0] = 255;
  early[3] = 1;
  late[60] = 128;
  return {sound, early, late, {0}};
}

// Tests the connector. Input: 0 and the mask of the acceptor's answer; or another byte and the answer itself.
void handshake_out(Input input) {
  if (input.empty()) return;
  const Input rest = input.subspan(1);
  Ends ends;
  const auto deadline = SteadyClock::now() + std::chrono::seconds(10);
  std::string answer(reinterpret_cast<const char*>(rest.data()), rest.size());
  if (input[0] != 0) {
    // The answer is written before the challenge is known, so the answer proves nothing.
    send(ends.there.fd(), answer.data(), answer.size(), MSG_NOSIGNAL);
    shutdown(ends.there.fd(), SHUT_WR);
    return check(!testing::introduce(ends.here, kCredentials, deadline).empty(),
                 "a proof made without the challenge");
  }
  std::string why;
  std::thread connector([&] { why = testing::introduce(ends.here, kCredentials, deadline); });
  std::string greeting(kGreeting + kChallenge, '\0'), proved(kProof, '\0');
  bool heard = testing::receive_exactly(ends.there, greeting.data(), greeting.size(), deadline);
  const std::string connectors = greeting.substr(kGreeting), acceptors(kChallenge, 'a');
  answer = acceptors + proof("acceptor", connectors, acceptors);
  const bool wrong = flip(answer, rest, 0);
  heard = heard && send_all(ends.there, answer, deadline) &&
          testing::receive_exactly(ends.there, proved.data(), proved.size(), deadline);
  connector.join();
  check(heard && greeting.starts_with("gw-rank1"), "the connector hung up");
  check(why.empty() == !wrong, "the acceptor's proof");
  if (!wrong) check(proved == proof("connector", connectors, acceptors), "the connector's proof");
}

std::vector<Bytes> handshake_out_seeds() {
  Bytes sound(1 + kChallenge + kProof), flipped = sound, blind(1 + kChallenge + kProof, 1);
  flipped[40] = 1;
  return {sound, flipped, blind, {1}};
}

}  // namespace gradwire::fuzz
