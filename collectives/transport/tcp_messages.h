// What ranks tell each other beside the payload.
//
// Two kinds of message go ahead of payloads, each with a tag of its own:
//   CallHeader  once per call, from each rank to the next one (rank + 1): which call it is, as a hash over
//               this call and all before it, schedule included. If any two ranks differ, some rank differs
//               from its neighbour, whatever the schedules are that they follow.
//   Header      only for exchanges outside of any call, once per exchange and peer sent to: how many messages
//               of which sizes
// Payloads carry a tag that follows from calls, exchange and size: what belongs to another call or has another
// size finds no receiver, and stays on its connection.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/mix.h"

namespace gradwire::tcp_messages {

constexpr uint64_t kHeaderSlot = 1, kCallSlot = 2;

struct CallHeader {
  static constexpr uint64_t kMagic = 0x32657269'77647267ull;
  uint64_t magic = kMagic;
  uint64_t sequence = 0;
  uint64_t rolling = 0;  // of all calls so far, this one included
  char what[168] = {};   // for the receiver's error text

  CallHeader() = default;
  CallHeader(uint64_t call, uint64_t hash, const std::string& label) : sequence(call), rolling(hash) {
    std::snprintf(what, sizeof what, "%s", label.c_str());
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
    std::snprintf(what, sizeof what, "%s", label.c_str());
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

// Payload of the same exchange and size may share a tag: messages of one connection are matched in order.
inline uint64_t payload_slot(uint64_t tag, size_t bytes) {
  return mix(mix(kHeaderSlot, tag), bytes) | (uint64_t{1} << 63);
}

struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Of rank `rank`, about what rank `peer` sent. Throw Mismatch, which names both and what each is in.
void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer);
void compare(const Header& expected, const Header& arrived, int rank, int peer);

}  // namespace gradwire::tcp_messages
