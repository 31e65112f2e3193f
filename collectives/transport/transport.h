// How bytes get from one rank to another. A transport moves; it never adds, and knows nothing of floats.
//
// The one operation is exchange(): a set of sends and receives that progress together, like an NCCL group.
// Inside one exchange, transfers with different peers progress independently and transfers with the same peer
// match in order. It is enqueued on a stream and never blocks the host, except where the implementation says
// so.
//
// A failure (deadline, dead peer, mismatch) is final for the whole group: the rank that notices throws
// CommError, and aborts the others, whose pending and later exchanges throw too. On a host stream the error
// appears at synchronize().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace gradwire {

struct Transfer {
  enum class Kind : uint8_t { send, receive };
  Kind kind = Kind::send;
  int peer = 0;
  void* data = nullptr;  // on the transport's device; sends only read it
  size_t bytes = 0;
};

// What an exchange belongs to, for matching and for error texts. `tag` must agree between sender and
// receiver.
struct ExchangeLabel {
  uint64_t tag = 0;
  std::string what;  // e.g. "allreduce #17 of 4096 floats, bf16, ring, round 3 of 6"
};

// One collective operation that every rank of the group makes, in the same order: what the ranks must agree
// on before any data of it moves between them.
struct Call {
  uint64_t hash = 0;  // of all that must be the same: operation, count, spec, schedule
  std::string what;   // for error texts, e.g. "allreduce of bucket 1 of 2 (4096 floats, bf16, ring)"
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;
  virtual Device device() const = 0;
  virtual const char* name() const = 0;

  // What follows on `stream`, up to the next begin(), belongs to `call`, which stays valid until the stream
  // has passed this point. Calls are numbered from 1; a rank whose number or hash differs from another's is
  // an error on every rank, which names both calls, before either takes data from the other.
  virtual void begin(const Stream& stream, const Call& call) = 0;
  // `transfers` and `label` stay valid until the stream has passed this point. Empty `transfers` do nothing.
  virtual void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                        const ExchangeLabel& label) = 0;
  // The same in two parts, so that one exchange is on its way while the next is posted: start() posts, what
  // follows finish() sees the oldest one that was started and not finished. At most two may be under way, and
  // the second must neither send what the first receives nor receive where the first reads or writes.
  virtual void start(const Stream& stream, const std::vector<Transfer>& transfers,
                     const ExchangeLabel& label) {
    exchange(stream, transfers, label);
  }
  virtual void finish(const Stream&) {}
  // Whether start() returns to the stream before the exchange is over. Where it does not, starting the next
  // one early would only delay the mark behind this one.
  virtual bool starts_early() const { return false; }
  // Why exchanges cannot be captured in a graph (runtime/graph.h), and what to do instead; empty when they
  // can. To capture is collective, and comes after the same exchanges were made once without.
  virtual std::string capture_obstacle() const { return ""; }
  // Blocks the caller until every rank has called it.
  virtual void barrier() = 0;
  virtual void abort(const std::string& reason) = 0;
  // Throws CommError once the group has failed. For CUDA, where streams carry no errors: whoever synchronizes
  // one calls this before trusting what an exchange left. On a host stream synchronize() has thrown already.
  virtual void check() {}
  // The same group without some of its ranks, also after a failure. Collective over those that stay, who keep
  // their order. Throws BadInput where the transport cannot.
  virtual std::unique_ptr<Transport> shrink(const std::vector<int>& excluded);

  // Short messages to rank 0, apart from the exchanges, for reports: a rank sends one and goes on,
  // rank 0 takes each rank's in their order and waits for them. Between processes only; any thread may call
  // them.
  virtual void send_message(const std::string& message);
  virtual std::string take_message(int from);

  // Bytes of payload this rank has handed to the wire so far, counted as they leave.
  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 protected:
  std::atomic<uint64_t> bytes_sent_{0};
};

}  // namespace gradwire
