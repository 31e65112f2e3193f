// Messages between the ranks of a group of processes: one TCP connection per pair.
//
// A frame with tag and length precedes each message on a connection. The receiver matches messages in order:
// payload goes from the socket straight into the memory posted for the message. An unexpected frame stops the
// connection with the payload unread, so the payload never reaches memory meant for another message.
// Optionally a checksum follows the payload, for errors that TCP's 16-bit checksum misses. A flag in the
// frame announces the checksum.
//
// The waiting thread moves the data: wait() polls all connections and moves all available bytes, so a message
// costs no switch between threads. A caller with other work between post() and wait() calls hand_over(),
// which leaves the transfers to a helper thread until the next wait().
#pragma once

#include <poll.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/listener.h"
#include "collectives/net/socket.h"
#include "collectives/transport/emulated_link.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {

class TcpLinks {
 public:
  struct Frame {
    uint64_t tag = 0, bytes = 0;
  };
  // A message to send or receive. Must not move from post() until wait() or drop() has returned.
  struct Message {
    bool sent = false;  // false: the message is received
    int peer = 0;
    void* data = nullptr;  // a send only reads the data
    size_t bytes = 0;
    uint64_t tag = 0;  // equal at the sender and the receiver
    bool done = false;

   private:
    friend class TcpLinks;
    Frame frame_;
    size_t moved_ = 0;   // number of moved bytes of frame, data and checksum
    size_t summed_ = 0;  // number of data bytes in the checksum
    LinkPacer::Flow flow_;
    uint32_t sum_ = 0, theirs_ = 0;
  };

  // Listens at `address` of this machine (empty: at all its addresses) on one of `ports`, for peers that know
  // `key`. `checksums`: add checksums to sent messages. Received messages are checked if their sender has
  // added a checksum. `link`: if set, messages pass through emulated links. A message is written to its
  // connection as it arrives at the other end of its link, so delays need no shared clock. Throws CommError
  // if it cannot listen.
  TcpLinks(int rank, int world, const std::string& address, const std::string& key, bool checksums = false,
           const PortRange& ports = {}, const EmulatedLink& link = {});
  ~TcpLinks();
  TcpLinks(const TcpLinks&) = delete;

  // Returns the text of the Contact that other ranks need to connect.
  std::string contact() const { return listener_.contact().text(); }
  // Connects to lower ranks and accepts connections from higher ranks, then stops listening. contacts[r] is
  // rank r's contact. `rejected` gets log lines about unauthenticated peers (RejectedConnections). Throws
  // CommError that names the rank that cannot be reached, and after interrupt().
  void connect(const std::vector<std::string>& contacts, SteadyClock::time_point deadline,
               const std::function<void(const std::string& line)>& rejected = nullptr);
  // Returns the address from which that rank is connected to this rank.
  std::string address_of(int rank) const {
    return links_.at(static_cast<size_t>(rank)).socket.peer_address();
  }

  // Returns the emulated links, with the time of their first message; default: links are not emulated.
  EmulatedLink emulated() const { return pacer_ ? pacer_->link() : EmulatedLink{}; }
  // Returns " over links of 100Mbit" if the links are emulated, otherwise "".
  std::string over_links() const { return pacer_ ? " over links of " + pacer_->link().to_string() : ""; }

  // Posts a message. One thread at a time may call post(), hand_over() and wait(). post() and wait() throw
  // CommError if the connection is dead in both directions, and after interrupt().
  void post(Message& message);
  void hand_over();
  // Waits until `message` is done. Returns false at the deadline.
  bool wait(Message& message, SteadyClock::time_point deadline);

  // Makes all current and later calls of wait() throw. Any thread may call it.
  void interrupt() {
    std::lock_guard lock(mutex_);
    interrupted_ = true;
    caller_.wake.set();
    if (polling_) helper_poll_.wake.set();
  }
  // Forgets posted messages and does not access their memory afterwards. The connections cannot be used
  // afterwards.
  void drop();

 private:
  // The flag in a frame's length which says that a checksum of 4 bytes follows the payload.
  static constexpr uint64_t kHasChecksum = uint64_t{1} << 63;
  struct Link {
    Socket socket;
    std::deque<Message*> sends, receives;
    std::string lost;         // why the connection is dead; "" while alive
    bool mismatched = false;  // the next frame does not match receives.front()
  };
  // The descriptors that a thread polls.
  struct Poller {
    WakeEvent wake;
    std::vector<pollfd> entries = {};
    std::vector<Link*> owners = {};  // the link of each entry
  };

  void throw_if_group_failed() {
    std::lock_guard lock(mutex_);
    if (interrupted_) throw CommError("the group failed while its ranks connected");
  }
  Socket connect_to(int rank, const std::string& contact, SteadyClock::time_point deadline);
  void accept_higher(std::vector<Socket>& sockets, SteadyClock::time_point deadline,
                     const std::function<void(const std::string& line)>& rejected);
  bool has_work() const;
  // Returns the number of bytes of the message on the connection. For a message being received, the result is
  // valid once the message's frame has arrived.
  static size_t length(const Message& m) {
    return sizeof(Frame) + m.bytes + ((m.frame_.bytes & kHasChecksum) != 0 ? sizeof m.sum_ : 0);
  }
  bool paced(const Link& link) const {
    return pacer_ && pacer_->link().between(rank_, static_cast<int>(&link - links_.data()));
  }
  // Return the number of bytes that may be sent to this rank or received from it now.
  size_t may_send(Message& m) {
    return pacer_ ? pacer_->arrived(m.flow_, LinkPacer::Time::clock::now()) - m.moved_ : SIZE_MAX;
  }
  size_t may_receive(const Link& link) const {
    return paced(link) ? pacer_->may_receive(rank_, LinkPacer::Time::clock::now()) : SIZE_MAX;
  }
  // Returns the events to poll for on a connection. Lowers `again` to the time at which more bytes may move.
  int events_of(Link& link, LinkPacer::Time& again);
  void push(Link& link);
  void pull(Link& link);
  // Waits until bytes can be moved or the poller is woken, and moves the bytes. `lock` is held on entry and
  // exit.
  void poll_once(std::unique_lock<std::mutex>& lock, Poller& poller, SteadyClock::time_point deadline);
  // Moves bytes on the helper thread between hand_over() and wait().
  void help();

  Listener listener_;
  const bool checksums_;
  const int rank_;
  std::mutex mutex_;
  std::vector<Link> links_;  // by rank
  std::optional<LinkPacer> pacer_;
  bool interrupted_ = false;
  Poller caller_;  // the poller of the waiting thread
  // The helper thread, active between hand_over() and wait(); started on first use.
  Thread helper_;
  std::condition_variable work_;
  Poller helper_poll_;
  bool helping_ = false, polling_ = false, stop_ = false;
};

// CRC-32C checksums of payload in transit. Uses the processor's CRC instruction if the processor has one.

// Returns the checksum extended by the next `bytes` bytes of `data`. `crc`: the checksum of the preceding
// bytes; 0 at the start.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc);

}  // namespace gradwire
