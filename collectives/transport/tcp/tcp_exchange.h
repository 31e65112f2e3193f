// An exchange in flight between processes, and a description of its pending messages. Internal to the
// transport.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collectives/transport/tcp/tcp_links.h"
#include "collectives/transport/tcp/tcp_messages.h"
#include "collectives/transport/transport.h"

namespace gradwire::tcp_messages {

// A message in flight. Its tag distinguishes headers from payload.
using Posted = TcpLinks::Message;

// An exchange in flight. Must not move: the links hold pointers to its messages.
struct InFlight {
  std::string here;  // "call 17, allreduce of ..., round 3 of 6"
  std::map<int, Header> expected, sent, arrived;
  CallHeader mine, previous;
  std::vector<Posted> posted;
  uint64_t bytes = 0;  // payload sent
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
    text = fmt::format("starting to {} rank {}", last.sent ? "send to" : "receive from", last.peer);
  } else if (at->tag == kCallSlot && !at->sent) {
    text = fmt::format("waiting for rank {} to begin it", at->peer);
  } else {
    text = fmt::format("waiting to {} {}{} rank {}", at->sent ? "send" : "receive",
                       is_header(*at) ? "" : fmt::format("{} bytes ", at->bytes), at->sent ? "to" : "from",
                       at->peer);
  }
  int receives = 0, sends = 0;
  std::set<int> peers;
  for (const Posted& p : posted) {
    if (p.done) continue;
    ++(p.sent ? sends : receives);
    peers.insert(p.peer);
  }
  return fmt::format("{} ({} receives and {} sends pending, with ranks {})", text, receives, sends,
                     fmt::join(peers, ", "));
}

}  // namespace gradwire::tcp_messages
