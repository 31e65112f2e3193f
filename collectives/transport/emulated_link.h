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
  std::chrono::nanoseconds delay{0};       // from sender to receiver
  size_t burst = 0;                        // bytes that a link passes at once after a pause, like tc's tbf
  double then_bits_per_s = 0;              // the rate after a change; 0: the rate does not change
  std::chrono::nanoseconds then_after{0};  // from the group's first message to the change
  // The time of the first message, which groups that are split off inherit; default: none yet.
  std::chrono::steady_clock::time_point since = {};
  int ranks_per_node = 0;  // ranks of one node exchange messages without a link; 0 or 1: no nodes

  explicit operator bool() const { return bits_per_s > 0; }
  bool operator==(const EmulatedLink&) const = default;
  // Parses RATE[,DELAY[,BURST]][,then=RATE@TIME], such as 100Mbit, 1Gbit,20ms, 1Gbit,0us,128KiB or
  // 5Gbit,then=100Mbit@20s. Throws BadInput.
  static EmulatedLink parse(const std::string& text);
  // Returns the text that parse() reads, in the largest units: "100Mbit" for 100000kbit.
  std::string to_string() const;
  // Returns the rate of payload in large messages before a change, in bytes per microsecond.
  double payload_bytes_per_us() const;
  double bits_per_s_at(std::chrono::steady_clock::time_point time) const;
  // Returns whether messages between two ranks pass through their links.
  bool between(int a, int b) const;
};

}  // namespace gradwire
