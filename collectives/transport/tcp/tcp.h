// Ranks as processes on one host or many, over TCP.
//
// An exchange runs on the host stream's thread. The thread posts all receives and sends of the exchange
// (tcp_links.h), each straight into or from the caller's memory, and waits for them until the deadline. A
// header precedes each call's payload, from each rank to the next rank, which compares the
// header with its current call. Payload of another call or size cannot reach a rank's memory.
//
// Each rank also has a connection to rank 0 (net/store.h) for failures: all ranks are notified at once of a
// rank that dies, times out or disagrees, and the error on every rank names the ranks that do not answer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/net/membership.h"
#include "collectives/net/socket.h"
#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {

struct TcpOptions {
  GroupOptions group;
  // True if survivors can continue after a failure (ElasticGroup::regroup()). Must be the same on every rank.
  bool shrinkable = false;
  // If set, messages between ranks pass through emulated links. Must be the same on every rank.
  EmulatedLink link = {};
};

// Creates this rank's transport: joins the group and connects to every rank. Blocks until all ranks have
// joined. Throws BadInput for invalid options, CommError if a rank does not join in time.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options);

// Options of join_tcp_transport(): how to find a group that admits new ranks, and this process's request to
// the group.
struct TcpJoinOptions {
  // Returns the newest Admission::invitation() of any rank; "" while there is no invitation.
  std::function<std::string()> invitation;
  std::string about = {};  // this process's description, for `validate` of open_admission()
  // How long to wait for admission; 0: as long as the group keeps this process waiting.
  std::chrono::milliseconds longest{0};
};
// Joins a running group as its highest rank, when the group calls Admission::grow(). Ignores the rank, world
// and rendezvous in `options.group`. Throws BadInput, with the reason, if the group rejects the request.
// Throws CommError if no rank answers within the join timeout, the group has ended, or the new group does not
// form.
std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& options, const TcpJoinOptions& join);

}  // namespace gradwire

namespace gradwire::tcp_messages {

// Messages between ranks in addition to the payload.
//
// A CallHeader precedes the payloads of a call, from each rank to the next rank (rank + 1). It identifies the
// call by a hash over this call and all previous calls, including their schedules. If any two ranks differ,
// some rank differs from its neighbour, whichever schedules they follow.
//
// A payload's tag is derived from calls, exchange and size: payload of another call or size matches no
// receive and stays on its connection.

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

struct Mismatch : Error {
  using Error::Error;
};
// Throws Mismatch, which names both ranks and their calls, unless the ranks `rank` and `peer` make the same
// call.
void compare(const CallHeader& mine, const CallHeader& theirs, int rank, int peer);

}  // namespace gradwire::tcp_messages

namespace gradwire {

// The failure of a group of processes, as known to this rank: the first failure, this rank's activity, and
// the errors that it throws.

class Membership;

// The failure of a group, as known to this rank. Any thread may call the methods.
class TcpFailure {
 public:
  // Creates an object without a failure. The first call of give_up() or abort() is the first use of `group`.
  explicit TcpFailure(Membership& group) : group_(group) {}

  // Sets this rank's activity, for other ranks' errors: "in call 17, allreduce of ..."
  void set_activity(std::string activity);
  // Sets the rank that this rank waits for; -1: none.
  void set_waiting_for(int rank) { waiting_for_ = rank; }
  // Returns the activity and the awaited rank: "in call 17, allreduce of ..., waiting for rank 2".
  std::string activity();

  // Calls `interrupt` when the group fails; `interrupt` must not block. Throws CommError if the group has
  // failed.
  void on_failure(std::function<void()> interrupt);
  // Records that the group has failed, and interrupts this rank.
  void record(const std::string& cause);
  // Returns the first failure that this rank has recorded; "" if no failure is recorded.
  std::string recorded();
  void throw_if_failed();
  // Fails the group for `reason`.
  void abort(const std::string& reason);
  // Notifies the group, finds out which ranks still answer, and throws an error with all known facts.
  // `doing`: this rank's activity, for the error.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause);

 private:
  std::string activities_of_others(int waited_for);

  Membership& group_;
  std::mutex mutex_;
  std::function<void()> interrupt_;
  std::string failure_;      // the first failure that this rank has recorded
  std::string final_error_;  // the error that give_up() throws
  std::string activity_ = "joining";
  std::atomic<int> waiting_for_{-1};
};

}  // namespace gradwire
