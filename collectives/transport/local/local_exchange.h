// One rank's part of an exchange between threads of one process.
#pragma once

#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/transport/local/local_hub.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"

namespace gradwire {

// Its offers point into this object, so the destructor withdraws them. After an exception the caller may free
// the data, so the destructor then also waits for the peers' enqueued copies.
class LocalExchange {
 public:
  // `stream`: null on the host, where data moves now. On CUDA only events and copies are enqueued. `doing`:
  // for error texts. All arguments must outlive the object.
  LocalExchange(LocalHub& hub, int rank, const Stream* stream, const ExchangeLabel& label,
                const std::string& doing)
      : hub_(hub), rank_(rank), stream_(stream), label_(label), doing_(doing) {}
  ~LocalExchange();
  LocalExchange(const LocalExchange&) = delete;

  // Blocks until all data has been received and all peers have received this rank's data; on CUDA, until the
  // copies are enqueued. Adds the time for which it has waited to `waits`.
  void run(const std::vector<Transfer>& transfers, Waits& waits);
  // Returns the bytes of all sends.
  uint64_t bytes() const;

 private:
  Device device() const { return hub_.devices[static_cast<size_t>(rank_)]; }
  void offer_sends(const std::vector<Transfer>& transfers);
  void receive_all(const std::vector<Transfer>& transfers, Waits& waits);
  // Receives the oldest offer of t.peer. Holds the lock on entry and exit, but not while copying.
  void receive(const Transfer& t);
  void copy_from(LocalHub::Offer& offer, const Transfer& t) const;
  void await_receivers();
  void wait_until_done(const Event& event) const noexcept;
  void wait_until_done(const Stream& stream) const noexcept;

  LocalHub& hub_;
  const int rank_;
  const Stream* const stream_;
  const ExchangeLabel& label_;
  const std::string& doing_;
  std::unique_lock<std::mutex> lock_{hub_.mutex, std::defer_lock};
  std::deque<LocalHub::Offer> sends_;
  bool done_ = false;
};

}  // namespace gradwire
