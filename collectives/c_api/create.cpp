#include "collectives/c_api/create.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "collectives/c_api/caller_store.h"
#include "collectives/c_api/errors.h"
#include "collectives/net/interfaces.h"
#include "collectives/net/listener.h"
#include "collectives/net/secret.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/transport.h"

namespace gradwire::c_api {
namespace {

constexpr const char* kWhoShrinks =
    "only processes that join through tcp://, file:// or a store can be shrinkable";

Device checked_device(int device) {
  if (device == GW_HOST) return Device::host();
  require(device >= 0, "device {} is neither GW_HOST nor a CUDA device", device);
  if (device >= cuda_device_count()) {
    const std::string reason = cuda_unavailable_reason();
    throw DeviceError(fmt::format("device {}: {} CUDA devices are usable{}", device, cuda_device_count(),
                                  reason.empty() ? "" : " (" + reason + ")"));
  }
  return Device::cuda(device);
}

void require_nccl() {
  const std::string reason = nccl_unavailable_reason();
  if (!reason.empty()) throw Unsupported(reason);
}

// Throws BadInput if the options set a rank. Called for groups that assign the ranks.
void require_no_ranks(const gw_comm_options& o, const char* field) {
  require(o.rank == 0 && o.world == 0, "rank is {} and world is {}; with gw_comm_options.{} both must be 0",
          o.rank, o.world, field);
}

GroupOptions group_of(const gw_comm_options& o) {
  const PortRange ports{o.ports[0], o.ports[1]};
  check_ports("gw_comm_options", ports);
  const std::string interface = o.interface == nullptr ? "" : o.interface;
  if (!interface.empty()) address_of_interface(interface);  // throws if it does not exist
  GroupOptions group{.rendezvous = "", .timeout = checked_timeout(o.timeout_ms)};
  if (o.world > 0) group.rank = o.rank, group.world = o.world;  // otherwise the group assigns rank and world
  if (o.secret != nullptr) group.secret = checked_secret("gw_comm_options.secret", o.secret);
  group.interface = interface;
  group.ports = ports;
  return group;
}

// Connects the processes through the group's rendezvous. Returns this rank's communicator.
std::unique_ptr<Communicator> connect_processes(GroupOptions group, bool shrinkable, Device device) {
  if (device.is_host()) {
    return Communicator::create_tcp({.group = std::move(group), .shrinkable = shrinkable});
  }
  require_nccl();
  return Communicator::create_nccl(
      {.group = std::move(group), .device = device.index, .shrinkable = shrinkable});
}

std::unique_ptr<Communicator> join_group(const gw_comm_options& o, GroupOptions group, Device device) {
  require(o.rendezvous != nullptr, "rendezvous is null and world is {}", group.world);
  const std::string text = group.rendezvous = o.rendezvous;
  if (text.starts_with("tcp://") || text.starts_with("file://")) {
    return connect_processes(std::move(group), o.shrinkable != 0, device);
  }
  if (o.shrinkable != 0) throw Unsupported(kWhoShrinks);
  constexpr std::string_view kLocal = "local://";
  if (text.starts_with(kLocal)) {
    require(text.size() > kLocal.size(), "rendezvous 'local://' lacks a name");
    return join_local_group(text.substr(kLocal.size()), group.rank, group.world, device, group.timeout);
  }
  if (text == "nccl://") {
    if (device.is_cuda()) return connect_processes(std::move(group), false, device);
    throw BadInput("rendezvous 'nccl://' is for CUDA devices, and device is GW_HOST");
  }
  throw BadInput(
      fmt::format("rendezvous '{}' is none of tcp://HOST:PORT, file:///PATH, nccl://, local://NAME", text));
}

std::unique_ptr<Communicator> join_through_store(const gw_comm_options& o, GroupOptions group,
                                                 Device device) {
  const gw_store store = checked_store(o.store);
  if (group.world == 1) return Communicator::create_single(device);
  group.rendezvous = "the caller's store";
  group.callbacks = callbacks_of_store(store, group.timeout);
  return connect_processes(std::move(group), o.shrinkable != 0, device);
}

std::unique_ptr<Communicator> adopt(const gw_comm_options& o, const GroupOptions& group) {
  require_no_ranks(o, "nccl_comm");
  require(o.device >= 0, "device {} is not a CUDA device", o.device);
  if (o.shrinkable != 0) throw Unsupported(kWhoShrinks);
  require_nccl();
  checked_device(o.device);
  auto adopted = Communicator::adopt_nccl(o.nccl_comm, o.device, group.timeout);
  adopted->set_ranks_per_node(o.ranks_per_node);
  return adopted;
}

std::unique_ptr<Communicator> accept_invitation(const gw_comm_options& o, const GroupOptions& group) {
  require_no_ranks(o, "invitation");
  require(o.ranks_per_node == 0, "ranks_per_node is {}; it must be 0 with an invitation", o.ranks_per_node);
  if (o.device != GW_HOST) {
    throw Unsupported(
        fmt::format("device is {}; processes can only join a running group on the host: set "
                    "gw_comm_options.device to GW_HOST",
                    o.device));
  }
  return Communicator::join_tcp({.group = group},
                                {.invitation = [text = std::string(o.invitation)] { return text; },
                                 .about = kAbout,
                                 .longest = group.timeout});
}

}  // namespace

std::chrono::milliseconds checked_timeout(int64_t timeout_ms) {
  require(timeout_ms > 0, "timeout_ms is {}, must be positive", timeout_ms);
  return std::chrono::milliseconds(std::min<int64_t>(timeout_ms, INT_MAX));
}

void CancelledBy::refuse() {
  if (RunningClock::cancelled()) throw CommError("cancelled before it began: *cancel is not 0");
}

std::unique_ptr<Communicator> create(const gw_comm_options& o) {
  const int ways =
      (o.rendezvous != nullptr) + (o.store != nullptr) + (o.nccl_comm != nullptr) + (o.invitation != nullptr);
  require(ways <= 1,
          "{} of gw_comm_options.rendezvous, .store, .nccl_comm and .invitation are set; set one of them",
          ways);
  const GroupOptions group = group_of(o);
  const CancelledBy cancelled_by(o.cancel);
  CancelledBy::refuse();
  if (o.nccl_comm != nullptr) return adopt(o, group);
  if (o.invitation != nullptr) return accept_invitation(o, group);
  require(o.world >= 1 && o.world <= kMostRanks, "world is {}; it must be from 1 to {}", o.world, kMostRanks);
  require(o.rank >= 0 && o.rank < o.world, "rank is {} in a world of {}", o.rank, o.world);
  const Device device = checked_device(o.device);
  std::unique_ptr<Communicator> made = o.store != nullptr ? join_through_store(o, group, device)
                                       : o.world == 1     ? Communicator::create_single(device)
                                                          : join_group(o, group, device);
  made->set_ranks_per_node(o.ranks_per_node);
  return made;
}

}  // namespace gradwire::c_api
