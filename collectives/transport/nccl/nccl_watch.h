// Detects that a group over NCCL has failed, notifies the other ranks and ends the communicator.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_communicator.h"
#include "runtime/threads/thread.h"

namespace gradwire {

// Watches a communicator on a thread. Any thread may call the methods, except as noted.
class NcclWatch {
 public:
  // Describes another rank's call that differs from the call of a stalled exchange; "" if no such call is
  // known.
  using OtherCall = std::function<std::string(const WatchedExchange& stalled)>;

  // Starts watching. `group`: null if the ranks have no store. `timeout`: an exchange's timeout; 0: this
  // object watches no exchanges, and the communicator's owner watches them. All arguments must outlive the
  // object.
  NcclWatch(NcclCommunicator& comm, Membership* group, std::chrono::milliseconds timeout,
            OtherCall other_call);
  ~NcclWatch() { stop(); }

  bool watches() const { return timeout_.count() > 0; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Returns this rank's activity, for other ranks' errors.
  std::string standing();

  // Fails the group with `cause`. `from_group`: another rank has reported the cause.
  void fail(const std::string& cause, bool from_group = false);
  // Returns whether the group has failed. The failure may not have been handled yet.
  bool failing();
  // Throws CommError if the group has failed; first waits until the failure has been handled.
  void throw_if_failed(const std::string& doing);
  // Fails the group, waits until the watching thread has notified the peers, then throws.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause);
  // Waits until a failure has been handled.
  void await_failure_handled();

  // Returns a mark for an exchange on `stream`. Used only by the thread that makes calls.
  std::unique_ptr<ExchangeMark> mark_for(const Stream& stream);
  void watch_exchange(std::unique_ptr<ExchangeMark> mark, WatchedExchange exchange);
  // Runs `call`, a call of NCCL on the caller's thread, and reports the call if it does not return in time.
  ncclResult_t watch_call(const std::string& what, const std::vector<Transfer>& transfers,
                          const std::function<ncclResult_t()>& call);

  // Ends the watching thread. Returns whether the group had failed. If the communicator does not end in time,
  // the thread outlives this object.
  bool stop();
  // Returns whether all exchanges have ended. Must follow stop(). If an exchange has not ended, finalizing
  // NCCL would wait for that exchange without a limit.
  bool drained();

 private:
  struct Cause {
    std::string text;
    bool from_group = false;
  };
  // The NCCL call in progress on the caller's thread.
  struct InNccl {
    SteadyClock::time_point since;
    const std::string* what;
    const std::vector<Transfer>* transfers;
  };
  // Decides when to compare a stalled exchange's call with the other ranks' calls.
  struct Doubt {
    uint64_t exchange = 0;  // the exchange's number
    SteadyClock::time_point next = SteadyClock::time_point::min();
    std::chrono::milliseconds interval{0};
    bool is_due(uint64_t number, SteadyClock::time_point now);
  };

  void watch();
  std::string notify_group(const std::string& cause);
  // The methods below require mutex_. Methods with a parameter `lock` release the mutex while they wait.
  void look(std::unique_lock<std::mutex>& lock, Doubt& doubt);
  void end_group(std::unique_lock<std::mutex>& lock);
  std::string overdue();

  NcclCommunicator& comm_;
  Membership* const group_;
  const std::chrono::milliseconds timeout_;
  const OtherCall other_call_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  ExchangesInFlight in_flight_;
  std::optional<InNccl> in_nccl_;
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  std::optional<Cause> cause_;  // the failure's cause
  std::string failure_;         // the final error; "": no failure, or not handled yet
  std::string standing_;
  bool stop_ = false;
  Thread thread_;
};

}  // namespace gradwire
