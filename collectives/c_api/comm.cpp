#include "collectives/c_api/comm.h"

#include <unistd.h>

#include <climits>
#include <condition_variable>
#include <optional>

#include "collectives/c_api/errors.h"
#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/reach.h"
#include "collectives/net/store.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/registered.h"
#include "runtime/threads/thread.h"

namespace gradwire::c_api {

namespace {

// Limits of the cache of programs. On a GPU the cache has a program for each address: FSDP2 makes two or
// three collectives for each of its groups, and PyTorch's allocator uses several addresses for each
// collective.
constexpr size_t kProgramsKept = 256, kProgramsKeptOnCuda = 4096;
constexpr size_t kCallerStreamsKept = 64;

}  // namespace

Handles<ApiComm>& comms() {
  static auto* handles = new Handles<ApiComm>(1, "communicator");
  return *handles;
}

ApiComm::ApiComm(std::unique_ptr<Communicator> c)
    : communicator(std::move(c)),
      process_(getpid()),
      programs_(communicator->device().is_cuda() ? kProgramsKeptOnCuda : kProgramsKept,
                [this](size_t bytes) { return Buffer(communicator->device(), bytes); }),
      step_(make_buffer<uint64_t>(communicator->device(), 1)),
      start_(Event::create(communicator->device())),
      done_(Event::create(communicator->device())),
      stream(Stream::create(communicator->device(), "communicate", Stream::Priority::high)) {
  fill_zero(stream, step_.data(), step_.bytes());
  stream.synchronize();
}

ApiComm::~ApiComm() {
  for (const Stream& busy : {stream, requests_}) {
    if (!busy) continue;
    try {
      busy.synchronize();
    } catch (...) {  // reported by the call that waited for the failed operation
    }
  }
  communicator->finish_transfers();
}

void ApiComm::check_process() const {
  require<BadHandle>(
      getpid() == process_,
      "the handle belongs to process {}, and this is a fork of it; create communicators after forking",
      process_);
}

void ApiComm::check_caller() const {
  check_process();
  require(!in_format_callback(),
          "called by a wire format's encode or decode, for which this call would wait");
}

void ApiComm::wait_or_notify(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const BadInput&) {
    throw;
  } catch (
      const std::exception& error) {  // notify the other ranks of any failure, even of a failed allocation
    bool notified = false;
    try {
      communicator->check();
    } catch (const CommError&) {
      notified = true;
    }
    if (!notified) communicator->abort(text_of(error));
    throw;
  }
}

Stream ApiComm::caller_stream(void* native) {
  const Device device = communicator->device();
  if (device.is_host()) {
    require(native == nullptr, "stream is not null, but the communicator is on the host; pass null");
    if (request == nullptr) return Stream::immediate_host();
    if (!requests_) requests_ = Stream::create(device, "requests");
    return requests_;
  }
  if (callers_.size() > kCallerStreamsKept)
    callers_.clear();  // bounds the map if the caller creates a stream per step
  auto [at, fresh] = callers_.try_emplace(native);
  if (fresh) at->second = Stream::adopt_cuda(device.index, static_cast<CudaStream>(native));
  require<Unsupported>(!at->second.is_captured(),
                       "the stream is being captured in a CUDA graph, whose launches would not repeat what "
                       "the host does in this call: call it outside of the capture");
  return at->second;
}

LockedComm::LockedComm(gw_comm handle) : comm(comms().get(handle)) {
  comm->check_caller();
  lock = std::unique_lock(comm->mutex);
}

namespace {

constexpr const char* kWhoShrinks =
    "only processes that join through tcp://, file:// or a store can be shrinkable";

Device checked_device(int device) {
  if (device == GW_HOST) return Device::host();
  require(device >= 0, "device {} is neither GW_HOST nor a CUDA device", device);
  if (device >= cuda_device_count()) {
    const std::string reason = cuda_unavailable_reason();
    throw DeviceError("device {}: {} CUDA devices are usable{}", device, cuda_device_count(),
                      reason.empty() ? "" : " (" + reason + ")");
  }
  return Device::cuda(device);
}

void require_nccl() {
  const std::string reason = nccl_unavailable_reason();
  require<Unsupported>(reason.empty(), "{}", reason);
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
    return std::make_unique<Communicator>(
        make_tcp_transport({.group = std::move(group), .shrinkable = shrinkable}));
  }
  require_nccl();
  return std::make_unique<Communicator>(
      make_nccl_transport({.group = std::move(group), .device = device.index, .shrinkable = shrinkable}));
}

// The rendezvous of "local://": threads of one process join under a name.

// A group for which some ranks have not joined yet.
struct Rendezvous {
  std::vector<std::optional<Device>> devices;  // [rank]; empty: has not joined
  int joined = 0;
  bool complete = false;
  std::string problem;  // the reason why the group could not be created
  std::vector<std::unique_ptr<Communicator>> communicators;
};

