// How bytes get from one rank to another. A transport only moves bytes: it does no arithmetic and knows
// nothing of floats.
//
// The one operation is exchange(): a set of sends and receives that progress together, like an NCCL group.
// Inside one exchange, transfers with different peers progress independently and transfers with the same peer
// match in order. It is enqueued on a stream and does not block the host unless the implementation says so.
//
// A failure (deadline, dead peer, mismatch) is final for the whole group: the rank that notices it throws
// CommError and aborts the others, whose pending and later exchanges throw too. On a host stream the error
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
#include "runtime/device.h"

namespace gradwire {

// More are a mistake in somebody's environment; tables of them must not take gigabytes.
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

// One collective operation, which every rank of the group makes in the same order: what the ranks must agree
// on before any of its data moves.
struct Call {
  uint64_t hash = 0;  // of everything that must be the same: operation, count, spec, schedule
  std::string what;   // for error texts, e.g. "allreduce of bucket 1 of 2 (4096 floats, bf16, ring)"
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual Device device() const = 0;
  virtual const char* name() const = 0;

  // What follows on `stream`, up to the next begin(), belongs to `call`, which must stay valid until the
  // stream has passed this point. Calls are numbered from 1. If the number or hash differs between ranks,
  // every rank gets an error that names both calls, before either accepts data from the other.
  virtual void begin(const Stream& stream, const Call& call) = 0;
  // `transfers` and `label` must stay valid until the stream has passed this point. No transfers: a no-op.
  virtual void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                        const ExchangeLabel& label) = 0;
  // The same in two parts, so that the next exchange can be posted while one is in flight: start() posts an
  // exchange, and work after finish() sees the result of the oldest unfinished one. At most two may be in
  // flight, and the second must neither send what the first receives nor receive where it reads or writes.
  virtual void start(const Stream& stream, const std::vector<Transfer>& transfers,
                     const ExchangeLabel& label) {
    exchange(stream, transfers, label);
  }
  virtual void finish(const Stream&) {}
  // Whether start() lets the stream proceed before the exchange is done. If not, starting the next one early
  // would only delay the event recorded after this one.
  virtual bool starts_early() const { return false; }
  // Memory on the transport's device for what exchanges send or receive again and again. NCCL is told of it, and may
  // then move what is there without copying it first. Small ones share what NCCL allocates, and are released together;
  // only for as long as the transport lives.
  virtual Buffer exchange_memory(size_t bytes);
  // Why exchanges cannot be captured in a graph (runtime/graph.h), and what to do instead; empty if they can.
  // Capturing is collective, and the same exchanges must have been made once before without it.
  virtual std::string capture_obstacle() const { return ""; }
  // Why the ranks cannot read each other's memory, and what to do instead; empty if they can. The same on all ranks.
  // `group`: it is enough that the ranks of a group can, which are so many that follow each other; 0: all must.
  virtual std::string peer_obstacle(int group = 0);
  // Windows with halves of at least this size; collective, and blocks. `shared`: perhaps those of an earlier call, for
  // kernels that all run on one stream. With a group, the windows of its ranks only, which others do not share. Null,
  // on all ranks, if it turns out to be impossible.
  std::shared_ptr<PeerWindows> peer_windows(int64_t half_bytes, bool shared, int group = 0);
  // Enqueues `work`, a kernel over these windows, from which other ranks read `bytes`. It has the deadline of an
  // exchange, and its failure is the group's. `what` must stay valid until the stream has passed it.
  virtual void run_over_peers(const Stream& stream, PeerWindows& windows, uint64_t bytes,
                              const std::string& what, const std::function<void(const Stream&)>& work);
  // Why the transport has no allreduce of its own, and what to use instead; empty if it has. The same on all ranks.
  virtual std::string library_obstacle() const;
  // Enqueues that: `out` becomes the sum of all ranks' `in`, or the mean, with the same bits on all ranks; (count)
  // floats on the transport's device, perhaps the same memory. It has the deadline of an exchange. Its `bytes` are
  // counted as sent. `what` must stay valid until the stream has passed it.
  virtual void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean,
                         uint64_t bytes, const std::string& what);
  // Blocks the caller until every rank has called it.
  virtual void barrier() = 0;
  virtual void abort(const std::string& reason) = 0;
  // Throws CommError, with the reason, once the group has failed. CUDA streams carry no errors: there, call it
  // after synchronizing a stream and before using the result of an exchange.
  virtual void check() = 0;
  // The same group without some of its ranks, also after a failure. Collective over the remaining ranks,
  // which keep their order. Throws BadInput if the transport does not support it.
  virtual std::unique_ptr<Transport> shrink(const std::vector<int>& excluded);
  // The ranks that are left of a group that has failed, as a new group; `survivors` gets their old ranks, ascending,
  // which is their order in the new one. Fails a group that has not. Collective over the survivors, who find out by
  // themselves who they are. Throws BadInput if the transport does not support it or was not made for it, CommError if
  // this rank was left out, if too few answer, or if a survivor does not call it within `timeout`. After grow() that
  // other ranks had finished and this one had not, a survivor can be a new rank, with -1 for its old rank.
  virtual std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors);

  // New ranks, where the transport supports them; else BadInput.
  // From here on processes that ask to join may wait, as long as there are fewer than `most` ranks with them. `judge`,
  // called from a thread of the transport's, gets what each says of itself, and returns why it is refused, or "".
  // Stays with the groups that follow this one.
  virtual void open_door(int most, std::function<std::string(const std::string& about)> judge);
  // Nobody is let in any more; those who wait are told that the run has ended.
  virtual void close_door() {}
  // How many wait for this rank to let them in: at the group's rank 0 only.
  virtual int knocking() const { return 0; }
  // Where processes that want to join find the group's ranks: for them only, as it may contain a secret.
  virtual std::string doors() const { return ""; }
  // The same ranks, and after them those that wait to join, as a new group; null if none has made it, then this group
  // goes on. Collective, and blocks, for seconds if a newcomer stops answering. After a success this group can only be
  // destroyed. Throws CommError when this group fails.
  virtual std::unique_ptr<Transport> grow();

  // These ranks of the group, in this order, as a group of their own: this rank is one of them, or there are none and
  // the result is null. Collective over the whole group, whose ranks pass equal or disjoint lists. The new group
  // outlives this one, and does not hear of its failures. Throws BadInput if the transport does not support it.
  virtual std::unique_ptr<Transport> split(const std::vector<int>& members);

  // Short messages to rank 0, separate from the exchanges, for reports: sending does not wait; rank 0 waits
  // and takes each rank's messages in order. Between processes only; any thread may call them.
  virtual void send_message(const std::string& message);
  virtual std::string take_message(int from);

  // How long exchanges of this rank have waited for data of each rank, in seconds; empty where that is not measured.
  virtual std::vector<double> waited_s() const { return {}; }

  // Payload bytes this rank has sent so far, counted as they leave; those of an allreduce of the transport's own, as
  // the caller said.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 protected:
  virtual std::shared_ptr<PeerWindows> make_peer_windows(int64_t half_bytes, int group);

  std::atomic<uint64_t> bytes_sent_{0};
  std::map<int, std::shared_ptr<PeerWindows>> shared_windows_;  // by group
};

// What waited_s() tells. Written by one thread, read by any.
class Waits {
 public:
  explicit Waits(int world) : nanoseconds_(static_cast<size_t>(world)) {}
  // Runs `wait`, which returns the rank whose data it waited for.
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
