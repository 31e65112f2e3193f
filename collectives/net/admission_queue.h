// The group's side of admitting new ranks; joiner.h is the joiner's side.
//
// Joiners send their request to any rank's Quorum. The lowest rank keeps the joiners waiting; the other ranks
// redirect the joiners to the lowest rank. Between two calls the group invites the joiners that still answer.
// All ranks then form a group with the joiners as the highest ranks.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/net/message.h"
#include "collectives/net/socket.h"

namespace gradwire {

// Holds the waiting joiners. Any thread may call the member functions.
class AdmissionQueue {
 public:
  struct Joiner {
    std::string contact;
    Socket socket;
  };

  // Opens admission: joiners may wait while ranks and joiners are fewer than `most`. `validate` gets a
  // joiner's description of itself and returns why the joiner is rejected, or "". request() calls `validate`.
  void open(int most, std::function<std::string(const std::string& about)> validate);
  // Closes admission and notifies waiting joiners that the run has ended.
  void close();
  // Returns how many joiners wait.
  int waiting() const { return count_; }
  // Returns the waiting joiners that still answer. Only the lowest rank calls it. Takes at most a second.
  std::vector<Joiner> invite();

  // Answers a joiner's request to the lowest rank of a group of `ranks` ranks: keeps the joiner waiting or
  // rejects it.
  void request(Socket socket, const Message& request, int ranks);
  // Redirects a joiner to the rank with this contact.
  static void redirect(const Socket& socket, const std::string& contact);
  // Appends the sockets of waiting joiners to `entries`, so that poll() reports joiners that hang up.
  void add_entries(std::vector<pollfd>& entries) const;
  // Removes joiners that have hung up. Once per second, notifies the remaining joiners that they are still
  // waiting.
  void update();

 private:
  mutable std::mutex mutex_;
  int most_ = 0;
  std::function<std::string(const std::string&)> validate_;
  std::vector<Joiner> waiting_;
  std::atomic<int> count_ = 0;
  SteadyClock::time_point notified_at_ = {};
};

}  // namespace gradwire
