// The handshake by which both ends of a new connection prove that they know the run's secret. Neither end
// reads other data before the handshake.
//
//   connector -> acceptor   greeting (8 bytes), connector's challenge (32 bytes)
//   acceptor -> connector   acceptor's challenge (32 bytes), proof (32 bytes)
//   connector -> acceptor   proof (32 bytes)
//
// A proof is HMAC-SHA256(key, side | purpose | both challenges). Challenges are fresh random numbers, so
// proofs cannot be replayed on another connection. The side prevents reflecting a proof to its sender. The
// purpose prevents relaying one listener's connections to another listener. A relay in front of the same
// listener is not detected. Later bytes on the connection are neither encrypted nor authenticated.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "collectives/net/socket.h"

namespace gradwire {

// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). Implemented here instead of taken from a library: a
// program that links another version of the library could replace the library's functions (see
// tests/capi/capture_test.py).

using Digest = std::array<uint8_t, 32>;
Digest sha256(std::string text);
Digest hmac_sha256(std::string key, const std::string& message);

// Limits on unauthenticated connections: how long a connection is kept, and how many connections (beyond one
// per rank) are kept before the oldest connection is dropped.
inline constexpr std::chrono::seconds kHandshakeTime{5};
inline constexpr size_t kMaxUnauthenticated = 64;

inline constexpr const char* kStorePurpose = "store";

struct Credentials {
  std::string key;      // if the key is empty, any process can make a proof
  std::string purpose;  // the listener's purpose, the same on both sides
};

// Handshake::why() of a connector if the acceptor has another key.
inline constexpr const char* kOtherSecret = "the process there has another secret";
// Reasons to drop a connection whose bytes were all valid.
inline constexpr const char* kTooMany = "too many connections at once";
inline constexpr const char* kSaidNothing = "nothing said in time";

// One end of the handshake, for a polled socket.
class Handshake {
 public:
  enum class Side { connector, acceptor };
  enum class State { waiting, proved, refused };

  // `credentials` must outlive the object.
  Handshake(const Credentials& credentials, Side side);
  // Processes the bytes that have arrived, and answers. Reads no byte after the handshake: after `proved`,
  // the connection's next byte is the first byte of the peer's data. An acceptor refuses after
  // kHandshakeTime.
  State advance(const Socket& socket);
  // Returns the reason of the state `refused`. Of an acceptor: "wrong secret", "not a rank of this version",
  // "hung up" or kSaidNothing.
  const std::string& why() const { return why_; }

 private:
  const Credentials& credentials_;
  const Side side_;
  const SteadyClock::time_point until_ = SteadyClock::now() + kHandshakeTime;
  const std::string mine_;  // this end's challenge
  std::string theirs_, received_, why_;
  bool greeted_ = false;
};

// Counts a listener's rejected connections and decides which rejections to log: for each address and reason,
// the first rejection and every doubling of the count. Beyond kMaxNamed pairs of address and reason, the
// other rejections share one count, so that neither the table nor the log grows with a flood.
class RejectedConnections {
 public:
  static constexpr size_t kMaxNamed = 64;
  // Adds a rejected connection. Returns the line to log, "rejected a connection from 10.0.0.7: wrong secret
  // (8 so far)", or "". `from`: the peer's address; empty if the peer is gone.
  std::string note(const std::string& from, const std::string& why);

 private:
  std::map<std::pair<std::string, std::string>, uint64_t>
      counts_;  // number of rejections, by address and reason
  uint64_t others_ = 0;
};

// A run's secret: a process that knows it may join. docs/running.md is the user's guide.

// Returns the secret of a text, without a byte order mark and without blanks and line ends at its end, so
// that a file and a variable of the same text give the same secret. Throws BadInput, with `source`, if
// nothing is left, or if the text has a NUL byte or more than 4096 bytes.
std::string checked_secret(const std::string& source, std::string text);

// Returns the checked secret of GRADWIRE_SECRET or GRADWIRE_SECRET_FILE; "" if neither variable is set.
// Throws BadInput for an invalid secret, and for a file that is unreadable or readable by other users.
std::string secret_from_environment();

// Returns 32 unpredictable characters for use as a secret.
std::string random_secret();

}  // namespace gradwire
