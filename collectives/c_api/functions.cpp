// The functions of gradwire.h: each checks its arguments and handles, takes the lock, and forwards.
#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "collectives/c_api/caller_store.h"
#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "collectives/c_api/handles.h"
#include "collectives/c_api/reducer.h"
#include "collectives/c_api/request.h"
#include "collectives/c_api/structs.h"
#include "collectives/c_api/text.h"
#include "collectives/gradwire.h"
#include "collectives/transport/nccl.h"
#include "collectives/transport/tcp.h"
#include "collectives/transport/transport.h"
#include "runtime/running_clock.h"

namespace {

using namespace gradwire;
using namespace gradwire::c_api;

// A live reducer, locked for the duration of a call.
struct LockedReducer {
  explicit LockedReducer(gw_reducer handle) : reducer(reducers().get(handle)) {
    reducer->comm->check_caller();
    lock = std::unique_lock(reducer->comm->mutex);
  }
  ApiReducer* operator->() const { return reducer.get(); }
  std::shared_ptr<ApiReducer> reducer;
  std::unique_lock<std::mutex> lock;
};

std::chrono::milliseconds checked_timeout(int64_t timeout_ms) {
  require(timeout_ms > 0, "timeout_ms is {}, must be positive", timeout_ms);
  return std::chrono::milliseconds(std::min<int64_t>(timeout_ms, INT_MAX));
}

// For the calls that gw_cancellable() names.
void refuse_cancelled() {
  if (RunningClock::cancelled()) throw CommError("cancelled before it began, by the flag of gw_cancellable()");
}

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

// From gw_secret(), gw_shrinkable() and gw_listen(), for this thread's next communicator.
struct Next {
  std::string secret;
  bool shrinkable = false;
  std::string interface;
  PortRange ports = {};

  TcpOptions tcp(GroupOptions group) const {
    return {.group = processes(std::move(group)), .shrinkable = shrinkable};
  }
  GroupOptions processes(GroupOptions group) const {
    group.secret = secret;
    group.interface = interface;
    group.ports = ports;
    return group;
  }
};
thread_local Next next;
Next take_next() {
  return std::exchange(next, {});
}

void check_rank(int rank, int world) {
  require(world >= 1 && world <= kMostRanks, "world is {}; it must be from 1 to {}", world, kMostRanks);
  require(rank >= 0 && rank < world, "rank is {} in a world of {}", rank, world);
}

// What a process that joins says of itself: another version may sum with other bits.
constexpr const char* kAbout = "Gradwire " GRADWIRE_VERSION;

constexpr const char* kWhoShrinks =
    "only processes that meet through tcp://, file:// or a store can be shrinkable";

// Processes that meet as `group` says.
std::unique_ptr<Communicator> join_processes(GroupOptions group, const Next& how, Device device) {
  if (device.is_host()) return Communicator::create_tcp(how.tcp(std::move(group)));
  require_nccl();
  return Communicator::create_nccl(
      {.group = how.processes(std::move(group)), .device = device.index, .shrinkable = how.shrinkable});
}

std::unique_ptr<Communicator> join(const char* rendezvous, GroupOptions group, const Next& how,
                                   Device device) {
  if (group.world == 1) return Communicator::create_single(device);
  require(rendezvous != nullptr, "rendezvous is null and world is {}", group.world);
  const std::string text = group.rendezvous = rendezvous;
  if (text.starts_with("tcp://") || text.starts_with("file://")) {
    return join_processes(std::move(group), how, device);
  }
  if (how.shrinkable) throw Unsupported(kWhoShrinks);
  constexpr std::string_view kLocal = "local://";
  if (text.starts_with(kLocal)) {
    require(text.size() > kLocal.size(), "rendezvous 'local://' lacks a name");
    return join_local_group(text.substr(kLocal.size()), group.rank, group.world, device, group.timeout);
  }
  if (text == "nccl://") {
    if (device.is_cuda()) return join_processes(std::move(group), how, device);
    throw BadInput("rendezvous 'nccl://' is for CUDA devices, and device is GW_HOST");
  }
  throw BadInput(
      fmt::format("rendezvous '{}' is none of tcp://HOST:PORT, file:///PATH, nccl://, local://NAME", text));
}

}  // namespace

