// The NCCL transport without CUDA: its logic on top of NCCL's functions and marks on streams. nccl.cpp
// supplies the real ones, tests supply their own.
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

#include "collectives/rendezvous/membership.h"
#include "collectives/rendezvous/reunion.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl_api.h"
#include "collectives/transport/nccl_calls.h"
#include "collectives/transport/nccl_memory.h"
#include "collectives/transport/transport.h"
#include "runtime/thread.h"

namespace gradwire {

// What the transport needs from CUDA apart from NCCL.
class GpuCalls {
 public:
  virtual ~GpuCalls() = default;
  virtual bool capturing(const Stream& stream) = 0;
  virtual cudaStream_t native(const Stream& stream) = 0;
  // For an exchange that runs once, and for one that is captured.
  virtual std::unique_ptr<ExchangeMark> make_mark() = 0;
  virtual std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) = 0;
  // Called first in a thread that polls marks or calls NCCL, which must not disturb a capture elsewhere.
  virtual void enter_thread() {}
};

// What a group needs so that the ranks that are left of it find each other.
struct NcclReunion {
  std::shared_ptr<Reunion> reunion;
  GroupOptions group;
  std::string address;                // of this machine
  std::vector<std::string> contacts;  // of the ranks' reunions, by rank
};
// Collective: every rank of `group` calls it, with a reunion or null if it is not to go on after a failure. Throws
// CommError if the ranks differ in that.
std::vector<std::string> exchange_contacts(Membership& group, const Reunion* reunion,
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
  std::optional<NcclReunion> regrouping = std::nullopt;
  // Sleeps, where a communicator is not blocking.
  std::function<void(std::chrono::microseconds)> pause = [](std::chrono::microseconds time) {
    std::this_thread::sleep_for(time);
  };
};

class NcclTransport final : public Transport {
 public:
  explicit NcclTransport(NcclSetup setup);
  ~NcclTransport() override;

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  Device device() const override { return setup_.device; }
  const char* name() const override { return "nccl"; }

