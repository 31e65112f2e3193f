#include "collectives/transport/local/local.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/transport/local/local_exchange.h"
#include "collectives/transport/local/local_hub.h"
#include "collectives/transport/local/local_peers.h"
#include "runtime/device/capture.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

class LocalTransport final : public Transport {
 public:
  // On CUDA, waits_ would measure the time to enqueue.
  LocalTransport(std::shared_ptr<LocalHub> hub, int rank, Device device)
      : Transport("local", {rank, hub->world, device, device.is_host()}),
        hub_(std::move(hub)),
        peers_(*hub_, rank) {
    peers_.on_sent = [this](uint64_t bytes) { count_sent(bytes); };
  }

  void begin_call(const Stream& stream, const Call& call) override {
    auto begin = [this, &call] { hub_->begin_call(rank(), ++call_, call); };
    peers_.count_call(Capture::current() != nullptr);
    device().is_host() ? stream.submit(begin) : begin();
  }

  void exchange(const Stream& stream, const std::vector<Transfer>& transfers,
                const ExchangeLabel& label) override {
    if (transfers.empty()) return;
    if (device().is_host()) {
      stream.submit([this, &transfers, &label] { run_exchange(nullptr, transfers, label); });
    } else {
      run_exchange(&stream, transfers, label);
    }
  }

  std::string capture_obstacle() const override {
    if (device().is_host() || world() == 1) return "";
    return "ranks of one process on GPUs wait for each other on the host in each exchange; start one process "
           "per rank (torchrun, srun or mpirun)";
  }

  void barrier() override { hub_->barrier(rank()); }

  // The first member to arrive makes the transports of all members.
  std::unique_ptr<Transport> split(const std::vector<int>& members) override {
    const int number = splits_++;
    if (members.empty()) return nullptr;
    std::lock_guard lock(hub_->mutex);
    const auto group = hub_->splits.try_emplace({number, members.front()}).first;
    auto& transports = group->second;
    if (transports.empty()) {
      std::vector<Device> devices;
      for (int r : members) devices.push_back(hub_->devices[static_cast<size_t>(r)]);
      transports = make_local_transports(devices, hub_->timeout);
    }
    const auto me = std::find(members.begin(), members.end(), rank()) - members.begin();
    std::unique_ptr<Transport> mine = std::move(transports[static_cast<size_t>(me)]);
    if (std::none_of(transports.begin(), transports.end(), [](const auto& t) { return t != nullptr; })) {
      hub_->splits.erase(group);
    }
    return mine;
  }

  PeerAccess* peer_access() override { return &peers_; }

  void abort(const std::string& reason) override {
    std::lock_guard lock(hub_->mutex);
    hub_->fail(fmt::format("rank {} gave up: {}", rank(), reason));
  }
  void check() override { hub_->check(rank()); }

 private:
  void run_exchange(const Stream* stream, const std::vector<Transfer>& transfers,
                    const ExchangeLabel& label) {
    const std::string doing = call_ == 0 ? label.what : fmt::format("call {}, {}", call_, label.what);
    LocalExchange exchange(*hub_, rank(), stream, label, doing);
    exchange.run(transfers, waits_);
    count_sent(exchange.bytes());
  }

  const std::shared_ptr<LocalHub> hub_;
  uint64_t call_ = 0;  // number of the current call; used only by the thread that runs exchanges
  int splits_ = 0;
  LocalPeers peers_;
};

}  // namespace

std::string sharing_obstacle(const std::vector<Device>& devices, bool lazily) {
  if (!lazily) return "";
  for (const Device& d : devices) {
    const auto ranks = std::count(devices.begin(), devices.end(), d);
    if (d.is_host() || ranks == 1) continue;
    return fmt::format(
        "{} ranks share {}, where loading a kernel may wait for one that waits for another rank; set "
        "CUDA_MODULE_LOADING=EAGER in the environment, or give each rank a GPU",
        ranks, d.name());
  }
  return "";
}

std::vector<std::unique_ptr<Transport>> make_local_transports(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout) {
  if (devices.empty()) throw BadInput("a local group needs at least one rank");
  for (Device d : devices) {
    if (d.kind != devices[0].kind)
      throw BadInput("ranks of one process must all be on the host or all on CUDA devices");
  }
  for (Device from : devices) {
    for (Device to : devices) enable_access(from, to);  // each rank copies from its peers' memory
  }
  auto hub = std::make_shared<LocalHub>(devices, timeout);
  std::vector<std::unique_ptr<Transport>> transports;
  for (size_t r = 0; r < devices.size(); ++r) {
    transports.push_back(std::make_unique<LocalTransport>(hub, static_cast<int>(r), devices[r]));
  }
  return transports;
}

}  // namespace gradwire
