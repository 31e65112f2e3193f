// The NCCL transport's logic on top of NCCL's functions and stream marks, without CUDA. nccl.cpp supplies the
// real ones; tests supply their own.
#pragma once

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
#include "collectives/transport/nccl/nccl_calls.h"
#include "collectives/transport/nccl/nccl_memory.h"
#include "collectives/transport/peer_access.h"
#include "collectives/transport/transport.h"
#include "runtime/threads/thread.h"

namespace gradwire {

// CUDA functions that the transport needs besides NCCL.
class GpuCalls {
 public:
  virtual ~GpuCalls() = default;
  virtual bool capturing(const Stream& stream) = 0;
  virtual cudaStream_t native(const Stream& stream) = 0;
  // For an exchange that runs once, and for a captured one.
  virtual std::unique_ptr<ExchangeMark> make_mark() = 0;
  virtual std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) = 0;
  // Must be called first in a thread that polls marks or calls NCCL, so that it does not disturb captures
  // elsewhere.
  virtual void enter_thread() {}
};

// State with which a group's survivors find each other.
struct NcclQuorum {
  std::shared_ptr<Quorum> quorum;
  GroupOptions group;
  std::string address;                // of this machine
  std::vector<std::string> contacts;  // of the ranks' quorums, by rank
};
// Exchanges the quorums' contacts among all ranks of `group`. `quorum`: null if the group must not survive
// failures. Collective. Throws CommError if only some ranks have a quorum.
std::vector<std::string> exchange_contacts(Membership& group, const Quorum* quorum,
                                           SteadyClock::time_point deadline);

