// Blocking use of sockets.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <string>

#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"

namespace gradwire::testing {

// Makes one attempt to connect. Returns nullopt, with the reason in `why`, on failure.
inline std::optional<Socket> try_connect(const Endpoint& endpoint, SteadyClock::time_point deadline,
                                         std::string& why) {
  for (const Address& address : resolve(endpoint, why)) {
    auto socket = begin_connect(address, why);
    if (!socket) continue;
    const int error = wait_writable(socket->fd(), deadline) ? connect_error(*socket) : ETIMEDOUT;
    if (error == 0) {
      prepare_for_messages(*socket);
      return socket;
    }
    why = error == ETIMEDOUT ? "no answer" : std::strerror(error);
  }
  return std::nullopt;
}

// Returns false if the peer is gone or the deadline has passed.
inline bool receive_exactly(const Socket& socket, char* data, size_t bytes,
                            SteadyClock::time_point deadline) {
  for (size_t got = 0; got < bytes;) {
    ssize_t n = ::recv(socket.fd(), data + got, bytes - got, 0);
    if (n > 0) {
      got += static_cast<size_t>(n);
    } else if (n == 0) {
      return false;
    } else if (errno == EAGAIN) {
      if (!wait_readable(socket.fd(), deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// Performs the connector's side of the handshake. Returns "", or the reason of the failure.
inline std::string introduce(const Socket& socket, const Credentials& credentials,
                             SteadyClock::time_point deadline) {
  Handshake introduction(credentials, Handshake::Side::connector);
  while (true) {
    const auto state = introduction.advance(socket);
    if (state == Handshake::State::proved) return "";
    if (state == Handshake::State::refused) return introduction.why();
    if (!wait_readable(socket.fd(), deadline)) return "no answer";
  }
}

}  // namespace gradwire::testing
