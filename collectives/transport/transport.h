// Moves bytes between ranks. A transport does no arithmetic and does not know the type of the data.
//
// The main operation is exchange(): a set of sends and receives that progress together, like an NCCL group.
// Inside one exchange, transfers with different peers progress independently, and transfers with the same
// peer match in order. An exchange is enqueued on a stream and does not block the host unless the
// implementation says so.
//
// A failure (deadline, dead peer, mismatch) is final for the whole group. The rank that notices the failure
// throws CommError and notifies the other ranks. Their pending and later exchanges also throw. On a host
// stream, synchronize() throws the error.
//
// Some transports have further operations. On a transport that lacks an operation, the operation throws an
// error that names the transport and the remedy, unless its comment or its default says otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "runtime/device/device.h"
#include "runtime/util/error.h"

namespace gradwire {

// The largest world size. A larger world is a configuration error. The limit bounds the tables.
inline constexpr int kMaxRanks = 1 << 16;

struct Transfer {
  enum class Kind : uint8_t { send, receive };
  Kind kind = Kind::send;
  int peer = 0;
  void* data = nullptr;  // on the transport's device; a send only reads the data
  size_t bytes = 0;
};

// Identifies an exchange, for matching and for error texts. `tag` must be the same at sender and receiver.
struct ExchangeLabel {
  uint64_t tag = 0;
  std::string what;  // e.g. "allreduce #17 of 4096 floats, bf16, ring, round 3 of 6"
};

// One collective operation. Ranks must make their calls in the same order and agree on each call before its
// data moves.
struct Call {
  uint64_t hash = 0;  // hash of all that ranks must agree on: operation, count, spec, schedule
  std::string what;   // for error texts, e.g. "allreduce of bucket 1 of 2 (4096 floats, bf16, ring)"
};

// The time for which exchanges have waited for each rank. One thread writes the times; any thread may read
// them.
class Waits {
 public:
  // Creates times of `world` ranks, all zero. If `world` is 0, nothing is measured.
  explicit Waits(int world) : nanoseconds_(static_cast<size_t>(world)) {}
  // Runs `wait`, which returns the rank for which it has waited, and adds the duration to that rank's time.
  template <typename Wait>
  void measure(Wait wait) {
    const auto start = std::chrono::steady_clock::now();
    const int peer = wait();
    if (nanoseconds_.empty()) return;
    const std::chrono::nanoseconds time = std::chrono::steady_clock::now() - start;
    nanoseconds_.at(static_cast<size_t>(peer)).fetch_add(time.count(), std::memory_order_relaxed);
  }
  std::vector<double> seconds() const {
    std::vector<double> all;
    for (const auto& ns : nanoseconds_)
      all.push_back(static_cast<double>(ns.load(std::memory_order_relaxed)) * 1e-9);
    return all;
  }

 private:
  std::vector<std::atomic<int64_t>> nanoseconds_;
};

class Transport {
 public:
  virtual ~Transport() = default;

  int rank() const { return rank_; }
  int world() const { return world_; }
  Device device() const { return device_; }
  const char* name() const { return name_; }
  // Returns the deadline of an exchange; 0: none.
  std::chrono::milliseconds timeout() const { return timeout_; }

  // Starts `call`: the work that follows on `stream`, up to the next begin_call(), belongs to the call.
  // `call` must stay valid until the stream has passed this point. Calls are numbered from 1. If the number
  // or hash differs between ranks, every rank gets an error that names the differing calls, before either
  // rank accepts data from the other.
  virtual void begin_call(const Stream& stream, const Call& call) = 0;
  // Enqueues an exchange. `transfers` and `label` must stay valid until the stream has passed this point.
  // Does nothing without transfers.
  virtual void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                        const ExchangeLabel& label) = 0;
  // Blocks until every rank has called barrier().
  virtual void barrier() = 0;
  virtual void abort(const std::string& reason) = 0;
  // Throws CommError, with the reason, once the group has failed. CUDA streams carry no errors: on CUDA, call
  // check() after synchronizing a stream and before using the result of an exchange.
  virtual void check() = 0;
  // Returns a group of the ranks in `members`, in this order. `members` contains this rank or is empty; if
  // empty, the result is null. Collective over the whole group, whose ranks pass equal or disjoint lists. The
  // new group outlives this group and is not notified of this group's failures. Throws BadInput if the
  // transport does not support split().
  virtual std::unique_ptr<Transport> split(const std::vector<int>& members);
  // Returns why exchanges cannot be captured in a graph (runtime/device/graph.h), and the remedy; "" if
  // exchanges can be captured. Capturing is collective, and the same exchanges must have run once without
  // capture.
  virtual std::string capture_obstacle() const { return ""; }

  // ---- An exchange in two parts, so that the next exchange can be posted while an exchange is in flight. At
  // most two may be in flight. The second exchange must neither send data that the first exchange receives
  // nor receive into memory that the first exchange reads or writes.

