// Peer memory over NCCL without a GPU. Mappings of shared memory, 4 GiB apart like NCCL's addresses, replace
// NCCL's functions. Host code replaces the kernels.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <regex>

#include "collectives/program/program.h"
#include "runtime/util/error.h"
#include "tests/collectives/fake_nccl.h"
#include "tests/collectives/group.h"
#include "tests/support/expect.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/threads.h"

#if NCCL_VERSION_CODE == NCCL_VERSION(2, 28, 9)
#include <nccl_device/impl/comm__types.h>
#include <nccl_device/impl/core__types.h>

namespace gradwire::testing {
namespace {

constexpr uint64_t kStride = uint64_t{1} << 32;

// State of the fake NCCL, shared by all ranks of one FakeWorld.
struct Fake {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<void*, int> files;  // file descriptor of each allocation
  // [registration][rank]: file descriptor, or -1 until known
  std::map<FakeWire*, std::vector<std::vector<int>>> all;
  std::map<FakeComm*, size_t> registrations;
  std::map<ncclWindow_vidmem*, std::unique_ptr<ncclWindow_vidmem>> windows;
  int reachable = 0;      // number of reachable ranks; 0: all
  int refused_rank = -1;  // rank whose allocations fail
  std::atomic<int> deregistered{0}, freed{0};
};
Fake& the_fake() {
  static Fake fake;
  return fake;
}
thread_local int this_rank = 0;

ncclResult_t fake_mem_alloc(void** data, size_t bytes) {
  if (the_fake().refused_rank == this_rank) return ncclUnhandledCudaError;
  const int file = memfd_create("window", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return ncclSystemError;
  *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  std::lock_guard lock(the_fake().mutex);
  the_fake().files[*data] = file;
  return ncclSuccess;
}

ncclResult_t fake_register(ncclComm_t c, void* data, size_t bytes, ncclWindow_vidmem** window, int flags) {
  EXPECT_EQ(flags, NCCL_WIN_COLL_SYMMETRIC);
  Fake& f = the_fake();
  FakeComm& comm = fake(c);
  std::unique_lock lock(f.mutex);
  auto& registrations = f.all[comm.wire.get()];
  const size_t which = f.registrations[&comm]++;
  if (registrations.size() <= which) registrations.emplace_back(comm.world, -1);
  registrations[which][comm.rank] = f.files.at(data);
  f.changed.notify_all();
  f.changed.wait(lock, [&] { return std::ranges::count(f.all[comm.wire.get()][which], -1) == 0; });
  const std::vector<int> files = f.all[comm.wire.get()][which];
  const int reachable = f.reachable > 0 ? f.reachable : comm.world, first = comm.rank / reachable * reachable;
  char* const flat = static_cast<char*>(
      mmap(nullptr, kStride * reachable, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (int r = 0; r < reachable; ++r) {
    const int file = files[first + r];
    EXPECT_NE(mmap(flat + kStride * r, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0),
              MAP_FAILED);
  }
  auto made = std::make_unique<ncclWindow_vidmem>();
  made->lsaFlatBase = flat;
  made->lsaRank = comm.rank - first;
  made->worldRank = comm.rank;
  made->stride4G = 1;
  *window = made.get();
  f.windows[made.get()] = std::move(made);
  return ncclSuccess;
}

const NcclApi& nccl_with_windows() {
  static const NcclApi api = [] {
    NcclApi a = fake_nccl();
    a.mem_alloc = fake_mem_alloc;
    a.mem_free = [](void*) { return ++the_fake().freed, ncclSuccess; };
    a.window_register = fake_register;
    a.window_deregister = [](ncclComm_t, ncclWindow_vidmem*) {
      return ++the_fake().deregistered, ncclSuccess;
    };
    a.team_lsa = [](ncclComm_t c) {
      const int ranks = the_fake().reachable > 0 ? the_fake().reachable : fake(c).world;
      return NcclApi::Team{ranks, fake(c).rank % ranks, 1};
    };
    return a;
  }();
  return api;
}

// Records the rank of each thread that calls NCCL.
class RankCalls final : public HostCalls {
 public:
  explicit RankCalls(int rank) : rank_(rank) {}
  void enter_thread() override { this_rank = rank_; }

 private:
  const int rank_;
};

// Runs a body on every rank. Returns every rank's error, or "" for success. With a rendezvous, the group has
// a key-value store.
std::vector<std::string> run(int world, std::chrono::milliseconds timeout,
                             const std::function<void(NcclTransport&, const Stream&)>& body,
                             const std::string& rendezvous = "") {
  the_fake().all.clear();  // an earlier world may have used the same addresses
  the_fake().registrations.clear();
  FakeWorld fakes(world);
  return errors_in_threads(world, [&](int r) {
    this_rank = r;
    NcclSetup setup = fake_setup(fakes[r], timeout, nccl_with_windows());
    setup.gpu = std::make_shared<RankCalls>(r);
    if (!rendezvous.empty()) {
      setup.group = std::make_unique<Membership>(GroupOptions{rendezvous, r, world, timeout});
    }
    NcclTransport transport(std::move(setup));
    const Stream stream = Stream::create(Device::host(), "test");
    body(transport, stream);
    stream.synchronize();
  });
}

Schedule in_one_kernel(int world) {
  Schedule s = two_shot(world);
  s.execution = Execution::two_shot_kernel;
  return s;
}

// Runs allreduces of rank + 1 and expects the sum 1 + 2 + ... on all ranks.
void expect_sum(NcclTransport& transport, const Stream& stream, Execution execution) {
  const int world = transport.world();
  std::vector<float> data(1000, static_cast<float>(transport.rank() + 1));
  Program program(transport, in_one_kernel(world), {data.data(), data.data(), nullptr, 1000},
                  {.what = "gradients"});
  EXPECT_EQ(program.info().execution, execution);
  Buffer workspace(Device::host(), program.workspace_bytes());
  program.bind(workspace.data());
  for (int step = 0; step < 3; ++step) {
    std::fill(data.begin(), data.end(), static_cast<float>(transport.rank() + 1));
    program.run(stream);
    stream.synchronize();
    transport.check();
    EXPECT_EQ(data, std::vector<float>(1000, static_cast<float>(world * (world + 1) / 2)));
  }
  EXPECT_EQ(transport.bytes_sent(), static_cast<uint64_t>(3 * program.info().bytes_sent));
}

TEST(NcclPeerAccess, AllreduceIsOneKernel) {
  const int freed = the_fake().freed, deregistered = the_fake().deregistered;
  for (int world : {2, 4, 8}) {
    const auto errors = run(world, 20s, [](NcclTransport& t, const Stream& s) {
      EXPECT_EQ(t.peer_access_obstacle(), "");
      expect_sum(t, s, Execution::two_shot_kernel);
    });
    EXPECT_EQ(errors, std::vector<std::string>(world)) << errors[0];
  }
  EXPECT_EQ(the_fake().freed - freed, 14);
  EXPECT_EQ(the_fake().deregistered - deregistered, 14);
}

TEST(NcclPeerAccess, SendsMessagesUnlessAllRanksAreReachable) {
  the_fake().reachable = 2;
  const auto errors = run(4, 20s, [](NcclTransport& t, const Stream& s) {
    expect_has(t.peer_access_obstacle(), {"ranks reach 2 of 4"});
    expect_sum(t, s, Execution::messages);
  });
  the_fake().reachable = 0;
  EXPECT_EQ(errors, std::vector<std::string>(4)) << errors[0];
}

// Expects no rank to begin a registration if one rank cannot allocate. A registration waits for all ranks.
TEST(NcclPeerAccess, AllRanksSendMessagesIfOneCannotAllocate) {
  the_fake().refused_rank = 1;
  const auto errors =
      run(3, 20s, [](NcclTransport& t, const Stream& s) { expect_sum(t, s, Execution::messages); });
  the_fake().refused_rank = -1;
  EXPECT_EQ(errors, std::vector<std::string>(3)) << errors[0];
}

// Tests GPUs of two nodes. GPUs connected by NVLink read each other's memory, and other pairs exchange
// messages.
TEST(NcclPeerAccess, ReadsMemoryInsideNodesAndSendsMessagesBetweenThem) {
  for (int reachable : {2, 4}) {
    the_fake().reachable = reachable;
    std::vector<std::vector<float>> got(8), expected(8);
    const auto allreduced = [](Transport& t, const Stream& s, const Schedule& schedule) {
      std::vector<float> data = normal(1000, 7 + t.rank()), residual(1000, 0.0f);
      Program program(t, schedule, {data.data(), data.data(), residual.data(), 1000},
                      {.what = "gradients", .wire = kBf16});
      EXPECT_EQ(program.info().execution, schedule.execution);
      Buffer workspace(Device::host(), program.workspace_bytes());
      program.bind(workspace.data());
      for (int step = 0; step < 3; ++step) program.run(s);
      s.synchronize();
      t.check();
      data.insert(data.end(), residual.begin(), residual.end());
      return data;
    };
    const auto errors = run(8, 20s, [&](NcclTransport& t, const Stream& s) {
      EXPECT_EQ(t.peer_access_obstacle(2), "");
      expect_has(t.peer_access_obstacle(), {fmt::format("ranks reach {} of 8", reachable)});
      if (reachable == 2)
        expect_has(t.peer_access_obstacle(4),
                   {"ranks reach 2 by loads and stores, which are not nodes of 4"});
      Schedule schedule = hierarchical(4, 2);
      schedule.execution = Execution::node_peer_access;
      got[t.rank()] = allreduced(t, s, schedule);
    });
    EXPECT_EQ(errors, std::vector<std::string>(8)) << errors[0];
    run_ranks(8, Device::host(), [&](Communicator& comm) {
      expected[comm.rank()] =
          allreduced(comm.transport(), Stream::create(Device::host(), "test"), hierarchical(4, 2));
    });
    EXPECT_EQ(got, expected);
  }
  the_fake().reachable = 0;
}

TEST(NcclPeerAccess, RejectsOtherNcclVersions) {
  NcclApi other = nccl_with_windows();
  other.get_version = [](int* version) { return *version = 22907, ncclSuccess; };
  FakeWorld fakes(1);
  NcclTransport transport({.api = &other,
                           .gpu = std::make_shared<RankCalls>(0),
                           .comm = fakes[0].handle(),
                           .device = Device::host()});
  EXPECT_EQ(transport.peer_access_obstacle(), "NCCL 2.29.7 is loaded, and peer memory needs exactly 2.28.9");
}

TEST(NcclPeerAccess, NamesAMissingRank) {
  const auto errors = run(3, 300ms, [](NcclTransport& t, const Stream& s) {
    std::vector<float> data(1000, 1.0f);
    Program program(t, in_one_kernel(3), {data.data(), data.data(), nullptr, 1000}, {.what = "gradients"});
    program.bind(nullptr);
    if (t.rank() == 1) {
      std::this_thread::sleep_for(900ms);
      return;
    }
    program.run(s);
    try {
      s.synchronize();  // on a GPU, the kernel would end without an error
    } catch (const CommError&) {
    }
    t.check();
    ADD_FAILURE() << "rank " << t.rank() << " did not learn of the failure";
  });
  for (int r : {0, 2}) {
    expect_has(errors[r], {"gradients"});
    // The error names rank 1, and also the other rank if that rank was late.
    EXPECT_TRUE(std::regex_search(errors[r], std::regex("rank 1|ranks (0, )?1"))) << errors[r];
  }
}

// Tests other ranks that make a new call or repeat a known call. The deadline is far beyond the test's time
// limit.
TEST(NcclPeerAccess, FailsOnAllRanksWhenOneRankRequestsPeerMemory) {
  for (bool new_call : {true, false}) {
    for (int alone : {0, 2}) {
      SCOPED_TRACE(fmt::format("rank {} alone, the others' call is {}", alone, new_call ? "new" : "known"));
      TemporaryFolder folder;
      const auto errors = run(
          3, std::chrono::hours(1),
          [&](NcclTransport& t, const Stream& s) {
            std::vector<float> data(1000, 1.0f);
            const auto call_with = [&](const Schedule& schedule) {
              Program program(t, schedule, {data.data(), data.data(), nullptr, 1000},
                              {.what = "the gradients"});
              Buffer workspace(Device::host(), program.workspace_bytes());
              program.bind(workspace.data());
              program.run(s);
              try {
                s.synchronize();
              } catch (const CommError&) {
              }
              t.check();
            };
            call_with(two_shot(3));
            call_with(in_one_kernel(3));
            call_with(t.rank() == alone ? in_one_kernel(3) : new_call ? ring(3) : two_shot(3));
          },
          "file://" + folder.path("store"));
      for (const std::string& error : errors) {
        expect_has(error,
                   {"ranks disagree", "call 5, ", "transport=peer, which must be in every rank's spec"});
      }
      expect_has(errors[1], {"allreduce of the gradients", fmt::format("rank {}", alone)});
    }
  }
}

}  // namespace
}  // namespace gradwire::testing

#endif
