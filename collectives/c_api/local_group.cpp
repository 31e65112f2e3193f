// The rendezvous of "local://": threads of one process meet under a name.
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
struct Meeting {
  std::vector<std::optional<Device>> seats;
  int taken = 0;
  bool complete = false;
  std::string problem;  // why the group could not be made
  std::vector<std::unique_ptr<Communicator>> communicators;
};

struct Meetings {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Meeting>> by_name;
};

Meetings& meetings() {
  static auto* all = new Meetings;
  return *all;
}

}  // namespace

std::unique_ptr<Communicator> join_local_group(const std::string& name, int rank, int world, Device device,
                                               std::chrono::milliseconds timeout) {
  const RunningClock::Watch watch;
  Meetings& all = meetings();
  std::unique_lock lock(all.mutex);
  auto& entry = all.by_name[name];
  if (!entry) {
    entry = std::make_shared<Meeting>();
    entry->seats.resize(world);
  }
  std::shared_ptr<Meeting> meeting = entry;
  const std::string who = fmt::format("local://{}, rank {}", name, rank);
  const size_t seats = meeting->seats.size();
  require(static_cast<int>(seats) == world, "{} says world {}, another rank says {}", who, world, seats);
  require(!meeting->seats[rank].has_value(), "{} has joined already; give each thread its own rank", who);
  meeting->seats[rank] = device;
  if (++meeting->taken == world) {
    std::vector<Device> devices;
    for (const auto& seat : meeting->seats) devices.push_back(*seat);
    try {
      meeting->communicators = Communicator::create_local(devices, timeout);
    } catch (const Error& error) {
      meeting->problem = error.what();
    }
    meeting->complete = true;
    all.by_name.erase(name);
    all.changed.notify_all();
  } else if (!wait_until(all.changed, lock, RunningClock::now() + timeout,
                         [&] { return meeting->complete; })) {
    std::string absent;
    for (int r = 0; r < world; ++r) {
      if (!meeting->seats[r]) absent += fmt::format("{}{}", absent.empty() ? "" : ", ", r);
    }
    meeting->seats[rank].reset();
    if (--meeting->taken == 0) all.by_name.erase(name);
    throw CommError(fmt::format("{} of {}: waited {} ms for rank {}", who, world, timeout.count(), absent));
  }
  if (!meeting->problem.empty()) throw BadInput(who + ": " + meeting->problem);
  return std::move(meeting->communicators[rank]);
}

}  // namespace gradwire::c_api