  // Returns whether a second exchange can be posted while an exchange is in flight.
  virtual bool has_early_exchange() const { return false; }
  // Posts an exchange; the stream continues before the exchange is done. The arguments are those of
  // exchange().
  virtual void begin_exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                              const ExchangeLabel& label) {
    exchange(stream, transfers, label);
  }
  // Makes the stream wait for the oldest exchange that has not ended. Work after this call sees the
  // exchange's result.
  virtual void end_exchange(const Stream&) {}

  // ---- An allreduce that the transport's library implements.

  virtual bool has_allreduce() const { return false; }
  // Returns why the transport has no allreduce, and the alternative; "" if it has one. The result is the same
  // on all ranks.
  std::string allreduce_obstacle() const;
  // Enqueues an allreduce: `out` becomes the sum of all ranks' `in`, or the mean, with the same bits on all
  // ranks. `in` and `out` are (count) floats on the transport's device and may be the same memory. The
  // allreduce has an exchange's deadline. Counts `bytes` as sent. `what` must stay valid until the stream has
  // passed this point.
  virtual void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                         uint64_t bytes, const std::string& what);

  // ---- Short messages to rank 0, separate from the exchanges, for reports. Any thread may send and take
  // them.

  // Sends a message to rank 0. Does not block.
  virtual void send_message(const std::string& message);
  // Blocks rank 0 until a message of rank `from` arrives, and returns the message. Each rank's messages
  // arrive in order. Throws CommError at the timeout.
  virtual std::string take_message(int from);

  // ---- A group that continues after ranks die, and that admits new ranks. The operations throw BadInput if
  // the group was not created for them.

  // Returns a new group of the survivors of a failed group. Fails the group if the group has not failed.
  // `survivors` gets the survivors' old ranks, ascending, which is the order in the new group. If grow() had
  // completed on some ranks but not on this rank, a survivor can be a new rank, with -1 as its old rank.
  // Collective over the survivors, which determine their members themselves. Throws CommError if this rank
  // was left out, if too few ranks answer, or if a survivor does not call regroup() within `timeout`.
  virtual std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors);
  // Returns whether groups over this transport can admit new ranks.
  virtual bool admits() const { return false; }
  // Opens admission: joiners may wait while ranks and joiners are fewer than `most`. `validate` gets a
  // joiner's description of itself and returns why the joiner is rejected, or ""; a thread of the transport
  // calls `validate`. Stays in effect for the groups that follow this group.
  virtual void open_admission(int most, std::function<std::string(const std::string& about)> validate);
  // Closes admission and notifies waiting joiners that the run has ended.
  virtual void close_admission() {}
  // Returns how many joiners wait; 0 except on the group's rank 0.
  virtual int waiting_joiners() const { return 0; }
  // Returns where joiners find the group's ranks; "" if the group was not created for joiners. The text may
  // contain a secret, so only joiners may read it.
  virtual std::string invitation() const;
  // Returns a new group of the same ranks followed by the waiting joiners. Returns null if the new group has
  // not formed; this group then continues. After a success, this group can only be destroyed. Collective;
  // blocks, for seconds if a joiner stops answering. Throws CommError if this group fails.
  virtual std::unique_ptr<Transport> grow();

  // Returns how long this rank's exchanges have waited for each rank's data, in seconds; an empty list if not
  // measured.
  std::vector<double> waited_s() const { return waits_.seconds(); }
  // Returns the number of payload bytes that this rank has sent so far. Bytes are counted when they are sent.
  // For the transport's native allreduce, the caller declares the number.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 protected:
  struct Place {
    int rank, world;
    Device device;
    bool measures_waits = false;
    std::chrono::milliseconds timeout{0};
  };
  Transport(const char* name, const Place& place)
      : waits_(place.measures_waits ? place.world : 0),
        name_(name),
        rank_(place.rank),
        world_(place.world),
        device_(place.device),
        timeout_(place.timeout) {}
  void count_sent(uint64_t bytes) { bytes_sent_.fetch_add(bytes, std::memory_order_relaxed); }

  Waits waits_;

 private:
  const char* const name_;
  const int rank_, world_;
  const Device device_;
  const std::chrono::milliseconds timeout_;
  std::atomic<uint64_t> bytes_sent_{0};
};

// One rank of a group without other ranks, for building reducers and codecs to measure their memory. Every
// exchange is an error.

class PlannedTransport : public Transport {
 public:
  PlannedTransport(int rank, int world, Device device) : Transport("planned", {rank, world, device}) {}

  void begin_call(const Stream&, const Call&) override {}
  void exchange(const Stream&, const std::vector<Transfer>&, const ExchangeLabel& label) override {
    refuse(label.what);
  }
  bool has_allreduce() const override { return true; }
  void allreduce(const Stream&, const float*, float*, int64_t, bool, uint64_t,
                 const std::string& what) override {
    refuse(what);
  }
  void barrier() override { refuse("barrier"); }
  void abort(const std::string&) override {}
  void check() override {}

 private:
  [[noreturn]] static void refuse(const std::string& what) {
    throw Error(what + ": a planned group has no other ranks and moves no data");
  }
};

// The transports' common part of Transport::regroup().

// Throws BadInput if a group cannot regroup: because the group is not `shrinkable`, or because the group's
// survivors have already formed a new group, which then has the quorum.
void require_regroupable(bool shrinkable, bool has_quorum);
// Throws CommError if `rank` has a quorum and `other` has none. `contact`: the contact of the other rank's
// quorum; "" if `other` has none.
void require_contact(int rank, int other, const std::string& contact);

// Repeats the survivors' agreement on their ranks until they have formed a group. `failed`: the failed group,
// to which `quorum` belongs. `address`: this machine's address, where the new group's store may listen.
// `form` forms the new group of the old ranks `ranks`, ascending, with -1 for new ranks, and throws CommError
// if a rank dies meanwhile.
std::unique_ptr<Transport> regroup_survivors(
    Quorum& quorum, const GroupOptions& failed, const std::string& address, std::chrono::milliseconds timeout,
    std::vector<int>& survivors,
    const std::function<std::unique_ptr<Transport>(const GroupOptions& options,
                                                   const std::vector<int>& ranks)>& form);

}  // namespace gradwire