  void begin(const Stream& stream, const Call& call) override;
  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override;
  void barrier() override;
  void abort(const std::string& reason) override;
  void check() override;
  void send_message(const std::string& message) override;
  std::string take_message(int from) override;
  std::unique_ptr<Transport> shrink(const std::vector<int>& excluded) override;
  std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout,
                                     std::vector<int>& survivors) override;  // in nccl_regroup.cpp
  // Without a store, as after a shrink: errors name fewer ranks, and calls are not compared.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override;
  Buffer exchange_memory(size_t bytes) override;  // in nccl_memory.cpp
  std::string library_obstacle() const override;
  void allreduce(const Stream& stream, const float* in, float* out, int64_t count, bool mean, uint64_t bytes,
                 const std::string& what) override;
  // In nccl_windows.cpp. The first question is collective, and blocks.
  std::string peer_obstacle(int group = 0) override;
  void run_over_peers(const Stream& stream, PeerWindows& windows, uint64_t bytes, const std::string& what,
                      const std::function<void(const Stream&)>& work) override;

 protected:
  std::shared_ptr<PeerWindows> make_peer_windows(int64_t half_bytes, int group) override;

 private:
  std::string doing(const std::string& what) const;
  // Fails the group with `cause`, waits until the watching thread has told the peers, then throws.
  [[noreturn]] void give_up(const std::string& what, const std::string& cause);
  void throw_if_failed(const std::string& what);
  void compare(const Call& call);
  // Set-up for which NCCL needs all ranks is a call, too, so that a rank that is alone in it hears of that.
  void begin_set_up(const std::string& what);
  std::string other_call(const WatchedExchange& stalled);
  bool failing();
  // What to make a transport of the communicator that `make` makes of this one; nothing if it makes none for this rank.
  // `doing` is for error texts.
  std::optional<NcclSetup> derive(
      const std::string& doing,
      const std::function<ncclResult_t(ncclComm_t parent, ncclComm_t* child, ncclConfig_t* config)>& make);
  NcclSetup without(std::vector<int> excluded);
  NcclSetup again();  // the same ranks
  std::unique_ptr<ExchangeMark> mark_for(const Stream& stream);
  // Whether the exchange has a transfer to or from a peer for the first time; if so, it is no longer the first.
  bool meets(const std::vector<Transfer>& transfers);
  // Calls NCCL to enqueue something on `stream`, and has it watched. `transfers` are what error texts say of it.
  // `first`: it may connect to peers, which waits for them, on a thread that may outlive this call; else it does not.
  using NcclCall = std::function<ncclResult_t(ncclComm_t, const NcclPatience&)>;
  void post(const Stream& stream, const std::string& what, const std::vector<Transfer>& transfers,
            uint64_t bytes, bool first, const NcclCall& call);
  ncclResult_t enqueue(const std::string& what, const std::vector<Transfer>& transfers, bool first,
                       const NcclCall& call);
  // Received in equal parts from each of these ranks but this one.
  std::vector<Transfer> from_all(int first, int ranks, uint64_t bytes) const;
  void keep_watch(std::unique_ptr<ExchangeMark> mark, const std::string& what,
                  std::vector<Transfer> transfers);

  // Calls NCCL beside this thread, for as long as an exchange may take; false if it did not return, or may not be
  // called any more.
  bool ask_nccl(std::function<void(ncclComm_t)> call) const;
  WhileAlive while_alive() const;
  std::shared_ptr<NcclMemory> registered_memory(size_t bytes);  // null if NCCL refuses
  std::string reported_by_kernels();                            // with mutex_ held
  bool agreed(bool mine);

  // How often the watching thread looks while exchanges are in flight.
  static constexpr std::chrono::milliseconds kLookEvery{20};
  // How long a call that is being made may take to return before the communicator is ended around it.
  static constexpr std::chrono::milliseconds kGrace{200};

  // nccl_watch.cpp: the watching thread.
  void join_watches();
  void watch();
  std::string nccl_error(std::chrono::milliseconds patience);
  std::string tell_the_group(const std::string& cause);
  void end_communicator();

  bool drained();
  void heard(const std::string& cause, bool from_group);

  // Who is using the communicator: one call at a time, and none concurrently with its end, unless a call is stuck in
  // NCCL. Outlives this if a call or an abort never returns.
  struct Use {
    bool enter(std::chrono::milliseconds patience);  // false: ended, or in use for longer than that
    void leave();

    std::mutex mutex;
    std::condition_variable changed;
    int waiting = 0;
    bool busy = false;    // a call is being made
    bool closed = false;  // no further call may begin
    bool ended = false;   // the watching thread is done with the communicator
  };
  // For the length of a call.
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
  int rank_ = 0, world_ = 1;

  // Used only by the thread that makes the calls.
  uint64_t calls_ = 0, exchanges_ = 0, rolling_ = 0;
  std::string call_;
  std::set<uint64_t> known_calls_;
  std::atomic<bool> comparing_ = false;  // the store is answering this thread
  struct Met {
    bool sent = false, received = false;
  };
  std::vector<Met> met_;                       // by peer
  bool met_library_ = false;                   // in an allreduce of NCCL's own
  std::map<int, std::string> peer_obstacles_;  // by group

  std::atomic<ncclComm_t> comm_ = nullptr;  // null: aborted
  std::atomic<bool> revoked_ = false;

  std::mutex shared_mutex_;           // of the next two
  std::weak_ptr<NcclMemory> shared_;  // small exchange_memory() comes from here next
  size_t shared_used_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<PeerWindows>> windows_;
  ExchangesInFlight in_flight_;
  // The call of NCCL that the caller's thread is in.
  struct InNccl {
    SteadyClock::time_point since;
    const std::string* what;
    const std::vector<Transfer>* transfers;
  };
  std::optional<InNccl> in_nccl_;
  std::vector<std::unique_ptr<ExchangeMark>> spare_;
  std::optional<std::string> cause_;  // a failure that the watching thread has yet to handle
  bool cause_from_group_ = false;
  std::string failure_;  // final
  std::string standing_ = "joining";
  bool stop_ = false;
  Thread watcher_;
};

}  // namespace gradwire