// Joins the group "local://NAME" of threads of one process. Returns this rank's communicator. Blocks until
// all ranks have joined.
std::unique_ptr<Communicator> join_local_group(const std::string& name, int rank, int world, Device device,
                                               std::chrono::milliseconds timeout) {
  const RunningClock::Watch watch;
  // Never destroyed: other threads may still wait while static destructors run.
  static auto& mutex = *new std::mutex;
  static auto& changed = *new std::condition_variable;
  static auto& by_name = *new std::map<std::string, std::shared_ptr<Rendezvous>>;
  std::unique_lock lock(mutex);
  auto& entry = by_name[name];
  if (!entry) {
    entry = std::make_shared<Rendezvous>();
    entry->devices.resize(world);
  }
  std::shared_ptr<Rendezvous> rendezvous = entry;
  const std::string who = fmt::format("local://{}, rank {}", name, rank);
  const size_t expected = rendezvous->devices.size();
  require(static_cast<int>(expected) == world, "{} has world {}, another rank has {}; pass the same world",
          who, world, expected);
  require(!rendezvous->devices[rank].has_value(), "{} has joined already; give each thread its own rank",
          who);
  rendezvous->devices[rank] = device;
  if (++rendezvous->joined == world) {
    std::vector<Device> devices;
    for (const auto& joined : rendezvous->devices) devices.push_back(*joined);
    try {
      rendezvous->communicators = Communicator::create_local(devices, timeout);
    } catch (const Error& error) {
      rendezvous->problem = error.what();
    }
    rendezvous->complete = true;
    by_name.erase(name);
    changed.notify_all();
  } else if (!wait_until(changed, lock, RunningClock::now() + timeout,
                         [&] { return rendezvous->complete; })) {
    std::string absent;
    for (int r = 0; r < world; ++r) {
      if (!rendezvous->devices[r]) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
    }
    rendezvous->devices[rank].reset();
    if (--rendezvous->joined == 0) by_name.erase(name);
    throw CommError("{} of {}: waited {} ms for rank {}", who, world, timeout.count(), absent);
  }
  if (!rendezvous->problem.empty()) throw BadInput(who + ": " + rendezvous->problem);
  return std::move(rendezvous->communicators[rank]);
}

std::unique_ptr<Communicator> join_group(const gw_comm_options& o, GroupOptions group, Device device) {
  require(o.rendezvous != nullptr, "rendezvous is null and world is {}", group.world);
  const std::string text = group.rendezvous = o.rendezvous;
  if (text.starts_with("tcp://") || text.starts_with("file://")) {
    return connect_processes(std::move(group), o.shrinkable != 0, device);
  }
  require<Unsupported>(o.shrinkable == 0, kWhoShrinks);
  constexpr std::string_view kLocal = "local://";
  if (text.starts_with(kLocal)) {
    require(text.size() > kLocal.size(), "rendezvous 'local://' lacks a name");
    return join_local_group(text.substr(kLocal.size()), group.rank, group.world, device, group.timeout);
  }
  if (text == "nccl://") {
    require(device.is_cuda(), "rendezvous 'nccl://' is for CUDA devices, and device is GW_HOST");
    return connect_processes(std::move(group), false, device);
  }
  throw BadInput("rendezvous '{}' is none of tcp://HOST:PORT, file:///PATH, nccl://, local://NAME", text);
}

// Returns a rendezvous through a caller's key-value store: rank 0 publishes a text under one key, and the
// other ranks read the key. Its functions throw CommError, which names the store, if a callback fails,
// returns another text than rank 0's, or does not return within `timeout` from now. Throws BadInput if a
// field of `given` is invalid.
RendezvousCallbacks callbacks_of_store(const gw_store* given, std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto store = read_struct<gw_store>(given, "gw_store");
  require(store.set != nullptr, "gw_store.set is null");
  require(store.get != nullptr, "gw_store.get is null");
  const std::string key = std::string(store.prefix == nullptr ? "" : store.prefix) + "gradwire/rendezvous";
  const auto deadline = SteadyClock::now() + timeout;
  const auto left_ms = [deadline] {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - SteadyClock::now());
    return std::max<int64_t>(left.count(), 1);
  };
  const auto check = [key, timeout, deadline](const char* function, const char* error) {
    if (error != nullptr) throw CommError("the store's {}('{}') failed: {}", function, key, error);
    // A get() that correctly times out returns slightly late; allow for it.
    constexpr milliseconds kLate{500};
    require<CommError>(SteadyClock::now() <= deadline + kLate,
                       "the store's {}('{}') returned too late: all ranks must join within {} ms", function,
                       key, timeout.count());
  };
  const auto publish = [=](const std::string& text) {
    check("set", store.set(store.user, key.c_str(), text.data(), text.size(), left_ms()));
  };
  const auto read = [=] {
    constexpr size_t kMaxBytes = size_t{64} << 10;  // an address takes up to 16 bytes
    std::string value(kMaxBytes, '\0');
    size_t bytes = 0;
    check("get", store.get(store.user, key.c_str(), left_ms(), value.data(), value.size(), &bytes));
    require<CommError>(bytes > 0,
                       "rank 0 has not set '{}' in the store within {} ms; is it running, and does every "
                       "rank use the same store and prefix?",
                       key, timeout.count());
    value.resize(std::min(bytes, kMaxBytes));
    require<CommError>(bytes <= kMaxBytes && !StoreLocation::parse(value).store.addresses.empty(),
                       "the store's '{}' ({} bytes) is not what rank 0 has set; does something else use this "
                       "key, or another version of the library?",
                       key, bytes);
    return value;
  };
  return {.address = "", .publish = publish, .read = read};
}

