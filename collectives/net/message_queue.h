// The queue of messages from all ranks to rank 0 (store.h) that rank 0 has not taken yet.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/net/store.h"
#include "runtime/util/error.h"

namespace gradwire {

// The store server's thread adds messages; rank 0's other threads take messages.
class MessageQueue {
 public:
  MessageQueue(int world, const StoreLimits& limits)
      : by_rank_(static_cast<size_t>(world)), bytes_of_(static_cast<size_t>(world)), limits_(limits) {}

  // Adds a message of rank `rank`. Returns false if the message exceeds the limits.
  bool add(int rank, std::string message) {
    std::lock_guard lock(mutex_);
    const size_t more = message.size() + kOverhead;
    size_t& of_rank = bytes_of_[static_cast<size_t>(rank)];
    if (of_rank + more > limits_.message_bytes_of_rank || bytes_ + more > limits_.message_bytes) return false;
    of_rank += more;
    bytes_ += more;
    by_rank_[static_cast<size_t>(rank)].push_back(std::move(message));
    changed_.notify_all();
    return true;
  }

  // Waits for the oldest message of rank `from`. Returns nullopt at the deadline. Throws CommError if the
  // group has failed and no message is left.
  std::optional<std::string> take(int from, SteadyClock::time_point deadline) {
    std::unique_lock lock(mutex_);
    auto& messages = by_rank_.at(static_cast<size_t>(from));
    wait_until(changed_, lock, deadline, [&] { return !messages.empty() || !failure_.empty(); });
    if (messages.empty() && !failure_.empty()) throw CommError(failure_);
    if (messages.empty()) return std::nullopt;
    std::string message = std::move(messages.front());
    messages.pop_front();
    bytes_of_[static_cast<size_t>(from)] -= message.size() + kOverhead;
    bytes_ -= message.size() + kOverhead;
    return message;
  }

  // Notifies waiting threads that the group has failed.
  void fail(const std::string& why) {
    std::lock_guard lock(mutex_);
    failure_ = why;
    changed_.notify_all();
  }
  void fail_without_memory() noexcept {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = "no memory";  // short enough to need no allocation
    changed_.notify_all();
  }
  // Returns the reason why the group has failed; "" if it has not.
  std::string failure() {
    std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  static constexpr size_t kOverhead = 64;  // bookkeeping bytes counted for each message

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<std::string>> by_rank_;
  std::vector<size_t> bytes_of_;  // bytes of each rank's messages
  size_t bytes_ = 0;              // bytes of all ranks' messages
  const StoreLimits limits_;
  std::string failure_;
};

}  // namespace gradwire
