// Decides when an exchange on a GPU is stuck. Marks report each exchange's progress; this records since when
// it has been running, finds the overdue one and words the error. It has no thread, clock or CUDA calls of
// its own, so every decision can be tested with made-up times.
//
// An exchange may wait in its stream for earlier kernels without limit; the deadline runs from when it was
// first seen running, when it waits only for its peers.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/transport/transport.h"
#include "runtime/running_clock.h"

namespace gradwire {

enum class Progress { queued, running, done };

// Brackets one exchange on its stream. Polled by the watching thread; never blocks.
class ExchangeMark {
 public:
  virtual ~ExchangeMark() = default;
  virtual void begin(const Stream& stream) = 0;
  virtual void end(const Stream& stream) = 0;
  virtual Progress poll() = 0;
  // How often a captured exchange has begun; it runs again with each launch of its graph. 0: it runs once.
  virtual uint64_t runs() const { return 0; }
  virtual bool repeats() const { return false; }
};

// A captured exchange, whose events could not be queried for the progress of a launch. The device writes what it does
// into memory that the host reads: 1 at the exchange's begin, 2 at its end, and the number of launches once per graph,
// which tells one launch's exchange from that of the next.
class WrittenMark final : public ExchangeMark {
 public:
  // Enqueues the store of a value.
  using Write = std::function<void(const Stream& stream, uint64_t* word, uint64_t value)>;
  // `memory` keeps both words alive for as long as the graph may run.
  WrittenMark(Write write, uint64_t* state, uint64_t* launches, std::shared_ptr<void> memory)
      : write_(std::move(write)), state_(state), launches_(launches), memory_(std::move(memory)) {}
  void begin(const Stream& stream) override { write_(stream, state_, 1); }
  void end(const Stream& stream) override { write_(stream, state_, 2); }
  Progress poll() override { return read(state_) == 1 ? Progress::running : Progress::done; }
  uint64_t runs() const override { return read(launches_); }
  bool repeats() const override { return true; }

 private:
  static uint64_t read(uint64_t* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); }
  const Write write_;
  uint64_t* const state_;
  uint64_t* const launches_;
  const std::shared_ptr<void> memory_;
};

struct WatchedExchange {
  uint64_t number = 0;  // of this rank's exchanges, from 1
  std::string what;     // "call 3, allreduce of bucket 1 of 2 (4096 floats, bf16, ring), round 2 of 6"
  std::vector<Transfer> transfers = {};
  uint64_t call = 0, calls_hash = 0;  // the call that it belongs to, and a hash of all calls up to it
};

// "3 receives (12288 bytes) from ranks 0, 2 and 1 send (4096 bytes) to rank 1 pending"
std::string pending_text(const std::vector<Transfer>& transfers);

// The exchanges that a rank has enqueued and that are not known to be done. Not thread-safe.
class ExchangesInFlight {
 public:
  using Time = RunningClock::time_point;
  explicit ExchangesInFlight(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void add(std::unique_ptr<ExchangeMark> mark, WatchedExchange exchange);
  // Polls every mark and drops those that are done. Returns the error text of the oldest exchange that has
  // been running for longer than the timeout, if there is one.
  std::optional<std::string> overdue(Time now);
  // The oldest exchange that overdue() has seen running for longer than this, captured ones apart; null if there is none.
  const WatchedExchange* stalled(Time now, std::chrono::milliseconds longer_than) const;
  // This rank's state, for the others: the oldest running exchange, else the oldest queued, else the last.
  std::string standing() const;
  // Finished marks, for reuse.
  std::vector<std::unique_ptr<ExchangeMark>> take_spare() { return std::move(spare_); }
  // Whether anything needs frequent polling.
  bool active() const;
  // Whether an exchange had not ended when overdue() looked last; not of captured ones, which may run again.
  bool unfinished() const;

 private:
  struct Entry {
    std::unique_ptr<ExchangeMark> mark;
    WatchedExchange exchange;
    Progress progress = Progress::queued;
    uint64_t runs = 0;
    Time since = {};  // when it was first seen running
  };
  const std::chrono::milliseconds timeout_;
  std::list<Entry> entries_;
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  WatchedExchange last_;
};

}  // namespace gradwire
