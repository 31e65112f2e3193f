// Messages between ranks in addition to the payload.
//
// Two kinds of message precede payloads, each with a different tag:
//   CallHeader  once per call, from each rank to the next one (rank + 1): identifies the call by a hash over
//               this call and all previous ones, including their schedules. If any two ranks differ, some
//               rank differs from its neighbour, whichever schedules they follow.
//   Header      only for exchanges outside of any call, once per exchange and receiving peer: the number and
//               sizes of its messages
// A payload's tag is derived from calls, exchange and size: payload of another call or size matches no
// receive and stays on its connection.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/util/mix.h"

namespace gradwire::tcp_messages {

constexpr uint64_t kHeaderSlot = 1, kCallSlot = 2;

struct CallHeader {
  static constexpr uint64_t kMagic = 0x32657269'77647267ull;
  uint64_t magic = kMagic;
  uint64_t sequence = 0;
  uint64_t rolling = 0;  // hash of all calls so far, including the current call
  char what[168] = {};   // for the receiver's error text

  CallHeader() = default;
  CallHeader(uint64_t call, uint64_t hash, const std::string& label) : sequence(call), rolling(hash) {
    label.copy(what, sizeof what - 1);
  }
  bool agrees_with(const CallHeader& other) const {
    return magic == other.magic && sequence == other.sequence && rolling == other.rolling;
  }
  std::string text() const { return {what, strnlen(what, sizeof what)}; }
};

struct Header {
  static constexpr uint64_t kMagic = 0x31657269'77647267ull;
  uint64_t magic = kMagic;
  uint64_t tag = 0;
  uint64_t messages = 0;
  uint64_t bytes = 0;  // of all messages
  uint64_t sizes = 0;  // hash of the sizes, in order
  char what[88] = {};  // for the receiver's error text

  Header(uint64_t tag_of_exchange, const std::string& label) : tag(tag_of_exchange) {
    label.copy(what, sizeof what - 1);
  }
  void add(size_t message_bytes) {
    ++messages;
    bytes += message_bytes;
    sizes = mix(sizes, message_bytes);
  }
  bool agrees_with(const Header& other) const {
    return magic == other.magic && tag == other.tag && messages == other.messages && bytes == other.bytes &&
           sizes == other.sizes;
  }
  std::string text() const { return {what, strnlen(what, sizeof what)}; }
};

// Returns a payload's tag. Payloads of the same exchange and size may share a tag: messages of one connection
// are matched in order.
inline uint64_t payload_slot(uint64_t tag, size_t bytes) {
  return mix(mix(kHeaderSlot, tag), bytes) | (uint64_t{1} << 63);
}

struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Compare the header expected by rank `rank` with the one sent by rank `peer`. Throw Mismatch, which names
// both ranks and their calls.
void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer);
void compare(const Header& expected, const Header& arrived, int rank, int peer);

}  // namespace gradwire::tcp_messages
