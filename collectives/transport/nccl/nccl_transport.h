// The NCCL transport on top of NCCL's functions and stream marks, without CUDA. nccl.cpp supplies the real
// functions; tests supply other functions.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/threads/running_clock.h"
#include "runtime/threads/thread.h"

namespace gradwire {

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

// Returns the initialized communicator. Throws CommError at the deadline.
ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline);

// Exchanges the quorums' contacts among all ranks of `group`, and returns them by rank. `quorum`: null if the
// group must not survive failures. Collective. Throws CommError if only some ranks have a quorum.
std::vector<std::string> exchange_contacts(Membership& group, const Quorum* quorum,
                                           SteadyClock::time_point deadline);

struct NcclSetup {
  const NcclApi* api = nullptr;
  std::shared_ptr<GpuCalls> gpu;
  ncclComm_t comm = nullptr;
  bool owned = true;        // the transport destroys the communicator
  bool shrinkable = false;  // a failure revokes the communicator instead of aborting it
  Device device;
  std::chrono::milliseconds timeout{60'000};  // 0: exchanges are not watched
  std::unique_ptr<Membership> group = nullptr;
  // How the group's survivors find each other; null: the group does not survive failures.
  std::shared_ptr<Quorum> quorum = nullptr;
  GroupOptions options = {};
  std::string address = {};                // the address of this machine
  std::vector<std::string> contacts = {};  // the contacts of the ranks' quorums, by rank
  // Sleeps between polls of non-blocking communicators.
  std::function<void(std::chrono::microseconds)> pause = [](std::chrono::microseconds time) {
    std::this_thread::sleep_for(time);
  };
};

// One rank's connection to the group: a communicator of NCCL, and the thread that watches it. Takes turns
// between threads that call NCCL, limits calls that may hang, detects that the group has failed, notifies the
// other ranks, and ends the communicator. Any thread may call the methods, except as noted.
class NcclConnection {
 public:
  // A call of NCCL. It must own everything that it uses if it is enqueued as the first to a peer.
  using Call = std::function<ncclResult_t(ncclComm_t, const NcclPatience&)>;
  // Describes another rank's call that differs from the call of a stalled exchange; "" if no such call is
  // known.
  using OtherCall = std::function<std::string(const WatchedExchange& stalled)>;

  // Starts watching, unless the timeout is 0: the communicator's owner then watches exchanges. `setup` must
  // outlive the object.
  NcclConnection(const NcclSetup& setup, int rank, OtherCall other_call);
  ~NcclConnection() { stop(); }
  NcclConnection(const NcclConnection&) = delete;

