#include "collectives/transport/tcp_messages.h"

namespace gradwire::tcp_messages {
namespace {

template <typename H>
void check_magic(const H& header, int peer) {
  if (header.magic == H::kMagic) return;
  throw Mismatch("what rank " + std::to_string(peer) + " sent is no header of Gradwire's: it is corrupted");
}

}  // namespace

void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer) {
  if (mine.agrees_with(theirs)) return;
  check_magic(theirs, peer);
  auto call = [](int r, const CallHeader& h) {
    return "rank " + std::to_string(r) + " makes call " + std::to_string(h.sequence) + ", " + h.text();
  };
  bool alike = mine.sequence == theirs.sequence && mine.text() == theirs.text();
  throw Mismatch("ranks disagree: " + call(rank, mine) + "; " + call(peer, theirs) +
                 (alike ? "; this call or one before differs in something else" : ""));
}

void compare(const Header& expected, const Header& arrived, int rank, int peer) {
  if (expected.agrees_with(arrived)) return;
  check_magic(arrived, peer);
  std::string from = "rank " + std::to_string(peer), theirs = arrived.text();
  auto amount = [](const Header& h) {
    return std::to_string(h.bytes) + " bytes in " + std::to_string(h.messages) +
           (h.messages == 1 ? " message" : " messages");
  };
  bool alike = amount(expected) == amount(arrived) && expected.text() == theirs;
  throw Mismatch("ranks disagree: rank " + std::to_string(rank) + " expects " + amount(expected) + " from " +
                 from + ", which is in " + theirs + " and sends " + amount(arrived) +
                 (alike ? "; the calls differ in something else" : ""));
}

}  // namespace gradwire::tcp_messages
