// The NCCL transport on top of NCCL's functions and stream marks, without CUDA. nccl.cpp supplies the real
// functions; tests supply other functions.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/net/quorum.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/nccl/nccl_call_sequence.h"
#include "collectives/transport/nccl/nccl_communicator.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// The state by which a group's survivors find each other.
struct NcclQuorum {
  std::shared_ptr<Quorum> quorum;
  GroupOptions group;
  std::string address;                // the address of this machine
  std::vector<std::string> contacts;  // the contacts of the ranks' quorums, by rank
};
// Exchanges the quorums' contacts among all ranks of `group`, and returns them by rank. `quorum`: null if the
// group must not survive failures. Collective. Throws CommError if only some ranks have a quorum.
std::vector<std::string> exchange_contacts(Membership& group, const Quorum* quorum,
                                           SteadyClock::time_point deadline);

struct NcclSetup {
  const NcclApi* api = nullptr;
  std::shared_ptr<GpuCalls> gpu;
  ncclComm_t comm = nullptr;
  bool owned = true;
  bool shrinkable = false;
  Device device;
  std::chrono::milliseconds timeout{60'000};  // 0: exchanges are not watched
  std::unique_ptr<Membership> group = nullptr;
  std::optional<NcclQuorum> regrouping = std::nullopt;
  // Sleeps between polls of non-blocking communicators.
  NcclCommunicator::Pause pause = [](std::chrono::microseconds time) { std::this_thread::sleep_for(time); };
};

class NcclTransport final : public Transport {
 public:
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
  std::unique_ptr<Transport> regroup(std::chrono::milliseconds timeout,
                                     std::vector<int>& survivors) override;  // defined in nccl.cpp

 private:
  NcclTransport(std::unique_ptr<NcclCommunicator> comm, NcclSetup setup);
  void join_group();
  // Returns the setup of a transport on a communicator derived from this transport's.
  NcclSetup derived(ncclComm_t comm) const;
  // Returns the setup of a group without the ranks `excluded` of this group.
  NcclSetup without(std::vector<int> excluded);
  // Returns whether some transfer is the first transfer to or from its peer, and records the transfers'
  // peers.
  bool connects(const std::vector<Transfer>& transfers);
  // Calls NCCL to enqueue work on `stream`, and watches the work. `transfers` describe the work in error
  // texts. `first`: the call may connect to peers and wait for them, so the call runs on a thread that may
  // outlive this function.
  void post(const Stream& stream, const std::string& what, const std::vector<Transfer>& transfers,
            uint64_t bytes, bool first, const NcclCommunicator::Call& call);
  ncclResult_t enqueue(const std::string& what, const std::vector<Transfer>& transfers, bool first,
                       const NcclCommunicator::Call& call);
  // Exchanges one byte with every rank: all[r] is rank r's byte. The bytes are not counted as sent.
  void exchange_bytes(const Stream& stream, uint8_t* all, const ExchangeLabel& label);
  void watch(std::unique_ptr<ExchangeMark> mark, const std::string& what, std::vector<Transfer> transfers);

  struct Connected {
    bool sent = false, received = false;
  };

  const RunningClock::Watch deadline_watch_;
  NcclSetup setup_;  // comm_ has its communicator
  const std::unique_ptr<NcclCommunicator> comm_;
  NcclCallSequence calls_;
  NcclWatch watch_;
  // Used only by the thread that makes calls.
  uint64_t exchanges_ = 0;
  std::vector<Connected> connected_;  // connections by peer
  bool allreduce_connected_ = false;
};

}  // namespace gradwire
