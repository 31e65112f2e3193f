// An exchange over Gloo while it is under way, and how to say what it waits for. Internal to the transport.
#pragma once

#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collectives/transport/gloo_messages.h"
#include "collectives/transport/transport.h"

namespace gradwire::gloo_messages {

// A message on its way.
struct Posted {
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
  Transfer::Kind kind = Transfer::Kind::send;
  int peer = 0;
  size_t bytes = 0;
  uint64_t slot = 0;  // tells headers from payload
  bool done = false;
};

// An exchange on its way. The buffers refer to the headers, so it stays where it is.
struct InFlight {
  std::string here;  // "call 17, allreduce of ..., round 3 of 6"
  std::map<int, Header> expected, sent, arrived;
  CallHeader mine, previous;
  std::vector<Posted> posted;
  uint64_t bytes = 0;  // of payload that leaves
};

inline bool is_header(const Posted& p) {
  return p.slot == kHeaderSlot || p.slot == kCallSlot;
}

// "waiting to receive 4096 bytes from rank 0 (3 receives and 2 sends pending, with ranks 0, 2)"
inline std::string pending_text(const std::vector<Posted>& posted, const Posted* at) {
  std::string text;
  if (at == nullptr) {
    if (posted.empty()) return "before the first transfer";
    const Posted& last = posted.back();
    text = std::string("starting to ") +
           (last.kind == Transfer::Kind::send ? "send to rank " : "receive from rank ") +
           std::to_string(last.peer);
  } else {
    bool send = at->kind == Transfer::Kind::send;
    text = std::string("waiting to ") + (send ? "send " : "receive ") +
           (is_header(*at) ? "" : std::to_string(at->bytes) + " bytes ") + (send ? "to" : "from") + " rank " +
           std::to_string(at->peer);
    if (at->slot == kCallSlot && !send)
      text = "waiting for rank " + std::to_string(at->peer) + " to begin it";
  }
  int receives = 0, sends = 0;
  std::set<int> peers;
  for (const Posted& p : posted) {
    if (p.done) continue;
    ++(p.kind == Transfer::Kind::send ? sends : receives);
    peers.insert(p.peer);
  }
  std::string list;
  for (int peer : peers) list += (list.empty() ? "" : ", ") + std::to_string(peer);
  return text + " (" + std::to_string(receives) + " receives and " + std::to_string(sends) +
         " sends pending, with ranks " + list + ")";
}

// Gloo's texts begin with a place in its source: "[./gloo/pair.cc:598] ...".
inline std::string without_location(const std::string& text) {
  size_t end = text.find("] ");
  return text.starts_with("[") && end != std::string::npos ? text.substr(end + 2) : text;
}

// Gloo writes to sockets without MSG_NOSIGNAL; a peer that is gone must be an error, not the end of this
// process.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (!was_pending_) {
      timespec now = {};
      while (sigtimedwait(&pipe_, nullptr, &now) == SIGPIPE) {
      }
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

}  // namespace gradwire::gloo_messages
