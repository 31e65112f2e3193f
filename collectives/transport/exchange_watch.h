// What decides that an exchange on a GPU is stuck. The GPU says how far each exchange is (a mark); this says
// since when, which one is overdue, and in which words. No thread, no clock and no CUDA of its own, so that
// every decision can be tested with made-up times.
//
// An exchange waits in its stream for the kernels before it, as long as it likes; the deadline runs from when
// it was first seen running, which is when it waits for nobody but its peers.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/transport/transport.h"

namespace gradwire {

enum class Progress { queued, running, done };

// Put around one exchange on its stream. Polled by the watching thread, never blocks.
class ExchangeMark {
 public:
  virtual ~ExchangeMark() = default;
  virtual void begin(const Stream& stream) = 0;
  virtual void end(const Stream& stream) = 0;
  virtual Progress poll() = 0;
  // Those of a captured graph run again with each launch: how often this one has begun. 0: it runs once.
  virtual uint64_t runs() const { return 0; }
  virtual bool repeats() const { return false; }
};

struct WatchedExchange {
  uint64_t number = 0;  // of this rank's exchanges, from 1
  std::string what;     // "call 3, allreduce of bucket 1 of 2 (4096 floats, bf16, ring), round 2 of 6"
  std::string pending;  // "receives from ranks 0, 2 and sends to rank 1 (3 x 4096 bytes) pending"
};

// "3 receives (12288 bytes) from ranks 0, 2 and 1 send (4096 bytes) to rank 1 pending"
std::string pending_text(const std::vector<Transfer>& transfers);

// The exchanges that a rank has enqueued and that have not been seen done. Not thread-safe.
class ExchangesInFlight {
 public:
  using Time = std::chrono::steady_clock::time_point;
  explicit ExchangesInFlight(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  void add(std::unique_ptr<ExchangeMark> mark, WatchedExchange exchange);
  // Polls every mark and forgets what is done. The text of the oldest exchange that has been running for
  // longer than the timeout, if there is one.
  std::optional<std::string> overdue(Time now);
  // Where this rank stands, for the others: the oldest exchange that runs, else that waits, else the last.
  std::string standing() const;
  // Marks that are done with, to be used again.
  std::vector<std::unique_ptr<ExchangeMark>> take_spare() { return std::move(spare_); }
  // Whether there is anything to look at often.
  bool active() const;

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
