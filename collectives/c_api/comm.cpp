#include "collectives/c_api/comm.h"

#include <fmt/format.h>
#include <gradwire/gradwire.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/functions.h"
#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/reach.h"
#include "collectives/net/store.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/registered.h"
#include "runtime/threads/running_clock.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire::c_api {

// A rendezvous through a caller's key-value store: gw_comm_options.store.

// Returns a copy of the caller's struct. Throws BadInput if a field is invalid.
gw_store checked_store(const gw_store* store);

// Returns a rendezvous in which rank 0 publishes a text under one key of the store, and the other ranks read
// the key. Its functions throw CommError, which names the store, if a callback fails, returns another text
// than rank 0's, or does not return within `timeout` from now.
RendezvousCallbacks callbacks_of_store(const gw_store& store, std::chrono::milliseconds timeout);

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
  if (getpid() != process_) {
    throw BadHandle(fmt::format(
        "the handle belongs to process {}, and this is a fork of it; create communicators after forking",
        process_));
  }
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
  if (at->second.is_captured()) {
    throw Unsupported(
        "the stream is being captured in a CUDA graph, whose launches would not repeat what the host does in "
        "this call: "
        "call it outside of the capture");
  }
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

// Requests: collective calls on the host that return at once. Also reads the options of a call.

namespace gradwire::c_api {
namespace {

using Clock = std::chrono::steady_clock;

std::shared_ptr<ApiRequest> live(gw_request handle) {
  auto request = requests().get(handle);
  request->comm->check_caller();
  return request;
}

gw_call_options read_call_options(const gw_call_options* options) {
  return options == nullptr ? gw_call_options{} : read_struct<gw_call_options>(options, "gw_call_options");
}

}  // namespace

Handles<ApiRequest>& requests() {
  static auto* handles = new Handles<ApiRequest>(3, "request");
  return *handles;
}

ApiRequest::ApiRequest(std::shared_ptr<ApiComm> c)
    : comm(std::move(c)), done_(Event::create(comm->communicator->device())) {}

void ApiRequest::finish() const {
  try {
    done_.synchronize();
  } catch (...) {  // reported by gw_request_wait()
  }
}

void ApiRequest::start(const Stream& stream) {
  done_.record(stream);
}

bool ApiRequest::wait_until(Clock::time_point deadline) const {
  bool done = false;
  comm->wait_or_notify([&] { done = done_.synchronize_until(deadline); });
  return done;
}

CallRequest::CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out) : comm_(*comm), out_(out) {
  if (out_ == nullptr) return;
  if (comm->communicator->device().is_cuda()) {
    throw Unsupported(
        "calls on a CUDA device return at once: pass no request, and synchronize with their stream");
  }
  request_ = std::make_shared<ApiRequest>(comm);
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
  request_->start(comm_.caller_stream(nullptr));
  *out_ = std::exchange(handle_, nullptr);
}

LockedCall::LockedCall(gw_comm handle, const gw_call_options* given)
    : held(handle),
      options(read_call_options(given)),
      tag(checked_tag(options.tag)),
      request(held.comm, options.request) {}

void LockedCall::refuse_residual(const char* function) const {
  require(options.residual == nullptr, "gw_call_options.residual is set, but {} has no residual", function);
}

}  // namespace gradwire::c_api

using namespace gradwire;
using namespace gradwire::c_api;

extern "C" {

gw_status gw_request_wait(gw_request request, int64_t timeout_ms) {
  return guarded(__func__, [&] {
    require(timeout_ms >= 0, "timeout_ms is {}, must not be negative", timeout_ms);
    constexpr int64_t kMost = 1000LL * 3600 * 24 * 365;
    const auto deadline = Clock::now() + std::chrono::milliseconds(std::min(timeout_ms, kMost));
    if (!live(request)->wait_until(deadline)) {
      throw NotDone(fmt::format("the call is not done after {} ms; it is still running", timeout_ms));
    }
  });
}

gw_status gw_request_destroy(gw_request request) {
  return guarded(__func__, [&] {
    if (request == nullptr) return;
    auto object = live(request);
    requests().remove(request);
    object->finish();
  });
}

}  // extern "C"

