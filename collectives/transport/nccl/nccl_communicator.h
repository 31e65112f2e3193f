// One rank's NCCL communicator: takes turns between threads that call NCCL, limits calls that may hang, and
// ends the communicator.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/nccl/nccl_calls.h"
#include "runtime/threads/running_clock.h"

namespace gradwire {

// Runs the given function if the communicator still exists.
using WhileAlive = std::function<void(const std::function<void()>&)>;

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

  // Runs `call` on this thread. Returns ncclInProgress if the call must not run: after end() or close(), or
  // while another call is in progress for longer than `limits.turn`.
  ncclResult_t run(const Call& call, const Limits& limits);
  // Runs `call` on another thread, which may outlive this object: `call` must own everything that it uses.
  // Returns ncclInProgress if `call` must not run, or does not return in time.
  ncclResult_t run_apart(Call call, const Limits& limits);
  // Returns NCCL's error for the communicator; "" if there is no error or a call is in progress.
  std::string error(std::chrono::milliseconds patience);
  // Returns a function that runs its argument if the communicator still exists at that time.
  WhileAlive while_alive() const;

  // Ends the communicator after a failure: kernels that wait for a peer end. May never return, so this object
  // may be destroyed before end() returns.
  void end();
  // Returns whether end() has returned or returns within `patience`.
  bool ended_within(std::chrono::milliseconds patience);
  // Prevents all further calls.
  void close();
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

}  // namespace gradwire