  // Returns this rank's activity, for other ranks' errors.
  std::string standing() {
    std::lock_guard lock(mutex_);
    return standing_;
  }
  // Fails the group with `cause`. `from_group`: another rank has reported the cause.
  void fail(const std::string& cause, bool from_group = false) {
    std::lock_guard lock(mutex_);
    if (cause_) return;
    cause_ = cause;
    from_group_ = from_group;
    if (!watches()) failure_ = cause;
    changed_.notify_all();
  }
  // Returns whether the group has failed. The failure may not have been handled yet.
  bool failing() {
    std::lock_guard lock(mutex_);
    return cause_.has_value();
  }
  // Waits until a failure has been handled.
  void await_failure_handled() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !cause_ || !failure_.empty(); });
  }
  // Throws CommError if the group has failed; first waits until the failure has been handled.
  void throw_if_failed(const std::string& doing);
  // Fails the group, waits until the watching thread has notified the peers, then throws.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause);

  // Calls NCCL to enqueue work on `stream`, and watches the work. `exchange` describes the work in error
  // texts. `first`: the call may connect to peers and wait for them, so the call runs on a thread that may
  // outlive this object. Used only by the thread that makes calls.
  void post(const Stream& stream, WatchedExchange exchange, bool first, const Call& call);
  // Returns NCCL's error for the communicator; "" if there is no error or a call is in progress.
  std::string error(std::chrono::milliseconds patience);
  // Returns the communicator that `make` derives from this communicator; null if `make` derives none for this
  // rank. `doing` is for error texts. Throws CommError at the deadline.
  using Make = std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>;
  ncclComm_t derive(const std::string& doing, const Make& make);

  // Ends the watching thread. If the communicator does not end in time, the thread outlives this object.
  void stop();
  // Destroys an owned communicator, or aborts it if the group has failed or an exchange has not ended. Takes
  // at most 2 * kFarewell. Must follow stop().
  void destroy();

 private:
  // Serializes use of the communicator: one call at a time. The communicator ends only while no call is in
  // progress, unless the call is stuck in NCCL. Outlives the transport if a call or an abort never returns.
  struct Use {
    std::mutex mutex;
    std::condition_variable changed;
    int waiting = 0;
    bool busy = false;    // a call is in progress
    bool closed = false;  // no further calls may run
    bool ended = false;   // end() has returned
  };
  // Holds the turn for the duration of a call. `entered`: false if closed, or if another call is still in
  // progress after `patience`.
  struct Turn {
    Turn(std::shared_ptr<Use> use, std::chrono::milliseconds patience);
    ~Turn();
    Turn(const Turn&) = delete;
    const std::shared_ptr<Use> use;
    bool entered = false;
  };

  bool watches() const { return setup_.timeout.count() > 0; }
  ncclResult_t enqueue(const WatchedExchange& exchange, bool first, const Call& call);
  void watch();
  void end();
  bool drained();
  std::string notify_group(const std::string& cause);
  // Requires mutex_, and releases it while it waits.
  void look(std::unique_lock<std::mutex>& lock);

  const NcclSetup& setup_;
  const NcclApi& api_;
  const int rank_;
  const OtherCall other_call_;
  const std::shared_ptr<Use> use_ = std::make_shared<Use>();
  std::atomic<ncclComm_t> comm_;  // null after an abort
  std::atomic<bool> revoked_ = false;

  std::mutex mutex_;  // guards the members up to stop_
  std::condition_variable changed_;
  ExchangesInFlight in_flight_;
  // The exchange whose call of NCCL is in progress on the caller's thread, and the call's start.
  const WatchedExchange* in_nccl_ = nullptr;
  SteadyClock::time_point in_nccl_since_ = {};
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  std::optional<std::string> cause_;  // the failure's cause
  bool from_group_ = false;           // another rank has reported the cause
  std::string failure_;               // the final error; "": no failure, or not handled yet
  std::string standing_;
  bool stop_ = false;
  // The stalled exchange whose call was compared with the other ranks' calls, and when to compare it again.
  // Used only by the watching thread.
  uint64_t doubted_ = 0;
  SteadyClock::time_point doubt_at_ = SteadyClock::time_point::min();
  std::chrono::milliseconds doubt_interval_{0};
  Thread thread_;
};

class NcclTransport final : public Transport {
 public:
  // Throws BadInput if the communicator does not work.
  explicit NcclTransport(NcclSetup setup);
  ~NcclTransport() override;

  void begin_call(const Stream& stream, const Call& call) override;
  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override;
  void barrier() override;
  void abort(const std::string& reason) override;
  void check() override;
  // Returns a group without a store: its errors name fewer ranks, and its calls are not compared.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override;
  bool has_allreduce() const override { return true; }
  void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean, uint64_t bytes,
                 const std::string& what) override;
  void send_message(const std::string& message) override;
  std::string take_message(int from) override;
  std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors) override;

 private:
  static Place place_of(const NcclSetup& setup);
  // Returns the setup of a transport on a communicator derived from this transport's.
  NcclSetup derived(ncclComm_t comm) const;
  // Returns "call 3, " followed by `what`; before the first call, returns only `what`.
  std::string in_this_call(const std::string& what) const;
  std::string compare_call(const std::string& what);
  std::string other_call(const WatchedExchange& stalled) const;
  // Runs the transfers as one group of NCCL.
  void send_and_receive(const Stream& stream, const std::string& what,
                        const std::vector<Transfer>& transfers);
  void post(const Stream& stream, const std::string& what, const std::vector<Transfer>& transfers, bool first,
            const NcclConnection::Call& call);

  const RunningClock::Watch deadline_watch_;
  NcclSetup setup_;
  // The calls of this rank. Used only by the thread that makes calls, except comparing_.
  uint64_t calls_ = 0, calls_hash_ = 0;  // number and hash of all calls so far
  std::string current_;                  // the current call; "" before the first call
  std::set<uint64_t> known_;             // hashes of compared calls
  std::atomic<bool> comparing_ = false;  // the thread that makes calls waits for the store
  uint64_t exchanges_ = 0;
  std::vector<bool> connected_;  // whether data was sent to a peer, and received from it; by peer
  bool allreduce_connected_ = false;
  NcclConnection connection_;
};

}  // namespace gradwire
