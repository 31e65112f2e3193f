#include "collectives/transport/local/local_hub.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"

namespace gradwire {

LocalHub::LocalHub(std::vector<Device> devices, std::chrono::milliseconds timeout, const EmulatedLink& link)
    : world(static_cast<int>(devices.size())),
      timeout(timeout),
      devices(std::move(devices)),
      latest_(static_cast<size_t>(world)),
      changed_(static_cast<size_t>(world)),
      offers_(static_cast<size_t>(world) * static_cast<size_t>(world)) {
  if (link) links.emplace(link, world);
}

bool LocalHub::arrived(Offer& offer) {
  return !links || links->arrived(offer.flow, LinkPacer::Time::clock::now()) == offer.bytes;
}

LinkPacer::Time LocalHub::arrives_at(const Offer& offer) const {
  return links ? links->earliest(offer.flow, offer.bytes) : LinkPacer::Time::max();
}

void LocalHub::barrier(int rank) {
  std::unique_lock lock(mutex);
  const uint64_t mine = barrier_.passed;
  if (++barrier_.arrived == world) {
    barrier_.arrived = 0;
    ++barrier_.passed;
    wake_all();
  }
  wait(
      lock, rank, [&] { return barrier_.passed != mine; },
      [&] { return fmt::format("at a barrier that {} of {} ranks have reached", barrier_.arrived, world); });
}

void LocalHub::rendezvous(PeerGroup& group, int rank, const std::string& what) {
  std::unique_lock lock(mutex);
  std::vector<uint64_t>& arrivals = group.arrivals;
  const uint64_t mine = ++arrivals[static_cast<size_t>(rank)];
  const auto late = [&] { return std::ranges::find_if(arrivals, [&](uint64_t n) { return n < mine; }); };
  if (late() == arrivals.end()) return wake_all();
  wait(
      lock, rank, [&] { return late() == arrivals.end(); },
      [&] { return fmt::format("{}: waiting for rank {}", what, late() - arrivals.begin()); });
}

void LocalHub::begin_call(int rank, uint64_t number, const Call& call) {
  std::lock_guard lock(mutex);
  throw_if_failed(rank, [&] { return call.what; });
  const size_t index = number - first_open_;
  if (index == open_.size()) open_.push_back({call.hash, rank, 0, call.what});
  OpenCall& open = open_[index];
  if (open.hash != call.hash) {
    fail_and_throw(fmt::format("ranks disagree: call {} of rank {} is {}, of rank {} it is {}{}", number,
                               open.rank, open.what, rank, call.what,
                               open.what == call.what ? "; the calls differ in something else" : ""));
  }
  latest_[static_cast<size_t>(rank)] = {number, call.what};
  compare_peer_memory();
  ++open.arrived;
  while (!open_.empty() && open_.front().arrived == world) {
    open_.pop_front();
    ++first_open_;
  }
}

void LocalHub::compare_peer_memory() {
  for (const auto& [number, group] : peer_groups) {
    for (size_t r = 0; r < latest_.size(); ++r) {
      const std::optional<uint64_t>& before = group->calls_before[r];
      for (size_t other = 0; before && other < latest_.size(); ++other) {
        const LatestCall& latest = latest_[other];
        if (group->arrived[other] || latest.number <= *before) continue;
        fail_and_throw(fmt::format(
            "ranks disagree: after {} calls rank {} maps peer memory, as transport=peer needs; rank {} makes "
            "call {}, {}, without peer memory; give all ranks the same spec",
            *before, r, other, latest.number, latest.what));
      }
    }
  }
}

void LocalHub::check(int rank) {
  std::lock_guard lock(mutex);
  for (const auto& weak : mapped) {
    const auto peers = weak.lock();
    const std::string reported = peers ? peers->failure() : "";
    if (!reported.empty() && failure_.empty())
      fail(fmt::format("rank {}: {}", peers->first_rank + peers->memory.rank, reported));
  }
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}", rank, failure_));
}

void LocalHub::fail(const std::string& reason) {
  if (failure_.empty()) failure_ = "the group failed: " + reason;
  for (const auto& weak : mapped) {
    if (const auto peers = weak.lock()) peers->stop();
  }
  wake_all();
}

void LocalHub::fail_and_throw(const std::string& text) {
  fail(text);
  throw CommError(text);
}

void LocalHub::throw_failed(int rank, const std::string& doing) const {
  throw CommError(fmt::format("rank {}: {}: {}", rank, doing, failure_));
}

std::string LocalHub::no_progress(int rank, const std::string& doing) const {
  return fmt::format("rank {}: no progress for {} ms: {}", rank, timeout.count(), doing);
}

void LocalHub::wake_all() {
  for (std::condition_variable& c : changed_) c.notify_all();
}

}  // namespace gradwire
