// Messages between ranks in addition to the payload.
//
// A CallHeader precedes the payloads of a call, from each rank to the next rank (rank + 1). It identifies the
// call by a hash over this call and all previous calls, including their schedules. If any two ranks differ,
// some rank differs from its neighbour, whichever schedules they follow.
//
// A payload's tag is derived from calls, exchange and size: payload of another call or size matches no
// receive and stays on its connection.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "runtime/util/mix.h"

namespace gradwire::tcp_messages {

constexpr uint64_t kPayloadSlot = 1, kCallSlot = 2;

struct CallHeader {
  static constexpr uint64_t kMagic = 0x32657269'77647267ull;
  uint64_t magic = kMagic;
  uint64_t sequence = 0;
  uint64_t rolling = 0;  // hash of all calls up to and including the current call
  char what[168] = {};   // the call, for the receiver's error text

  CallHeader() = default;
  CallHeader(uint64_t call, uint64_t hash, const std::string& label) : sequence(call), rolling(hash) {
    label.copy(what, sizeof what - 1);
  }
  bool agrees_with(const CallHeader& other) const {
    return magic == other.magic && sequence == other.sequence && rolling == other.rolling;
  }
  std::string text() const { return {what, strnlen(what, sizeof what)}; }
};

// Returns a payload's tag. Payloads of the same exchange and size may share a tag: messages of one connection
// are matched in order.
inline uint64_t payload_slot(uint64_t tag, size_t bytes) {
  return mix(mix(kPayloadSlot, tag), bytes) | (uint64_t{1} << 63);
}

struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Throws Mismatch, which names both ranks and their calls, unless the ranks `rank` and `peer` make the same
// call.
void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer);

}  // namespace gradwire::tcp_messages
