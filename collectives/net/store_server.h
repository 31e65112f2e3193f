// The server of a group's rendezvous store, in rank 0's process: see store.h.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/socket.h"
#include "collectives/net/store.h"
#include "runtime/threads/thread.h"

namespace gradwire {

class StoreServer {
 public:
  // Serves `listener`. Rejects connections that do not prove that they know `key` (handshake.h), with a line
  // on stderr. Also rejects ranks of another job (membership.h), with the reason.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job = "")
      : StoreServer(std::move(listener), world, key, job, StoreLimits(world)) {}
  // Serves `listener` in the same way. `invited`: connections to the processes that become the last ranks.
  // Each process sends data once it has joined. If a process hangs up earlier, the group fails at once.
  StoreServer(Socket listener, int world, const std::string& key, const std::string& job,
              const StoreLimits& limits, std::vector<Socket> invited = {});
  // Gives the other ranks time for their last requests and their departures, then announces the shutdown.
  ~StoreServer();
  int port() const;

  // Waits for the oldest message of rank `from`. Returns nullopt at the deadline. Throws CommError if the
  // group fails. Any thread may call it.
  std::optional<std::string> take_message(int from, SteadyClock::time_point deadline);
  // Returns the reason why the group has failed; "" if it has not.
  std::string failure() const;
  // Returns why the system refused the latest connection, for example for lack of descriptors; "" after a
  // success.
  std::string refusal() const;

  // How long the server stays up after the destructor has been called.
  static constexpr std::chrono::milliseconds kLinger{2000};
  // Time after the group has formed in which a second process with the same rank fails the group. Two
  // processes may claim the same rank because they belong to different runs. While the group forms and during
  // this time, the server cannot determine which process belongs to this run. After this time, the server
  // rejects the second process.
  static constexpr std::chrono::milliseconds kForming{3000};

 private:
  struct Loop;
  std::unique_ptr<Loop> loop_;
  Thread thread_;
};

}  // namespace gradwire