namespace gradwire::c_api {

// The rendezvous of "local://": threads of one process join under a name.

namespace {

// A group for which some ranks have not joined yet.
struct Rendezvous {
  std::vector<std::optional<Device>> devices;  // [rank]; empty: has not joined
  int joined = 0;
  bool complete = false;
  std::string problem;  // the reason why the group could not be created
  std::vector<std::unique_ptr<Communicator>> communicators;
};

struct RendezvousTable {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Rendezvous>> by_name;
};

RendezvousTable& rendezvous_by_name() {
  static auto* all = new RendezvousTable;
  return *all;
}

}  // namespace

std::unique_ptr<Communicator> join_local_group(const std::string& name, int rank, int world, Device device,
                                               std::chrono::milliseconds timeout) {
  const RunningClock::Watch watch;
  RendezvousTable& all = rendezvous_by_name();
  std::unique_lock lock(all.mutex);
  auto& entry = all.by_name[name];
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
    all.by_name.erase(name);
    all.changed.notify_all();
  } else if (!wait_until(all.changed, lock, RunningClock::now() + timeout,
                         [&] { return rendezvous->complete; })) {
    std::string absent;
    for (int r = 0; r < world; ++r) {
      if (!rendezvous->devices[r]) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
    }
    rendezvous->devices[rank].reset();
    if (--rendezvous->joined == 0) all.by_name.erase(name);
    throw CommError(fmt::format("{} of {}: waited {} ms for rank {}", who, world, timeout.count(), absent));
  }
  if (!rendezvous->problem.empty()) throw BadInput(who + ": " + rendezvous->problem);
  return std::move(rendezvous->communicators[rank]);
}

namespace {

using std::chrono::milliseconds;

constexpr size_t kMostBytes = size_t{64}
                              << 10;  // limit for the published text; an address takes up to 16 bytes

class CallerStore {
 public:
  CallerStore(const gw_store& store, milliseconds timeout)
      : store_(store),
        key_(std::string(store.prefix == nullptr ? "" : store.prefix) + "gradwire/rendezvous"),
        timeout_(timeout),
        deadline_(SteadyClock::now() + timeout) {}

  void publish(const std::string& text) const {
    check("set", store_.set(store_.user, key_.c_str(), text.data(), text.size(), left_ms()));
  }

  std::string read() const {
    std::string value(kMostBytes, '\0');
    size_t bytes = 0;
    check("get", store_.get(store_.user, key_.c_str(), left_ms(), value.data(), value.size(), &bytes));
    if (bytes == 0) {
      throw CommError(
          fmt::format("rank 0 has not set '{}' in the store within {} ms; is it running, and does every rank "
                      "use the same store and prefix?",
                      key_, timeout_.count()));
    }
    value.resize(std::min(bytes, kMostBytes));
    if (bytes > kMostBytes || !is_store_location(value)) {
      throw CommError(
          fmt::format("the store's '{}' ({} bytes) is not what rank 0 has set; does something else "
                      "use this key, or another version of the library?",
                      key_, bytes));
    }
    return value;
  }

 private:
  int64_t left_ms() const {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - SteadyClock::now());
    return std::max<int64_t>(left.count(), 1);
  }

  void check(const char* function, const char* error) const {
    if (error != nullptr)
      throw CommError(fmt::format("the store's {}('{}') failed: {}", function, key_, error));
    // A get() that correctly times out returns slightly late; allow for it.
    constexpr milliseconds kLate{500};
    if (SteadyClock::now() > deadline_ + kLate) {
      throw CommError(fmt::format("the store's {}('{}') returned too late: all ranks must join within {} ms",
                                  function, key_, timeout_.count()));
    }
  }

  gw_store store_;
  std::string key_;
  milliseconds timeout_;
  SteadyClock::time_point deadline_;
};

}  // namespace

gw_store checked_store(const gw_store* store) {
  const auto read = read_struct<gw_store>(store, "gw_store");
  require(read.set != nullptr, "gw_store.set is null");
  require(read.get != nullptr, "gw_store.get is null");
  return read;
}

RendezvousCallbacks callbacks_of_store(const gw_store& store, milliseconds timeout) {
  const CallerStore keys(store, timeout);
  return {.address = "",
          .publish = [keys](const std::string& text) { keys.publish(text); },
          .read = [keys] { return keys.read(); }};
}

}  // namespace gradwire::c_api
