// Decides when an exchange on a GPU is stuck. Marks report each exchange's progress. ExchangesInFlight
// records when each exchange started running, finds overdue exchanges and writes the error text.
// ExchangesInFlight uses neither threads, clocks nor CUDA calls, so tests can pass made-up times.
//
// An exchange may wait in its stream for earlier kernels without limit. The deadline counts from when the
// exchange was first seen running: from then on the exchange waits only for its peers.
#pragma once

#include <algorithm>
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
#include "runtime/threads/running_clock.h"

namespace gradwire {

enum class Progress { queued, running, done };

// Brackets one exchange on its stream. poll() never blocks; the watching thread calls it.
class ExchangeMark {
 public:
  virtual ~ExchangeMark() = default;
  virtual void begin(const Stream& stream) = 0;
  virtual void end(const Stream& stream) = 0;
  virtual Progress poll() = 0;
  // Returns how often a captured exchange has begun: once per launch of its graph. Returns 0 for an exchange
  // that is not captured, because it runs once.
  virtual uint64_t runs() const { return 0; }
  virtual bool repeats() const { return false; }
};

// The mark of a captured exchange. The events of a graph cannot be queried for the progress of a launch. So
// the device writes the progress into memory that the host reads: 1 at the begin, 2 at the end. A launch
// count, one per graph, distinguishes launches.
class WrittenMark final : public ExchangeMark {
 public:
  // Enqueues a store of `value` to `word`.
  using Write = std::function<void(const Stream& stream, uint64_t* word, uint64_t value)>;
  // Creates the mark. `memory` keeps the words `state` and `launches` alive while the graph may run.
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
  uint64_t number = 0;  // the exchange's number among this rank's exchanges, from 1
  std::string what;     // "call 3, allreduce of bucket 1 of 2 (4096 floats, bf16, ring), round 2 of 6"
  std::vector<Transfer> transfers = {};
  uint64_t call = 0, calls_hash = 0;  // number of the exchange's call; hash of all calls up to that call
};

// Returns e.g. "3 receives (12288 bytes) from ranks 0, 2 and 1 send (4096 bytes) to rank 1 pending".
std::string pending_text(const std::vector<Transfer>& transfers);

// The exchanges that a rank has enqueued and that may not be done. Not thread-safe.
class ExchangesInFlight {
 public:
  using Time = RunningClock::time_point;
  explicit ExchangesInFlight(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void add(std::unique_ptr<ExchangeMark> mark, WatchedExchange exchange) {
    entries_.push_back({.mark = std::move(mark), .exchange = std::move(exchange)});
  }
  // Polls every mark and drops finished marks. Returns the error text of the oldest exchange that has been
  // running for longer than the timeout; nullopt if no exchange is overdue.
  std::optional<std::string> overdue(Time now);
  // Returns the oldest exchange that has been seen running for longer than `longer_than`, ignoring captured
  // exchanges; null if there is no such exchange.
  const WatchedExchange* stalled(Time now, std::chrono::milliseconds longer_than) const;
  // Returns this rank's state, for other ranks' errors: the oldest running exchange; without a running
  // exchange, the oldest queued exchange; otherwise the last exchange.
  std::string standing() const;
  // Returns finished marks, for reuse.
  std::vector<std::unique_ptr<ExchangeMark>> take_spare() { return std::move(spare_); }
  // Returns whether any exchange needs frequent polling.
  bool active() const { return !entries_.empty(); }
  // Returns whether any exchange had not ended at the last overdue(). Ignores captured exchanges, which may
  // run again.
  bool unfinished() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const Entry& e) { return !e.mark->repeats(); });
  }

 private:
  struct Entry {
    std::unique_ptr<ExchangeMark> mark;
    WatchedExchange exchange;
    Progress progress = Progress::queued;
    uint64_t runs = 0;
    Time since = {};  // when the exchange was first seen running
  };
  const std::chrono::milliseconds timeout_;
  std::list<Entry> entries_;
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  WatchedExchange last_;
};

// Deadlines for library calls that may wait for another rank or hang: the call runs on a separate thread, and
// the caller waits at most until the deadline.

// Runs `call` on another thread. Returns true once `call` has returned. Returns false at the deadline or soon
// after `stop()` returns true. After false, `call` may still be running, so `call` must own everything that
// it uses. `call` must not throw.
bool run_with_deadline(std::function<void()> call, RunningClock::time_point deadline,
                       const std::function<bool()>& stop = {});

}  // namespace gradwire
