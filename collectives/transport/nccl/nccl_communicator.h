// One rank's NCCL communicator: takes turns between threads that call NCCL, limits calls that may hang, and
// ends the communicator.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/threads/running_clock.h"
#include "runtime/threads/thread.h"

namespace gradwire {

// The transport's compound NCCL calls: a group of sends and receives, joining, and waiting for non-blocking
// communicators. The functions access only their arguments, so they may run on any thread.

// CUDA functions that the transport needs besides NCCL. Tests supply other functions.
class GpuCalls {
 public:
  virtual ~GpuCalls() = default;
  virtual bool capturing(const Stream& stream) = 0;
  virtual cudaStream_t native(const Stream& stream) = 0;
  // Return a mark for an exchange that runs once, or for a captured exchange.
  virtual std::unique_ptr<ExchangeMark> make_mark() = 0;
  virtual std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) = 0;
  // Prepares a thread that polls marks or calls NCCL, so that the thread does not disturb captures of other
  // threads. Must be the thread's first call.
  virtual void enter_thread() {}
};

// Limits of a wait for NCCL.
struct NcclPatience {
  SteadyClock::time_point deadline = SteadyClock::time_point::max();
  std::function<bool()> stop = [] { return false; };
  std::function<void(std::chrono::microseconds)> pause;  // sleeps for this time
};

// Waits until `comm` is idle. `result`: the result of the last call on `comm`. Only non-blocking
// communicators return ncclInProgress: a caller's communicator, or a communicator created with
// NCCL_COMM_BLOCKING=0. Polls for 100 us before sleeping: NCCL takes about 20 us, and the shortest sleep
// takes about 60 us.
ncclResult_t settle_nccl(const NcclApi& api, ncclComm_t comm, ncclResult_t result,
                         const NcclPatience& patience);

// Enqueues the transfers as one NCCL group. Ends the group even on an error.
ncclResult_t run_nccl_group(const NcclApi& api, ncclComm_t comm, cudaStream_t stream,
                            const std::vector<Transfer>& transfers, const NcclPatience& patience);

ncclResult_t run_nccl_allreduce(const NcclApi& api, ncclComm_t comm, cudaStream_t stream, const float* in,
                                float* out, int64_t count, bool mean, const NcclPatience& patience);

// Returns the initialized communicator. Throws CommError at the deadline.
ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline);

class NcclCommunicator {
 public:
  using Call = std::function<ncclResult_t(ncclComm_t, const NcclPatience&)>;
  using Pause = std::function<void(std::chrono::microseconds)>;  // sleeps for this time
  struct Limits {
    std::chrono::milliseconds turn;  // the longest wait for a call of another thread
    SteadyClock::time_point deadline = SteadyClock::time_point::max();
    std::function<bool()> stop = [] { return false; };
  };

  // Takes `comm`. `owned`: this object destroys the communicator. `shrinkable`: end() revokes the
  // communicator instead of aborting it. Throws BadInput if `comm` does not work.
  NcclCommunicator(const NcclApi& api, std::shared_ptr<GpuCalls> gpu, ncclComm_t comm, bool owned,
                   bool shrinkable, Pause pause);

  int rank() const { return rank_; }
  int world() const { return world_; }
  const NcclApi& api() const { return api_; }
  GpuCalls& gpu() const { return *gpu_; }

  // Runs `call` on this thread. Returns ncclInProgress if the call must not run: after end(), or
  // while another call is in progress for longer than `limits.turn`.
  ncclResult_t run(const Call& call, const Limits& limits);
  // Runs `call` on another thread, which may outlive this object: `call` must own everything that it uses.
  // Returns ncclInProgress if `call` must not run, or does not return in time.
  ncclResult_t run_apart(Call call, const Limits& limits);
  // Returns NCCL's error for the communicator; "" if there is no error or a call is in progress.
  std::string error(std::chrono::milliseconds patience);

  // Ends the communicator after a failure: kernels that wait for a peer end. May never return, so this object
  // may be destroyed before end() returns.
  void end();
  // Returns whether end() has returned or returns within `patience`.
  bool ended_within(std::chrono::milliseconds patience);
  // Destroys an owned communicator, or aborts it if `must_abort` returns true. Takes at most 2 * kFarewell.
  void destroy(const std::function<bool()>& must_abort);

  // Returns the communicator that `make` derives from this communicator; null if `make` derives none for this
  // rank. `doing` is for error texts. Throws CommError at the deadline.
  using Make = std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>;
  ncclComm_t derive(const std::string& doing, std::chrono::milliseconds timeout, const Make& make);

  // How long NCCL may take to shut down a communicator whose peers are all healthy.
  static constexpr std::chrono::milliseconds kFarewell{10'000};

 private:
  // Serializes use of the communicator: one call at a time. The communicator ends only while no call is in
  // progress, unless the call is stuck in NCCL. Outlives the transport if a call or an abort never returns.
  struct Use {
    // Waits for a turn. Returns false if closed, or if another call is still in progress after `patience`.
    bool enter(std::chrono::milliseconds patience);
    void leave();

    std::mutex mutex;
    std::condition_variable changed;
    int waiting = 0;
    bool busy = false;    // a call is in progress
    bool closed = false;  // no further calls may run
    bool ended = false;   // end() has returned
  };
  // Holds the turn for the duration of a call.
  struct Turn {
    explicit Turn(std::shared_ptr<Use> use, std::chrono::milliseconds patience)
        : use(std::move(use)), entered(this->use->enter(patience)) {}
    ~Turn() {
      if (entered) use->leave();
    }
    Turn(const Turn&) = delete;
    const std::shared_ptr<Use> use;
    const bool entered;
  };

  const NcclApi& api_;
  const std::shared_ptr<GpuCalls> gpu_;
  const bool owned_, shrinkable_;
  const Pause pause_;
  const std::shared_ptr<Use> use_ = std::make_shared<Use>();
  std::atomic<ncclComm_t> comm_;  // null after an abort
  std::atomic<bool> revoked_ = false;
  int rank_ = 0, world_ = 1;
};

// Detects that a group over NCCL has failed, notifies the other ranks and ends the communicator.

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
