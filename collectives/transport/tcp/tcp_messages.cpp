#include "collectives/transport/tcp/tcp_messages.h"

#include <fmt/format.h>

namespace gradwire::tcp_messages {
namespace {

template <typename H>
void check_magic(const H& header, int peer) {
  if (header.magic == H::kMagic) return;
  throw Mismatch(fmt::format("the message from rank {} is not a Gradwire header: it is corrupted", peer));
}

}  // namespace

void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer) {
  if (mine.agrees_with(theirs)) return;
  check_magic(theirs, peer);
  auto call = [](int r, const CallHeader& h) {
    return fmt::format("rank {} makes call {}, {}", r, h.sequence, h.text());
  };
  bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
  throw Mismatch(fmt::format("ranks disagree: {}; {}{}", call(rank, mine), call(peer, theirs),
                             alike ? "; this call or an earlier one differs in something else" : ""));
}

void compare(const Header& expected, const Header& arrived, int rank, int peer) {
  if (expected.agrees_with(arrived)) return;
  check_magic(arrived, peer);
  auto amount = [](const Header& h) {
    return fmt::format("{} bytes in {} message{}", h.bytes, h.messages, h.messages == 1 ? "" : "s");
  };
  bool alike = amount(expected) == amount(arrived) && expected.text() == arrived.text();
  throw Mismatch(fmt::format("ranks disagree: rank {} expects {} from rank {}, which is in {} and sends {}{}",
                             rank, amount(expected), peer, arrived.text(), amount(arrived),
                             alike ? "; the calls differ in something else" : ""));
}

}  // namespace gradwire::tcp_messages