extern "C" {

gw_status gw_secret(const char* secret) {
  return guarded(__func__, [&] {
    require(secret == nullptr || *secret != 0, "the secret is empty");
    next.secret = secret == nullptr ? "" : secret;
  });
}

gw_status gw_listen(const char* interface, int first_port, int last_port) {
  return guarded(__func__, [&] {
    const PortRange ports{first_port, last_port};
    check_ports("gw_listen()", ports);
    const std::string name = interface == nullptr ? "" : interface;
    if (!name.empty()) address_of_interface(name);  // throws if there is none
    next.interface = name;
    next.ports = ports;
  });
}

gw_status gw_comm_create(const char* rendezvous, int rank, int world, int device, int64_t timeout_ms,
                         gw_comm* comm) {
  return guarded(__func__, [&] {
    require(comm != nullptr, "comm is null");
    check_rank(rank, world);
    const auto timeout = checked_timeout(timeout_ms);
    refuse_cancelled();
    const Device where = checked_device(device);
    auto joined = join(rendezvous, {.rendezvous = "", .rank = rank, .world = world, .timeout = timeout},
                       take_next(), where);
    *comm = static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(joined))));
  });
}

gw_status gw_comm_from_store(const gw_store* store, int rank, int world, int device, int64_t timeout_ms,
                             gw_comm* comm) {
  return guarded(__func__, [&] {
    const Next how = take_next();
    require(comm != nullptr, "comm is null");
    const gw_store checked = checked_store(store);
    check_rank(rank, world);
    const auto timeout = checked_timeout(timeout_ms);
    refuse_cancelled();
    const Device where = checked_device(device);
    GroupOptions group{.rendezvous = "the caller's store", .rank = rank, .world = world, .timeout = timeout};
    group.board = board_of_store(checked, timeout);
    auto joined =
        world == 1 ? Communicator::create_single(where) : join_processes(std::move(group), how, where);
    *comm = static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(joined))));
  });
}

gw_status gw_comm_from_nccl(void* nccl_comm, int device, int64_t timeout_ms, gw_comm* comm) {
  return guarded(__func__, [&] {
    require(comm != nullptr, "comm is null");
    require(nccl_comm != nullptr, "nccl_comm is null");
    require(device >= 0, "device {} is not a CUDA device", device);
    const auto timeout = checked_timeout(timeout_ms);
    require_nccl();
    checked_device(device);
    auto made = std::make_shared<ApiComm>(Communicator::adopt_nccl(nccl_comm, device, timeout));
    *comm = static_cast<gw_comm>(comms().add(std::move(made)));
  });
}

gw_status gw_comm_split(gw_comm comm, int color, int key, gw_comm* part) {
  return guarded(__func__, [&] {
    require(part != nullptr, "part is null");
    LockedComm locked(comm);
    Communicator& group = *locked->communicator;
    std::unique_ptr<Communicator> made = group.split(color, key);
    *part = made == nullptr ? nullptr
                            : static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(made))));
  });
}

gw_status gw_shrinkable(int on) {
  return guarded(__func__, [&] { next.shrinkable = on != 0; });
}

gw_status gw_comm_shrink(gw_comm comm, int64_t timeout_ms, gw_comm* rest, int32_t* ranks, int32_t capacity) {
  return guarded(__func__, [&] {
    require(rest != nullptr, "rest is null");
    const auto timeout = checked_timeout(timeout_ms);
    refuse_cancelled();
    LockedComm locked(comm);
    Communicator& group = *locked->communicator;
    require(ranks == nullptr || capacity >= group.world(), "capacity is {} in a world of {}", capacity,
            group.world());
    std::vector<int> survivors;
    auto made = std::make_shared<ApiComm>(group.regroup(timeout, survivors));
    *rest = static_cast<gw_comm>(comms().add(std::move(made)));
    if (ranks == nullptr) return;
    std::copy_n(survivors.begin(), std::min(survivors.size(), static_cast<size_t>(capacity)), ranks);
  });
}

