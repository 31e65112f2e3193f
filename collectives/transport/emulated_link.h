// The speed of emulated links between ranks on the host (--link). link_pacer.h emulates the links.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace gradwire {

// The speed of each rank's link. `bits_per_s` 0: links are not emulated.
struct EmulatedLink {
  // Bytes of a packet. Headers are Ethernet's, IPv4's, and TCP's with timestamps.
  static constexpr size_t kPacketPayload = 1448, kPacketHeaders = 66;

  double bits_per_s = 0;
  std::chrono::nanoseconds delay{0};  // from sender to receiver
  size_t burst = 0;                   // bytes that a link passes at once after a pause, like tc's tbf
  int ranks_per_node = 0;             // ranks of one node exchange messages without a link; 0 or 1: no nodes

  explicit operator bool() const { return bits_per_s > 0; }
  bool operator==(const EmulatedLink&) const = default;
  // Parses RATE[,DELAY[,BURST]], such as 100Mbit, 1Gbit,20ms or 1Gbit,0us,128KiB. Throws BadInput.
  static EmulatedLink parse(const std::string& text);
  // Returns the text that parse() reads, in the largest units: "100Mbit" for 100000kbit.
  std::string to_string() const;
  // Returns the rate of payload in large messages, in bytes per microsecond.
  double payload_bytes_per_us() const;
  // Returns whether messages between two ranks pass through their links.
  bool between(int a, int b) const;
};

}  // namespace gradwire
