// State that the ranks of one process share, and how they wait for each other.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/threads/running_clock.h"

namespace gradwire {

// The shared state of all ranks. One lock suffices: exchanges are few, and copies happen without the lock.
class LocalHub {
 public:
  // A pending send. It lives in the sender's exchange until the send is finished or withdrawn.
  struct Offer {
    const void* data = nullptr;
    size_t bytes = 0;
    const ExchangeLabel* label = nullptr;
    enum class State { waiting, copying, copied, finished } state = State::waiting;
    Event ready;                // CUDA: recorded once the data is complete
    Event taken;                // CUDA: recorded after the copy
    LinkPacer::Flow flow = {};  // with emulated links: the message's way to the receiver
  };

  LocalHub(std::vector<Device> devices, std::chrono::milliseconds timeout, const EmulatedLink& link);

  // Waits until `condition` holds. Throws if the group has failed. Fails the group and throws at the
  // deadline; `pending` then describes the wait. `again`: returns the next time at which the condition can
  // become true without a wake(). Requires the lock.
  template <typename Condition, typename Pending, typename Again>
  void wait(std::unique_lock<std::mutex>& lock, int rank, Condition condition, Pending pending, Again again) {
    const auto deadline = RunningClock::now() + timeout;
    while (!condition()) {
      throw_if_failed(rank, pending);
      const auto left = deadline - RunningClock::now();
      if (left <= left.zero()) fail_and_throw(no_progress(rank, pending()));
      changed_[rank].wait_until(lock,
                                std::min<LinkPacer::Time>(LinkPacer::Time::clock::now() + left, again()));
    }
  }
  template <typename Condition, typename Pending>
  void wait(std::unique_lock<std::mutex>& lock, int rank, Condition condition, Pending pending) {
    wait(lock, rank, condition, pending, [] { return LinkPacer::Time::max(); });
  }
  void barrier(int rank);
  void wait_for_copy(std::unique_lock<std::mutex>& lock, int rank, const Offer& offer) {
    changed_[rank].wait(lock, [&] { return offer.state != Offer::State::copying; });
  }
  // Records that `rank` makes its call number `number`. The first rank to arrive defines the call.
  void begin_call(int rank, uint64_t number, const Call& call);
  // Throws CommError once the group has failed.
  void check(int rank);

  // The methods below require the lock.

  std::deque<Offer*>& offers(int from, int to) { return offers_[from * world + to]; }
  // Returns whether the whole message has passed the emulated links.
  bool arrived(Offer& offer);
  // Returns a time before which a message does not arrive.
  LinkPacer::Time arrives_at(const Offer& offer) const;
  void fail(const std::string& reason);
  [[noreturn]] void fail_and_throw(const std::string& text);
  const std::string& failure() const { return failure_; }
  void wake(int rank) { changed_[rank].notify_all(); }
  void wake_all();

  const int world;
  const std::chrono::milliseconds timeout;
  const std::vector<Device> devices;  // by rank
  std::mutex mutex;
  std::optional<LinkPacer> links;  // unless messages arrive at once
  // Transports that their ranks have not fetched yet, by number of the split and first member.
  std::map<std::pair<int, int>, std::vector<std::unique_ptr<Transport>>> splits;

 private:
  // A call that not all ranks have made yet.
  struct OpenCall {
    uint64_t hash;
    int rank;  // the first rank that made the call
    int arrived;
    std::string what;
  };
  template <typename Pending>
  void throw_if_failed(int rank, Pending pending) const {
    if (!failure_.empty()) throw_failed(rank, pending());
  }
  [[noreturn]] void throw_failed(int rank, const std::string& doing) const;
  std::string no_progress(int rank, const std::string& doing) const;

  const RunningClock::Watch watch_;
  std::string failure_;
  struct {
    int arrived = 0;
    uint64_t passed = 0;  // number of barriers that all ranks have passed
  } barrier_;
  // One condition variable per rank, so that a message wakes only its receiver.
  std::vector<std::condition_variable> changed_;
  std::deque<OpenCall> open_;
  uint64_t first_open_ = 1;  // the number of the call open_[0]
  std::vector<std::deque<Offer*>> offers_;
};

}  // namespace gradwire