std::unique_ptr<Communicator> adopt(const gw_comm_options& o, const GroupOptions& group) {
  require_no_ranks(o, "nccl_comm");
  require(o.device >= 0, "device {} is not a CUDA device", o.device);
  require<Unsupported>(o.shrinkable == 0, kWhoShrinks);
  require_nccl();
  checked_device(o.device);
  auto adopted =
      std::make_unique<Communicator>(adopt_nccl_communicator(o.nccl_comm, o.device, group.timeout));
  adopted->set_ranks_per_node(o.ranks_per_node);
  return adopted;
}

std::unique_ptr<Communicator> accept_invitation(const gw_comm_options& o, const GroupOptions& group) {
  require_no_ranks(o, "invitation");
  require(o.ranks_per_node == 0, "ranks_per_node is {}; it must be 0 with an invitation", o.ranks_per_node);
  require<Unsupported>(o.device == GW_HOST,
                       "device is {}; processes can only join a running group on the host: set "
                       "gw_comm_options.device to GW_HOST",
                       o.device);
  return std::make_unique<Communicator>(
      join_tcp_transport({.group = group}, {.invitation = [text = std::string(o.invitation)] { return text; },
                                            .about = kAbout,
                                            .longest = group.timeout}));
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
  require(o.world >= 1 && o.world <= kMaxRanks, "world is {}; it must be from 1 to {}", o.world, kMaxRanks);
  require(o.rank >= 0 && o.rank < o.world, "rank is {} in a world of {}", o.rank, o.world);
  const Device device = checked_device(o.device);
  GroupOptions joined = group;
  if (o.store != nullptr) {
    joined.rendezvous = "the caller's store";
    joined.callbacks = callbacks_of_store(o.store, group.timeout);
  }
  std::unique_ptr<Communicator> made = o.world == 1 ? Communicator::create_single(device)
                                       : o.store != nullptr
                                           ? connect_processes(std::move(joined), o.shrinkable != 0, device)
                                           : join_group(o, group, device);
  made->set_ranks_per_node(o.ranks_per_node);
  return made;
}

}  // namespace gradwire::c_api

// Requests: collective calls on the host that return at once. Also reads the options of a call.

namespace gradwire::c_api {
namespace {

using Clock = std::chrono::steady_clock;

std::shared_ptr<ApiRequest> live(gw_request handle) {
  auto request = requests().get(handle);
  request->comm->check_caller();
  return request;
}

}  // namespace

Handles<ApiRequest>& requests() {
  static auto* handles = new Handles<ApiRequest>(3, "request");
  return *handles;
}

CallRequest::CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out) : comm_(*comm), out_(out) {
  if (out_ == nullptr) return;
  require<Unsupported>(
      comm->communicator->device().is_host(),
      "calls on a CUDA device return at once: pass no request, and synchronize with their stream");
  request_ = std::make_shared<ApiRequest>(ApiRequest{comm});
  handle_ = static_cast<gw_request>(
      requests().add(request_));  // before any work is enqueued, because add() may fail
  comm_.request = request_.get();
}

CallRequest::~CallRequest() {
  comm_.request = nullptr;
  if (handle_ != nullptr) requests().remove(handle_);
}

void CallRequest::start() {
  if (out_ == nullptr) return;
  request_->done.record(comm_.caller_stream(nullptr));
  *out_ = std::exchange(handle_, nullptr);
}

}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

gw_status gw_request_wait(gw_request request, int64_t timeout_ms) {
  return guarded(__func__, [&] {
    require(timeout_ms >= 0, "timeout_ms is {}, must not be negative", timeout_ms);
    constexpr int64_t kMax = 1000LL * 3600 * 24 * 365;
    const auto deadline = Clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kMax));
    const auto object = live(request);
    bool done = false;
    object->comm->wait_or_notify([&] { done = object->done.synchronize_until(deadline); });
    require<NotDone>(done, "the call is not done after {} ms; it is still running", timeout_ms);
  });
}

gw_status gw_request_destroy(gw_request request) {
  return guarded(__func__, [&] {
    if (request == nullptr) return;
    auto object = live(request);
    requests().remove(request);
    try {
      object->done.synchronize();  // the call no longer uses the caller's memory
    } catch (...) {                // reported by gw_request_wait()
    }
  });
}

}  // extern "C"
