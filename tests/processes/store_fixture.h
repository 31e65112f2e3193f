// A fixture with a key-value store of three ranks, which are threads.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/net/listener.h"
#include "collectives/net/store.h"
#include "collectives/net/store_server.h"
#include "runtime/util/error.h"
#include "tests/support/expect.h"

namespace gradwire::testing {

using namespace std::chrono_literals;

inline SteadyClock::time_point in(std::chrono::milliseconds time) {
  return SteadyClock::now() + time;
}

class StoreFixture : public ::testing::Test {
 protected:
  std::unique_ptr<StoreClient> join(int rank, int world = kWorld, const std::string& key = "key") {
    return std::make_unique<StoreClient>(Contact{{"127.0.0.1"}, server->port()}, key, rank, world, in(10s));
  }
  static constexpr int kWorld = 3;
  std::unique_ptr<StoreServer> server =
      std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), kWorld, "key");
};

// Records the causes reported to the watchers.
struct Told {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, std::string> causes;
  void watch(StoreClient& client, int rank) {
    client.watch(
        [this, rank](const std::string& cause) {
          std::lock_guard lock(mutex);
          EXPECT_EQ(causes.count(rank), 0u) << "told twice";
          causes[rank] = cause;
          changed.notify_all();
        },
        [rank] { return fmt::format("state of {}", rank); });
  }
  std::string of(int rank) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, 20s, [&] { return causes.count(rank) > 0; });
    return causes[rank];
  }
};

}  // namespace gradwire::testing