gw_status gw_comm_admit(gw_comm comm, int32_t most) {
  return guarded(__func__, [&] {
    require(most >= 0 && most <= kMostRanks, "most is {}; it must be from 0 to {}", most, kMostRanks);
    LockedComm locked(comm);
    Transport& transport = locked->communicator->transport();
    if (most == 0) return transport.close_door();
    transport.open_door(most, [](const std::string& about) {
      return about == kAbout ? "" : fmt::format("it is {} there, {} here", about, kAbout);
    });
  });
}

gw_status gw_comm_doors(gw_comm comm, char* text, size_t capacity, size_t* bytes) {
  return guarded(__func__, [&] {
    require(bytes != nullptr, "bytes is null");
    require(text != nullptr || capacity == 0, "text is null, and capacity is {}", capacity);
    LockedComm locked(comm);
    const std::string doors = locked->communicator->transport().doors();
    if (doors.empty()) throw BadInput("the group was not made to take new ranks: see gw_shrinkable()");
    *bytes = doors.size() + 1;
    if (capacity >= *bytes) std::memcpy(text, doors.c_str(), *bytes);
  });
}

gw_status gw_comm_waiting(gw_comm comm, int32_t* processes) {
  return guarded(__func__, [&] {
    require(processes != nullptr, "processes is null");
    LockedComm locked(comm);
    *processes = locked->communicator->transport().knocking();
  });
}

gw_status gw_comm_grow(gw_comm comm, gw_comm* grown) {
  return guarded(__func__, [&] {
    require(grown != nullptr, "grown is null");
    LockedComm locked(comm);
    std::unique_ptr<Communicator> made = locked->communicator->grow();
    *grown = made == nullptr ? nullptr
                             : static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(made))));
  });
}

gw_status gw_comm_join(const char* doors, int64_t timeout_ms, gw_comm* comm) {
  return guarded(__func__, [&] {
    const Next how = take_next();
    require(doors != nullptr, "doors is null");
    require(comm != nullptr, "comm is null");
    const auto timeout = checked_timeout(timeout_ms);
    refuse_cancelled();
    auto joined = Communicator::join_tcp(
        how.tcp({.rendezvous = "", .timeout = timeout}),
        {.read = [text = std::string(doors)] { return text; }, .about = kAbout, .longest = timeout});
    *comm = static_cast<gw_comm>(comms().add(std::make_shared<ApiComm>(std::move(joined))));
  });
}

gw_status gw_comm_query(gw_comm comm, gw_comm_info* info) {
  return guarded(__func__, [&] {
    require(info != nullptr, "info is null");
    LockedComm locked(comm);
    Communicator& group = *locked->communicator;
    const Device device = group.device();
    const gw_comm_info found{.size = sizeof(gw_comm_info),
                             .rank = group.rank(),
                             .world = group.world(),
                             .device = device.is_host() ? GW_HOST : device.index,
                             .ranks_per_node = group.ranks_per_node(),
                             .bytes_sent = group.bytes_sent(),
                             .transport = group.transport().name()};
    write_struct(found, info, "gw_comm_info");
  });
}

gw_status gw_comm_set_ranks_per_node(gw_comm comm, int ranks_per_node) {
  return guarded(__func__, [&] { LockedComm(comm)->communicator->set_ranks_per_node(ranks_per_node); });
}

gw_status gw_comm_check(gw_comm comm) {
  return guarded(__func__, [&] { LockedComm(comm)->communicator->check(); });
}

gw_status gw_comm_abort(gw_comm comm, const char* reason) {
  return guarded(__func__, [&] {
    auto object = comms().get(comm);
    object->check_process();
    // No lock: its holder may be waiting for the operation that is aborted here.
    object->communicator->abort(reason != nullptr && *reason != '\0' ? printable(reason)
                                                                     : "gw_comm_abort was called");
  });
}

gw_status gw_cancellable(const volatile int32_t* flag) {
  return guarded(__func__, [&] { RunningClock::cancel_by(flag); });
}

