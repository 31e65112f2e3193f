// The rendezvous of "local://": threads of one process join under a name.
#include <fmt/format.h>

#include <condition_variable>
#include <map>
#include <optional>

#include "collectives/c_api/comm.h"
#include "collectives/c_api/errors.h"
#include "runtime/threads/running_clock.h"

namespace gradwire::c_api {
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

}  // namespace gradwire::c_api
