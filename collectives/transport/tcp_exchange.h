// An exchange between processes while it is under way, and how to say what it waits for. Internal to the transport.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collectives/transport/tcp_links.h"
#include "collectives/transport/tcp_messages.h"
#include "collectives/transport/transport.h"

namespace gradwire::tcp_messages {

// A message on its way. Its tag tells headers from payload.
using Posted = TcpLinks::Message;

// An exchange on its way. The links know where its messages are, so it stays where it is.
struct InFlight {
  std::string here;  // "call 17, allreduce of ..., round 3 of 6"
  std::map<int, Header> expected, sent, arrived;
  CallHeader mine, previous;
  std::vector<Posted> posted;
  uint64_t bytes = 0;  // of payload that leaves
};

inline bool is_header(const Posted& p) {
  return p.tag == kHeaderSlot || p.tag == kCallSlot;
}

// "waiting to receive 4096 bytes from rank 0 (3 receives and 2 sends pending, with ranks 0, 2)"
inline std::string pending_text(const std::vector<Posted>& posted, const Posted* at) {
  std::string text;
  if (at == nullptr) {
    if (posted.empty()) return "before the first transfer";
    const Posted& last = posted.back();
    text = std::string("starting to ") + (last.sent ? "send to rank " : "receive from rank ") +
           std::to_string(last.peer);
  } else {
    bool send = at->sent;
    text = std::string("waiting to ") + (send ? "send " : "receive ") +
           (is_header(*at) ? "" : std::to_string(at->bytes) + " bytes ") + (send ? "to" : "from") + " rank " +
           std::to_string(at->peer);
    if (at->tag == kCallSlot && !send) text = "waiting for rank " + std::to_string(at->peer) + " to begin it";
  }
  int receives = 0, sends = 0;
  std::set<int> peers;
  for (const Posted& p : posted) {
    if (p.done) continue;
    ++(p.sent ? sends : receives);
    peers.insert(p.peer);
  }
  std::string list;
  for (int peer : peers) list += (list.empty() ? "" : ", ") + std::to_string(peer);
  return text + " (" + std::to_string(receives) + " receives and " + std::to_string(sends) +
         " sends pending, with ranks " + list + ")";
}

}  // namespace gradwire::tcp_messages