struct NcclSetup {
  const NcclApi* api = nullptr;
  std::shared_ptr<GpuCalls> gpu;
  ncclComm_t comm = nullptr;
  bool owned = true;
  bool shrinkable = false;
  Device device;
  std::chrono::milliseconds timeout{60'000};  // 0: nothing is watched
  std::unique_ptr<Membership> group = nullptr;
  std::optional<NcclQuorum> regrouping = std::nullopt;
  // Sleeps; for non-blocking communicators.
  std::function<void(std::chrono::microseconds)> pause = [](std::chrono::microseconds time) {
    std::this_thread::sleep_for(time);
  };
};

class NcclTransport final : public Transport,
                            public NativeAllreduce,
                            public MessagesToRankZero,
                            public ElasticGroup,
                            public PeerAccess {
 public:
  explicit NcclTransport(NcclSetup setup);
  ~NcclTransport() override;

  PeerAccess* peer_access() override { return this; }
  NativeAllreduce* native_allreduce() override { return this; }
  MessagesToRankZero* messages() override { return setup_.group ? this : nullptr; }
  ElasticGroup* elastic() override { return this; }

  void begin_call(const Stream& stream, const Call& call) override;
  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override;
  void barrier() override;
  void abort(const std::string& reason) override;
  void check() override;
  void send_message(const std::string& message) override;
  std::string take_message(int from) override;
  std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout,
                                     std::vector<int>& survivors) override;  // in nccl_regroup.cpp
  // The part has no store: errors name fewer ranks, and calls are not compared.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override;
  Buffer exchange_memory(size_t bytes) override;  // in nccl_memory.cpp
  void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean, uint64_t bytes,
                 const std::string& what) override;
  // In nccl_windows.cpp. The first obstacle() is collective and blocks.
  std::string obstacle(int group) override;
  void run_kernel(const Stream& stream, MappedPeers& peers, uint64_t bytes, const std::string& what,
                  const std::function<void(const Stream&)>& work) override;

 protected:
  std::shared_ptr<MappedPeers> map_peers(int64_t half_bytes, int group) override;

 private:
  static Place place_of(const NcclSetup& setup);
  std::string doing(const std::string& what) const;
  // Fails the group with `cause`, waits until the watching thread has notified the peers, then throws.
  [[noreturn]] void give_up(const std::string& what, const std::string& cause);
  void throw_if_failed(const std::string& what);
  void compare(const Call& call);
  // Counts collective set-up as a call, so that a rank that makes it alone gets an error.
  void begin_set_up(const std::string& what);
  std::string other_call(const WatchedExchange& stalled);
  bool failing();
  // Returns the setup of a transport on the communicator that `make` derives from this one; empty if `make`
  // derives none for this rank. `doing` is for error texts.
  std::optional<NcclSetup> derive(
      const std::string& doing,
      const std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>& make);
  NcclSetup without(std::vector<int> excluded);
  NcclSetup again();  // the same ranks
  std::unique_ptr<ExchangeMark> mark_for(const Stream& stream);
  // Returns whether a transfer is the first one to or from its peer, and records it.
  bool meets(const std::vector<Transfer>& transfers);
  // Calls NCCL to enqueue work on `stream` and has it watched. `transfers` describe the work in error texts.
  // `first`: the call may connect to peers and wait for them, so it runs on a thread that may outlive this
  // function.
  using NcclCall = std::function<ncclResult_t(ncclComm_t, const NcclPatience&)>;
  void post(const Stream& stream, const std::string& what, const std::vector<Transfer>& transfers,
            uint64_t bytes, bool first, const NcclCall& call);
  ncclResult_t enqueue(const std::string& what, const std::vector<Transfer>& transfers, bool first,
                       const NcclCall& call);
  // Returns receives of equal parts from each of these ranks except this one.
  std::vector<Transfer> from_all(int first, int ranks, uint64_t bytes) const;
  void keep_watch(std::unique_ptr<ExchangeMark> mark, const std::string& what,
                  std::vector<Transfer> transfers);

  // Calls NCCL on another thread, with an exchange's deadline. Returns false if the call did not return or
  // the communicator is closed.
  bool ask_nccl(std::function<void(ncclComm_t)> call) const;
  WhileAlive while_alive() const;
  std::shared_ptr<NcclMemory> registered_memory(size_t bytes);  // null if NCCL refuses
  std::string reported_by_kernels();                            // with mutex_ held
  bool agreed(bool mine);

  // How often the watching thread polls while exchanges are in flight.
  static constexpr std::chrono::milliseconds kLookEvery{20};
  // How long a call in progress may take to return before the communicator is ended regardless.
  static constexpr std::chrono::milliseconds kGrace{200};

  // nccl_watch.cpp: the watching thread.
  void join_watches();
  void watch();
  std::string nccl_error(std::chrono::milliseconds patience);
  std::string tell_the_group(const std::string& cause);
  void end_communicator();

  bool drained();
  void heard(const std::string& cause, bool from_group);

  // Serializes use of the communicator: one call at a time, and none concurrent with its end, unless a call
  // is stuck in NCCL. Outlives the transport if a call or an abort never returns.
  struct Use {
    // Returns false if closed, or still busy after `patience`.
    bool enter(std::chrono::milliseconds patience);
    void leave();

    std::mutex mutex;
    std::condition_variable changed;
    int waiting = 0;
    bool busy = false;    // a call is in progress
    bool closed = false;  // no further calls
    bool ended = false;   // the watching thread has finished with the communicator
  };
  // Holds Use for the length of a call.
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

  const RunningClock::Watch deadline_watch_;
  NcclSetup setup_;
  const NcclApi& api_;
  const bool watched_;
  const std::shared_ptr<Use> use_ = std::make_shared<Use>();

  // Used only by the thread that makes calls.
  uint64_t calls_ = 0, exchanges_ = 0, rolling_ = 0;
  std::string call_;
  std::set<uint64_t> known_calls_;
  std::atomic<bool> comparing_ = false;  // this thread waits for the store
  struct Met {
    bool sent = false, received = false;
  };
  std::vector<Met> met_;                       // by peer
  bool met_library_ = false;                   // in NCCL's own allreduce
  std::map<int, std::string> peer_obstacles_;  // by group

  std::atomic<ncclComm_t> comm_ = nullptr;  // null: aborted
  std::atomic<bool> revoked_ = false;

  std::mutex shared_mutex_;           // guards the next two
  std::weak_ptr<NcclMemory> shared_;  // source of the next small exchange_memory()
  size_t shared_used_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<MappedPeers>> windows_;
  ExchangesInFlight in_flight_;
  // The NCCL call in progress on the caller's thread.
  struct InNccl {
    SteadyClock::time_point since;
    const std::string* what;
    const std::vector<Transfer>* transfers;
  };
  std::optional<InNccl> in_nccl_;
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  std::optional<std::string> cause_;  // a failure that the watching thread has not handled yet
  bool cause_from_group_ = false;
  std::string failure_;  // final text
  std::string standing_ = "joining";
  bool stop_ = false;
  Thread watcher_;
};

}  // namespace gradwire
