// Moves bytes between ranks. A transport does no arithmetic and does not know their type.
//
// The one operation is exchange(): a set of sends and receives that progress together, like an NCCL group.
// Inside one exchange, transfers with different peers progress independently, and transfers with the same
// peer match in order. It is enqueued on a stream and does not block the host unless the implementation says
// so.
//
// A failure (deadline, dead peer, mismatch) is final for the whole group: the rank that notices it throws
// CommError and aborts the others, whose pending and later exchanges also throw. On a host stream the error
// surfaces in synchronize().
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/transport/peer_windows.h"
#include "runtime/device/device.h"

namespace gradwire {

// A larger world is a configuration error; bounds the tables.
inline constexpr int kMostRanks = 1 << 16;

struct Transfer {
  enum class Kind : uint8_t { send, receive };
  Kind kind = Kind::send;
  int peer = 0;
  void* data = nullptr;  // on the transport's device; sends only read it
  size_t bytes = 0;
};

// Identifies an exchange, for matching and for error texts. `tag` must be the same at sender and receiver.
struct ExchangeLabel {
  uint64_t tag = 0;
  std::string what;  // e.g. "allreduce #17 of 4096 floats, bf16, ring, round 3 of 6"
};

// One collective operation. Ranks must make their calls in the same order and agree on each before its data
// moves.
struct Call {
  uint64_t hash = 0;  // of all that ranks must agree on: operation, count, spec, schedule
  std::string what;   // for error texts, e.g. "allreduce of bucket 1 of 2 (4096 floats, bf16, ring)"
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual Device device() const = 0;
  virtual const char* name() const = 0;