gw_status gw_comm_destroy(gw_comm comm) {
  return guarded(__func__, [&] {
    if (comm == nullptr) return;
    comms().get(comm)->check_caller();
    comms().remove(comm);
  });
}

gw_status gw_call_tag(gw_comm comm, const char* tag) {
  return guarded(__func__, [&] {
    comms().get(comm)->check_process();
    set_tag(comm, tag);
  });
}

gw_status gw_reducer_create(gw_comm comm, const char* spec, const gw_tensor* tensors, int32_t n_tensors,
                            const gw_reducer_options* options, gw_reducer* reducer) {
  return guarded(__func__, [&] {
    const std::string tag = take_tag(comm);
    LockedComm locked(comm);
    require(reducer != nullptr, "reducer is null");
    require(spec != nullptr, "spec is null; pass \"fp32\" for no compression");
    const CompressionSpec parsed = CompressionSpec::parse(spec);
    std::vector<void*> grads;
    auto read = read_tensors(tensors, n_tensors, &grads);
    ReducerOptions how = read_options(options);
    how.stream = locked->stream;
    agree_on_reducer(*locked.comm, parsed, read, how, tag);
    how.name = fmt::format("reducer {}{}", locked->next_reducer(), quoted(tag));
    auto made = std::make_shared<ApiReducer>(locked.comm, parsed, std::move(read), how);
    made->set_addresses(grads);
    *reducer = static_cast<gw_reducer>(reducers().add(std::move(made)));
  });
}

gw_status gw_reducer_allreduce(gw_reducer reducer, void* const* grads, void* stream) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    CallRequest request(*locked->comm);
    locked->allreduce(grads, stream);
    request.start();
    locked->in_flight = request.get();
  });
}

gw_status gw_reducer_ready(gw_reducer reducer, int32_t tensor, void* stream) {
  return guarded(__func__, [&] { LockedReducer(reducer)->ready(tensor, stream); });
}

gw_status gw_reducer_wait(gw_reducer reducer, void* stream) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    CallRequest request(*locked->comm);
    locked->wait(stream);
    request.start();
    locked->in_flight = request.get();
  });
}

gw_status gw_reducer_shards(gw_reducer reducer, gw_range* ranges, int32_t capacity, int32_t* count) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(count != nullptr, "count is null");
    require(capacity >= 0 && (ranges != nullptr || capacity == 0),
            "ranges is null, or capacity {} is negative", capacity);
    const std::vector<gw_range> all = locked->shards();
    std::copy_n(all.begin(), std::min(all.size(), static_cast<size_t>(capacity)), ranges);
    *count = static_cast<int32_t>(all.size());
  });
}

gw_status gw_reducer_stats(gw_reducer reducer, gw_stats* stats) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(stats != nullptr, "stats is null");
    write_struct(locked->stats(), stats, "gw_stats");
  });
}

gw_status gw_reducer_state_size(gw_reducer reducer, size_t* size) {
  return guarded(__func__, [&] {
    LockedReducer locked(reducer);
    require(size != nullptr, "size is null");
    *size = locked->state_size();
  });
}

gw_status gw_reducer_state_save(gw_reducer reducer, void* state, size_t size) {
  return guarded(__func__, [&] { LockedReducer(reducer)->save_state(state, size); });
}

gw_status gw_reducer_state_load(gw_reducer reducer, const void* state, size_t size) {
  return guarded(__func__, [&] { LockedReducer(reducer)->load_state(state, size); });
}

gw_status gw_reducer_state_load_ranks(gw_reducer reducer, const void* const* states, const size_t* sizes,
                                      int32_t n) {
  return guarded(__func__, [&] { LockedReducer(reducer)->load_states(states, sizes, n); });
}

gw_status gw_reducer_destroy(gw_reducer reducer) {
  return guarded(__func__, [&] {
    if (reducer == nullptr) return;
    reducers().get(reducer)->comm->check_caller();
    reducers().remove(reducer);
  });
}

}  // extern "C"
