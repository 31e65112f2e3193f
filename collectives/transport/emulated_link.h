// Emulated links between ranks on the host (--link).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

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
  double payload_bytes_per_us() const {
    return bits_per_s / 8e6 * kPacketPayload / (kPacketPayload + kPacketHeaders);
  }
  double bits_per_s_at(std::chrono::steady_clock::time_point time) const {
    const bool changed =
        then_bits_per_s > 0 && since != std::chrono::steady_clock::time_point{} && time >= since + then_after;
    return changed ? then_bits_per_s : bits_per_s;
  }
  // Returns whether messages between two ranks pass through their links.
  bool between(int a, int b) const { return ranks_per_node < 2 || a / ranks_per_node != b / ranks_per_node; }
};

// Emulates slow links between ranks on the host: paces messages as a full-duplex Ethernet link of each rank
// would. Both transports on the host use LinkPacer.
//
// A link is two token buckets, one for each direction. The buckets are computed in virtual time: a bucket is
// the time at which it is full again. So a thread that wakes up late loses no part of the rate. Messages to
// several ranks share the sender's bucket in small turns, as TCP's connections do. Messages to one rank pass
// in order. The receiver's bucket passes bytes in the order of their arrival.
//
// The rate counts what a network counts: each packet of 1448 bytes of payload has 66 bytes of headers
// (Ethernet, IPv4, TCP with timestamps).

// The links of a group of ranks. Does no waiting and reads no clock: callers pass the time, which must not
// decrease. Not thread-safe.
class LinkPacer {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // A message on its way. Must not move from post() until the message has arrived or withdraw() is called.
  struct Flow {
    int from = 0, to = 0;
    size_t bytes = 0;

   private:
    friend class LinkPacer;
    struct Arrival {
      Time at;
      size_t bytes;  // of the message so far
    };
    Time posted_ = {};
    size_t left_ = 0;               // bytes that have not entered the sender's bucket
    std::deque<Arrival> arrivals_;  // in the order of their times
    size_t arrived_ = 0;
  };

  LinkPacer(const EmulatedLink& link, int world);

  const EmulatedLink& link() const { return link_; }
  // Begins to send a message. The caller sets the first three fields of `flow`. Pass the same time for
  // messages that are sent together.
  void post(Flow& flow, Time now);
  // Forgets a message, of which parts may be on their way.
  void withdraw(Flow& flow);
  // Returns the number of the message's bytes that have arrived.
  size_t arrived(Flow& flow, Time now);
  // Returns a time before which the message cannot have `bytes` more bytes than now, or all its bytes if it
  // has fewer. Call after arrived().
  Time earliest(const Flow& flow, size_t bytes) const;

  // Paces bytes that `rank` receives from senders with other LinkPacers. Returns how many bytes may be
  // received now; 0 if not before may_receive_at().
  size_t may_receive(int rank, Time now) const;
  Time may_receive_at(int rank) const;
  void received(int rank, size_t bytes, Time now);

  // Returns the number of bytes that pass at once in one turn of a message.
  size_t turn_bytes() const { return turn_; }
  // Returns the time for which `bytes` bytes of payload occupy a link at `time`; without a time, before its
  // rate changes.
  std::chrono::nanoseconds duration(size_t bytes, Time time = {}) const;

 private:
  // Returns when `bytes` that are ready at `ready` have passed.
  Time pass(Time& bucket, size_t bytes, Time ready) const;
  size_t pair(int from, int to) const { return static_cast<size_t>(from * world_ + to); }
  // Returns the next message of a sender; null if it has none.
  Flow* next_of(int from) const;
  void advance(Time now);
  void take_turn(Flow& flow, Time start);

  EmulatedLink link_;
  const int world_;
  const size_t turn_;
  const std::chrono::nanoseconds burst_;  // the time in which an empty bucket fills up
  const std::chrono::nanoseconds receive_burst_;
  std::vector<Time> out_, in_;             // the times at which the buckets are full again, by rank
  std::vector<int> turns_;                 // by sender: the receiver whose turn is next
  std::vector<std::deque<Flow*>> queues_;  // by sender and receiver
};

}  // namespace gradwire