  // Starts `call`: the work that follows on `stream`, up to the next begin(), belongs to it. `call` must stay
  // valid until the stream has passed this point. Calls are numbered from 1. If the number or hash differs
  // between ranks, every rank gets an error that names both calls, before either accepts data from the other.
  virtual void begin(const Stream& stream, const Call& call) = 0;
  // Enqueues an exchange. `transfers` and `label` must stay valid until the stream has passed this point. No
  // transfers: a no-op.
  virtual void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                        const ExchangeLabel& label) = 0;
  // exchange() in two parts, so that the next exchange can be posted while one is in flight. start() posts an
  // exchange. Work after finish() sees the result of the oldest unfinished one. At most two may be in flight,
  // and the second must neither send what the first receives nor receive into memory that the first reads or
  // writes.
  virtual void start(const Stream& stream, const std::vector<Transfer>& transfers,
                     const ExchangeLabel& label) {
    exchange(stream, transfers, label);
  }
  virtual void finish(const Stream&) {}
  // Returns whether start() lets the stream proceed before the exchange is done. If not, starting the next
  // one early would only delay the event recorded after this one.
  virtual bool starts_early() const { return false; }
  // Returns memory on the transport's device for buffers that are sent or received repeatedly. NCCL registers
  // it and may then skip a copy. Small buffers share an allocation and are released together. Valid only
  // while the transport exists.
  virtual Buffer exchange_memory(size_t bytes);
  // Returns why exchanges cannot be captured in a graph (runtime/device/graph.h), and the remedy; empty if
  // they can. Capturing is collective, and the same exchanges must have run once without capture.
  virtual std::string capture_obstacle() const { return ""; }
  // Returns why ranks cannot read each other's memory, and the remedy; empty if they can. The same on all
  // ranks. `group`: only groups of this many consecutive ranks need to; 0: all ranks.
  virtual std::string peer_obstacle(int group = 0);
  // Returns peer windows with halves of at least `half_bytes`. `shared`: may return those of an earlier call,
  // for kernels that all run on one stream. `group`: only the windows of this rank's group. Null on all ranks
  // if impossible. Collective; blocks.
  std::shared_ptr<PeerWindows> peer_windows(int64_t half_bytes, bool shared, int group = 0);
  // Enqueues `work`, a kernel over these windows, from which other ranks read `bytes`. It has an exchange's
  // deadline, and its failure fails the group. `what` must stay valid until the stream has passed this point.
  virtual void run_over_peers(const Stream& stream, PeerWindows& windows, uint64_t bytes,
                              const std::string& what, const std::function<void(const Stream&)>& work);
  // Returns why the transport has no allreduce of its own, and the alternative; empty if it has one. The same
  // on all ranks.
  virtual std::string library_obstacle() const;
  // Enqueues the transport's own allreduce: `out` becomes the sum of all ranks' `in`, or the mean, with the
  // same bits on all ranks. `in`, `out`: (count) floats on the transport's device; may be the same memory. It
  // has an exchange's deadline. Counts `bytes` as sent. `what` must stay valid until the stream has passed
  // this point.
  virtual void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                         uint64_t bytes, const std::string& what);
  // Blocks until every rank has called it.
  virtual void barrier() = 0;
  virtual void abort(const std::string& reason) = 0;
  // Throws CommError, with the reason, once the group has failed. CUDA streams carry no errors: there, call
  // it after synchronizing a stream and before using the result of an exchange.
  virtual void check() = 0;
  // Returns the same group without the ranks in `excluded`; works after a failure. The remaining ranks keep
  // their order. Collective over them. Throws BadInput if the transport does not support it.
  virtual std::unique_ptr<Transport> shrink(const std::vector<int>& excluded);
  // Returns a new group of the survivors of a failed group; fails the group if it has not failed. `survivors`
  // gets their old ranks, ascending, which is their order in the new group. If grow() had completed on some
  // ranks but not on this one, a survivor can be a new rank, with -1 as its old rank. Collective over the
  // survivors, which determine their members themselves. Throws BadInput if the transport does not support it
  // or was not created for it. Throws CommError if this rank was left out, too few ranks answer, or a
  // survivor does not call it within `timeout`.
  virtual std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors);

  // Admission of new ranks. Throws BadInput if the transport does not support it.
  // Opens admission: joiners may wait while ranks and joiners are fewer than `most`. `validate` gets a
  // joiner's description of itself and returns why it is rejected, or ""; a thread of the transport calls it.
  // Stays in effect for the groups that follow this one.
  virtual void open_admission(int most, std::function<std::string(const std::string& about)> validate);
  // Closes admission and notifies waiting joiners that the run has ended.
  virtual void close_admission() {}
  // Returns how many joiners wait; 0 except on the group's rank 0.
  virtual int waiting_joiners() const { return 0; }
  // Returns where joiners find the group's ranks. May contain a secret: only for joiners.
  virtual std::string invitation() const { return ""; }
  // Returns a new group of the same ranks followed by the waiting joiners. Null if it was not formed; this
  // group then continues. After a success this group can only be destroyed. Collective; blocks, for seconds
  // if a joiner stops answering. Throws CommError if this group fails.
  virtual std::unique_ptr<Transport> grow();

  // Returns a group of the ranks in `members`, in this order. `members` contains this rank or is empty; the
  // result is then null. Collective over the whole group, whose ranks pass equal or disjoint lists. The new
  // group outlives this one and is not notified of its failures. Throws BadInput if the transport does not
  // support it.
  virtual std::unique_ptr<Transport> split(const std::vector<int>& members);

  // Sends short messages to rank 0, separate from the exchanges, for reports. Sending does not wait. Rank 0
  // waits and takes each rank's messages in order. Between processes only; any thread may call them.
  virtual void send_message(const std::string& message);
  virtual std::string take_message(int from);

  // Returns how long this rank's exchanges have waited for data of each rank, in seconds; empty if not
  // measured.
  virtual std::vector<double> waited_s() const { return {}; }

  // Returns the payload bytes this rank has sent so far, counted as they leave. For the transport's own
  // allreduce: as declared by the caller.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 protected:
  virtual std::shared_ptr<PeerWindows> make_peer_windows(int64_t half_bytes, int group);

  std::atomic<uint64_t> bytes_sent_{0};
  std::map<int, std::shared_ptr<PeerWindows>> shared_windows_;  // by group
};

// Implements waited_s(). Written by one thread, read by any.
class Waits {
 public:
  explicit Waits(int world) : nanoseconds_(static_cast<size_t>(world)) {}
  // Runs `wait`, which returns the rank it waited for, and adds its duration to that rank.
  template <typename Wait>
  void measure(Wait wait) {
    const auto start = std::chrono::steady_clock::now();
    const int peer = wait();
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

}  // namespace gradwire
