// Tests gw_comm_options.store: ranks connect through the caller's key-value store.
#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "tests/capi/ranks.h"
#include "tests/support/expect.h"

namespace {

// One rank's view of a store in this process. Tests make the store fail or block.
struct TestStore {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, std::string> values;
    std::atomic<int> calls{0};
  };
  explicit TestStore(Shared& table) : shared(table) {}

  gw_store api(const char* prefix = nullptr) {
    auto s = capi::sized<gw_store>();
    s.set = [](void* user, const char* key, const void* value, size_t bytes, int64_t timeout_ms) {
      return static_cast<TestStore*>(user)->set(key, {static_cast<const char*>(value), bytes}, timeout_ms);
    };
    s.get = [](void* user, const char* key, int64_t timeout_ms, void* value, size_t capacity, size_t* bytes) {
      return static_cast<TestStore*>(user)->get(key, timeout_ms, value, capacity, bytes);
    };
    s.user = this;
    s.prefix = prefix;
    return s;
  }

  const char* set(const std::string& key, const std::string& value, int64_t timeout_ms) {
    EXPECT_GT(timeout_ms, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    ++shared.calls;
    if (fails != nullptr) return fails;
    std::lock_guard lock(shared.mutex);
    shared.values[key] = value;
    shared.changed.notify_all();
    return nullptr;
  }
  const char* get(const std::string& key, int64_t timeout_ms, void* value, size_t capacity, size_t* bytes) {
    EXPECT_GT(timeout_ms, 0);
    EXPECT_EQ(*bytes, 0u);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    ++shared.calls;
    if (fails != nullptr) return fails;
    std::unique_lock lock(shared.mutex);
    const auto there = [&] { return shared.values.count(key) > 0; };
    const std::chrono::milliseconds patience(overtime_ms > 0 ? timeout_ms + overtime_ms : timeout_ms);
    if (!shared.changed.wait_for(lock, patience, there)) return nullptr;
    const std::string& found = shared.values[key];
    *bytes = found.size();
    std::memcpy(value, found.data(), std::min(capacity, found.size()));
    return nullptr;
  }

  Shared& shared;
  const char* fails = nullptr;
  int64_t overtime_ms = 0;
  std::thread::id caller = std::this_thread::get_id();
};

constexpr int64_t kPatience_ms = 30'000;

void on_ranks(int world, TestStore::Shared& shared, const std::function<void(TestStore&, int)>& body) {
  capi::in_threads(world, [&](int rank) {
    TestStore store(shared);
    body(store, rank);
  });
}

gw_comm_options options_of(const gw_store& store, int rank, int world, int64_t timeout_ms = kPatience_ms) {
  auto options = capi::comm_options(nullptr, rank, world, GW_HOST, timeout_ms);
  options.store = &store;
  return options;
}

// Creates the communicator of one rank in a world of 2 whose other rank is missing.
gw_status alone(TestStore& store, int rank, int64_t timeout_ms, const char* secret = nullptr) {
  const gw_store s = store.api();
  auto options = options_of(s, rank, 2, timeout_ms);
  options.secret = secret;
  gw_comm comm = nullptr;
  return gw_comm_create(&options, &comm);
}

TEST(CApiStore, ConnectsOneGroupPerPrefix) {
  for (int world : {1, 2, 4}) {
    TestStore::Shared shared;
    on_ranks(world, shared, [&](TestStore& store, int rank) {
      gw_comm comms[2] = {};
      for (int i = 0; i < 2; ++i) {
        const std::string prefix = "group" + std::to_string(i) + "/";
        const gw_store s = store.api(prefix.c_str());
        const auto options = options_of(s, rank, world);
        GW_ASSERT_OK(gw_comm_create(&options, &comms[i]));
      }
      for (gw_comm comm : comms) {
        EXPECT_EQ(capi::sum_of(comm, 1), static_cast<float>(world));
        GW_EXPECT_OK(gw_comm_destroy(comm));
      }
    });
    EXPECT_EQ(shared.values.size(), world == 1 ? 0u : 2u) << "one key per group, which stays";
    if (world > 1) {
      EXPECT_EQ(shared.values.count("group1/gradwire/rendezvous"), 1u);
    }
  }
}

TEST(CApiStore, SupportsSecretsInterfacesAndShrinking) {
  TestStore::Shared shared;
  std::atomic<int> made{0};
  std::barrier summed(3);
  on_ranks(3, shared, [&](TestStore& store, int rank) {
    const gw_store s = store.api();
    auto options = options_of(s, rank, 3);
    options.secret = "of this run";
    options.interface = "lo";
    options.shrinkable = 1;
    gw_comm comm = nullptr, rest = nullptr;
    GW_ASSERT_OK(gw_comm_create(&options, &comm));
    EXPECT_EQ(capi::sum_of(comm, 1), 3.0f);
    ++made;
    summed.arrive_and_wait();  // no rank leaves while another rank is in the call
    if (rank > 0) {            // rank 0 leaves
      GW_ASSERT_OK(gw_comm_shrink(comm, kPatience_ms, nullptr, &rest, nullptr, 0));
      EXPECT_EQ(capi::sum_of(rest, 1), 2.0f);
      GW_EXPECT_OK(gw_comm_destroy(rest));
    }
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  EXPECT_EQ(made, 3);
  const std::string meeting = shared.values["gradwire/rendezvous"];
  gradwire::testing::expect_has(meeting, {" 127.0.0.1\n"});
  EXPECT_EQ(meeting.find("of this run"), std::string::npos) << "the user's secret is not in the store";
}

TEST(CApiStore, RejectsRanksWithAnotherSecret) {
  TestStore::Shared shared;
  on_ranks(2, shared, [&](TestStore& store, int rank) {
    EXPECT_EQ(alone(store, rank, rank == 0 ? 4'000 : kPatience_ms, rank == 0 ? "right" : "wrong"),
              GW_COMM_FAILED);
    const std::string said = gw_last_error(),
                      expected = "the process there has another secret; give all ranks the same";
    EXPECT_EQ(said.find(expected) != std::string::npos, rank == 1) << said;
  });
}

TEST(CApiStore, ReportsTheStoresError) {
  TestStore::Shared shared;
  TestStore store(shared);
  store.fails = "the quorum is lost";
  GW_EXPECT_FAILS(GW_COMM_FAILED, "the store's set('gradwire/rendezvous') failed: the quorum is lost",
                  alone(store, 0, kPatience_ms));
  GW_EXPECT_FAILS(GW_COMM_FAILED, "the store's get('gradwire/rendezvous') failed: the quorum is lost",
                  alone(store, 1, kPatience_ms));
  EXPECT_EQ(shared.calls, 2) << "neither is tried again";
}

TEST(CApiStore, RejectsForeignValuesImmediately) {
  for (const std::string& garbage :
       {std::string("rank 0 was here"), std::string(1, '\0'), std::string(1 << 20, 'x'),
        std::string("gradwire-rendezvous-1"), std::string("gradwire-rendezvous-2\nsecret 1 127.0.0.1\n")}) {
    TestStore::Shared shared;
    TestStore store(shared);
    shared.values["gradwire/rendezvous"] = garbage;
    const std::string expected = std::to_string(garbage.size()) + " bytes) is not what rank 0 has set";
    GW_EXPECT_FAILS(GW_COMM_FAILED, expected, alone(store, 1, kPatience_ms));
    EXPECT_EQ(shared.calls, 1);
  }
}

TEST(CApiStore, ReportsAnUnreachableAddressAtTheDeadline) {
  TestStore::Shared shared;
  TestStore store(shared);
  shared.values["gradwire/rendezvous"] = "gradwire-rendezvous-1\nsecret 1 127.0.0.1\n";
  GW_EXPECT_FAILS(GW_COMM_FAILED, "did not reach rank 0 through the caller's store", alone(store, 1, 300));
}

TEST(CApiStore, ReportsAMissingKeyAtTheDeadline) {
  TestStore::Shared shared;
  TestStore store(shared);
  GW_EXPECT_FAILS(GW_COMM_FAILED, "rank 0 has not set 'gradwire/rendezvous' in the store within 200 ms",
                  alone(store, 1, 200));
  EXPECT_EQ(shared.calls, 1);
}

TEST(CApiStore, ReportsAStoreThatBlocksPastTheDeadline) {
  TestStore::Shared shared;
  TestStore store(shared);
  store.overtime_ms = 700;
  GW_EXPECT_FAILS(GW_COMM_FAILED, "the store's get('gradwire/rendezvous') returned too late",
                  alone(store, 1, 100));
}

TEST(CApiStore, RejectsRanksWithAnotherWorldSize) {
  TestStore::Shared shared;
  on_ranks(2, shared, [&](TestStore& store, int rank) {
    const gw_store s = store.api();
    gw_comm comm = nullptr;
    const auto options = options_of(s, rank, 2 + rank, 2'000);
    EXPECT_EQ(gw_comm_create(&options, &comm), GW_COMM_FAILED);
    EXPECT_EQ(comm, nullptr);
    if (rank == 1) {
      gradwire::testing::expect_has(gw_last_error(), {"3"});
    }
  });
}

TEST(CApiStore, RejectsInvalidStoresBeforeCallingThem) {
  TestStore::Shared shared;
  TestStore store(shared);
  const gw_store good = store.api();
  gw_comm comm = nullptr;
  const auto make = [&](const gw_store& s, int rank = 0, int world = 2, int device = GW_HOST,
                        int64_t ms = 100) {
    auto options = options_of(s, rank, world, ms);
    options.device = device;
    return gw_comm_create(&options, &comm);
  };
  gw_store bad = good;
  bad.size = 0;
  GW_EXPECT_BAD("gw_store.size is 0", make(bad));
  bad = good, bad.set = nullptr;
  GW_EXPECT_BAD("gw_store.set is null", make(bad));
  bad = good, bad.get = nullptr;
  GW_EXPECT_BAD("gw_store.get is null", make(bad));
  GW_EXPECT_BAD("rank is 2 in a world of 2", make(good, 2));
  GW_EXPECT_BAD("world is 0", make(good, 0, 0));
  GW_EXPECT_BAD("device -7", make(good, 0, 2, -7));
  GW_EXPECT_BAD("timeout_ms is 0", make(good, 0, 2, GW_HOST, 0));
  auto both = options_of(good, 0, 2);
  GW_EXPECT_BAD("comm is null", gw_comm_create(&both, nullptr));
  both.rendezvous = "local://x";
  GW_EXPECT_BAD("2 of gw_comm_options.rendezvous, .store", gw_comm_create(&both, &comm));
  EXPECT_EQ(shared.calls, 0);
}

}  // namespace
