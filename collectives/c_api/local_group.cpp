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

// A group whose ranks have not all arrived.
struct Rendezvous {
  std::vector<std::optional<Device>> seats;
  int taken = 0;
  bool complete = false;
  std::string problem;  // why the group could not be made
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
    entry->seats.resize(world);
  }
  std::shared_ptr<Rendezvous> rendezvous = entry;
  const std::string who = fmt::format("local://{}, rank {}", name, rank);
  const size_t seats = rendezvous->seats.size();
  require(static_cast<int>(seats) == world, "{} says world {}, another rank says {}", who, world, seats);
  require(!rendezvous->seats[rank].has_value(), "{} has joined already; give each thread its own rank", who);
  rendezvous->seats[rank] = device;
  if (++rendezvous->taken == world) {
    std::vector<Device> devices;
    for (const auto& seat : rendezvous->seats) devices.push_back(*seat);
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
      if (!rendezvous->seats[r]) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
    }
    rendezvous->seats[rank].reset();
    if (--rendezvous->taken == 0) all.by_name.erase(name);
    throw CommError(fmt::format("{} of {}: waited {} ms for rank {}", who, world, timeout.count(), absent));
  }
  if (!rendezvous->problem.empty()) throw BadInput(who + ": " + rendezvous->problem);
  return std::move(rendezvous->communicators[rank]);
}

}  // namespace gradwire::c_api
