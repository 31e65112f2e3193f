// Memory registered with NCCL, without a GPU. A fake NCCL counts registrations and checks which memory is
// exchanged.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/collectives/reducer_rank.h"
#include "tests/support/threads.h"

namespace gradwire::testing {
namespace {

// State of the fake NCCL, shared by all ranks of a test.
struct Registry {
  std::mutex mutex;
  std::map<char*, size_t> allocated;
  std::map<void*, char*> registered;  // memory by handle
  bool allocates = true, registers = true;
  int allocations = 0, registrations = 0, deregistrations = 0;
  std::atomic<int> inside{0}, outside{0};  // number of transfers in registered memory, and in other memory

  bool holds(const void* at, size_t bytes) {
    std::lock_guard lock(mutex);
    const char* const begin = static_cast<const char*>(at);
    for (const auto& [handle, data] : registered) {
      if (begin >= data && begin + bytes <= data + allocated.at(data)) return true;
    }
    return false;
  }
  void count(const void* at, size_t bytes) { ++(holds(at, bytes) ? inside : outside); }
};
Registry* the_registry = nullptr;

ncclResult_t registry_alloc(void** data, size_t bytes) {
  Registry& r = *the_registry;
  std::lock_guard lock(r.mutex);
  if (!r.allocates) return ncclUnhandledCudaError;
  char* const made = static_cast<char*>(::operator new(bytes, std::align_val_t(256)));
  r.allocated[made] = bytes;
  ++r.allocations;
  *data = made;
  return ncclSuccess;
}
ncclResult_t registry_free(void* data) {
  Registry& r = *the_registry;
  std::lock_guard lock(r.mutex);
  for (const auto& [handle, memory] : r.registered)
    EXPECT_NE(memory, data) << "freed before it is deregistered";
  EXPECT_EQ(r.allocated.erase(static_cast<char*>(data)), 1u);
  ::operator delete(data, std::align_val_t(256));
  return ncclSuccess;
}
ncclResult_t registry_register(const ncclComm_t, void* data, size_t bytes, void** handle) {
  Registry& r = *the_registry;
  std::lock_guard lock(r.mutex);
  if (!r.registers) return ncclInvalidUsage;
  EXPECT_LE(bytes, r.allocated.at(static_cast<char*>(data)));
  *handle = reinterpret_cast<void*>(static_cast<uintptr_t>(++r.registrations));
  r.registered[*handle] = static_cast<char*>(data);
  return ncclSuccess;
}
ncclResult_t registry_deregister(const ncclComm_t, void* handle) {
  Registry& r = *the_registry;
  std::lock_guard lock(r.mutex);
  EXPECT_EQ(r.registered.erase(handle), 1u);
  ++r.deregistrations;
  return ncclSuccess;
}

const NcclApi& nccl_with_memory() {
  static const NcclApi api = [] {
    NcclApi a = fake_nccl();
    a.mem_alloc = registry_alloc;
    a.mem_free = registry_free;
    a.comm_register = registry_register;
    a.comm_deregister = registry_deregister;
    a.send = [](const void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
      the_registry->count(data, n);
      return fake_nccl().send(data, n, type, peer, c, s);
    };
    a.receive = [](void* data, size_t n, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s) {
      the_registry->count(data, n);
      return fake_nccl().receive(data, n, type, peer, c, s);
    };
    return a;
  }();
  return api;
}

// Trains a few steps on every rank. Returns every rank's last averages.
std::vector<std::vector<float>> trained(const NcclApi& api, const std::string& spec) {
  constexpr int kWorld = 3;
  FakeWorld world(kWorld);
  std::vector<std::vector<float>> last(kWorld);
  in_threads(kWorld, [&](int r) {
    Communicator comm(std::make_unique<NcclTransport>(fake_setup(world[r], 20s, api)));
    Rank rank(comm, spec, model(), 4096, 0);
    for (int step = 0; step < 3; ++step) last[r] = rank.step(gradients_for(model(), 10 * step + r));
    comm.check();
  });
  return last;
}

// Covers a reducer's gradients, the workspaces of its two streams, factors, and chosen values.
TEST(NcclMemory, ReducersExchangeRegisteredMemoryAndDeregisterItBeforeFreeing) {
  for (const char* spec :
       {"fp32:schedule=two_shot", "bf16:schedule=ring", "powersgd:rank=2,schedule=two_shot",
        "powersgd:rank=2,alternate=on,schedule=ring", "randk:ratio=0.1,schedule=two_shot"}) {
    SCOPED_TRACE(spec);
    Registry registry;
    the_registry = &registry;
    const auto with = trained(nccl_with_memory(), spec);
    EXPECT_EQ(registry.registrations, 3) << "a rank's buffers are small and share one allocation";
    EXPECT_EQ(registry.deregistrations, 3);
    EXPECT_TRUE(registry.allocated.empty());
    EXPECT_GT(registry.inside, 0);
    EXPECT_EQ(registry.outside, 0);
    EXPECT_EQ(with, trained(fake_nccl(), spec)) << "the same result without registration";
  }
}

TEST(NcclMemory, FallsBackToPlainMemoryWhenNcclRefuses) {
  const auto expected = trained(fake_nccl(), "bf16:schedule=two_shot");
  for (bool allocates : {false, true}) {
    Registry registry;
    the_registry = &registry;
    registry.allocates = allocates;
    registry.registers = false;
    EXPECT_EQ(trained(nccl_with_memory(), "bf16:schedule=two_shot"), expected);
    EXPECT_EQ(registry.allocations > 0, allocates);
    EXPECT_TRUE(registry.allocated.empty());
    EXPECT_EQ(registry.inside, 0);
  }
}

TEST(NcclMemory, OnlySmallBuffersShareAllocationsAndNoneOverlap) {
  Registry registry;
  the_registry = &registry;
  FakeWorld world(2);
  NcclTransport transport(fake_setup(world[0], 20s, nccl_with_memory()));
  constexpr size_t kMib = size_t{1} << 20;
  std::vector<Buffer> pieces;
  for (size_t bytes : {size_t{1}, size_t{1000}, kMib, kMib / 2})
    pieces.push_back(transport.exchange_memory(bytes));
  EXPECT_EQ(registry.allocations, 1);
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_TRUE(registry.holds(pieces[i].data(), pieces[i].bytes()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pieces[i].data()) % 256, 0u);
    if (i == 0) continue;
    EXPECT_GE(pieces[i].as<char>(), pieces[i - 1].as<char>() + pieces[i - 1].bytes());
  }
  const Buffer large = transport.exchange_memory(kMib + 1), another = transport.exchange_memory(kMib);
  EXPECT_EQ(registry.allocations, 3)
      << "a separate one for the large buffer, and one because the first was full";
  pieces.clear();
  EXPECT_EQ(registry.deregistrations, 1);
}

// Tests memory that is freed after its communicator. NCCL drops a communicator's registrations when the
// communicator is destroyed.
TEST(NcclMemory, DoesNotDeregisterFromADestroyedCommunicator) {
  for (bool aborted : {true, false}) {
    Registry registry;
    the_registry = &registry;
    FakeWorld world(2);
    auto transport = std::make_unique<NcclTransport>(fake_setup(world[0], 20s, nccl_with_memory()));
    Buffer memory = transport->exchange_memory(1000);
    EXPECT_EQ(registry.registrations, 1);
    if (aborted) {
      transport->abort("enough");
      while (world[0].aborted == 0) std::this_thread::sleep_for(1ms);
    }
    transport.reset();
    registry.registered.clear();  // NCCL drops the communicator's registrations
    memory = {};
    EXPECT_EQ(registry.deregistrations, 0);
    EXPECT_TRUE(registry.allocated.empty());
  }
}

}  // namespace
}  // namespace gradwire::testing
