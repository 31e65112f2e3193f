#include "collectives/transport/tcp/tcp_messages.h"

#include <fmt/format.h>

namespace gradwire::tcp_messages {
void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer) {
  if (mine.agrees_with(theirs)) return;
  if (theirs.magic != CallHeader::kMagic) {
    throw Mismatch(fmt::format("the message from rank {} is not a Gradwire header: it is corrupted", peer));
  }
  auto call = [](int r, const CallHeader& h) {
    return fmt::format("rank {} makes call {}, {}", r, h.sequence, h.text());
  };
  bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
  throw Mismatch(fmt::format("ranks disagree: {}; {}{}", call(rank, mine), call(peer, theirs),
                             alike ? "; this call or an earlier one differs in something else" : ""));
}

}  // namespace gradwire::tcp_messages
