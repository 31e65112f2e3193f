// The handshake by which both ends of a new connection prove that they know the run's secret, before either
// reads anything else.
//
//   connector -> acceptor   greeting (8), its challenge (32)
//   acceptor -> connector   its challenge (32), proof (32)
//   connector -> acceptor   proof (32)
//
// A proof is HMAC-SHA256(key, side | purpose | both challenges). Challenges are fresh random numbers, so
// proofs cannot be replayed on another connection. The side prevents reflecting a proof to its sender. The
// purpose prevents relaying one listener's connections to another listener. A relay in front of the same
// listener is not detected. Later bytes on the connection are neither encrypted nor authenticated.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "collectives/net/sha256.h"
#include "collectives/net/socket.h"

namespace gradwire {

// Limits on unauthenticated connections: how long they are kept, and how many (beyond one per rank) before
// the oldest is dropped.
inline constexpr std::chrono::seconds kHandshakeTime{5};
inline constexpr size_t kMaxUnauthenticated = 64;

inline constexpr const char* kStorePurpose = "store";

struct Credentials {
  std::string key;      // may be empty: then any process can make a proof
  std::string purpose;  // the same on both sides: the listener's purpose
};

// The acceptor's side, for connections served by one thread; processes the bytes that have arrived.
class Challenge {
 public:
  explicit Challenge(const Credentials& credentials);

  enum class State { waiting, proved, refused };
  // Reads available bytes, at most those of the handshake, and answers. After `proved` the connection's next
  // byte is the peer's first.
  State advance(const Socket& socket);
  // After `refused`: "wrong secret", "not a rank of this version", "hung up".
  const std::string& why() const { return why_; }
  bool expired() const { return SteadyClock::now() >= until_; }

 private:
  State refuse(const char* why);

  const Credentials& credentials_;
  const SteadyClock::time_point until_ = SteadyClock::now() + kHandshakeTime;
  std::string received_, mine_, theirs_;
  std::string why_;
};

// Counts a listener's rejected connections and decides which to log: for each address and reason, the first
// and every doubling of their number. Beyond kMostNamed of them, the rest is counted together, so that
// neither the record nor the log grows with a flood.
class RejectedConnections {
 public:
  static constexpr size_t kMostNamed = 64;
  // Returns "rejected a connection from 10.0.0.7: wrong secret (8 so far)", or "". `from`: an address;
  // empty: the peer is gone.
  std::string note(const std::string& from, const std::string& why);

 private:
  std::map<std::pair<std::string, std::string>, uint64_t> counts_;  // by address and reason
  uint64_t others_ = 0;
};

// Reasons to drop a connection that sent nothing invalid.
inline constexpr const char* kTooMany = "too many connections at once";
inline constexpr const char* kSaidNothing = "nothing said in time";

// introduce()'s text for an acceptor with another key.
inline constexpr const char* kOtherSecret = "the process there has another secret";

// The connector's side for a polled socket: processes the bytes that have arrived.
class Introduction {
 public:
  explicit Introduction(const Credentials& credentials);

  enum class State { waiting, proved, refused };
  // Sends pending bytes, and reads at most the bytes that the handshake needs.
  State advance(const Socket& socket);
  // After `refused`: the reason.
  const std::string& why() const { return why_; }

 private:
  State refuse(const char* why);

  const Credentials& credentials_;
  const std::string mine_;
  std::string received_, why_;
  bool greeted_ = false;
};
// Performs the same handshake, blocking. Returns nothing on success, or the reason of the failure.
std::string introduce(const Socket& socket, const Credentials& credentials, SteadyClock::time_point deadline);

}  // namespace gradwire
