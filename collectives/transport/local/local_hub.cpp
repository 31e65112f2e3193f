#include "collectives/transport/local/local_hub.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"

namespace gradwire {

LocalHub::LocalHub(std::vector<Device> devices, std::chrono::milliseconds timeout, const EmulatedLink& link)
    : world(static_cast<int>(devices.size())),
      timeout(timeout),
      devices(std::move(devices)),
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
  ++open.arrived;
  while (!open_.empty() && open_.front().arrived == world) {
    open_.pop_front();
    ++first_open_;
  }
}

void LocalHub::check(int rank) {
  std::lock_guard lock(mutex);
  if (!failure_.empty()) throw CommError(fmt::format("rank {}: {}", rank, failure_));
}

void LocalHub::fail(const std::string& reason) {
  if (failure_.empty()) failure_ = "the group failed: " + reason;
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
