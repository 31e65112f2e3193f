// Unauthenticated peers connect to a run's ports while the run's ranks join and work. Each peer is rejected,
// the result is correct, and no rank waits for long. Ranks are threads that connect through tcp://127.0.0.1
// with a secret.
#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "collectives/net/handshake.h"
#include "collectives/net/membership.h"
#include "collectives/reducer/reducer.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/processes/processes.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

SteadyClock::time_point in(std::chrono::milliseconds time) {
  return SteadyClock::now() + time;
}

// Returns the ports on loopback at which this process listens: the ports of the store and of every rank's
// links.
std::vector<int> listening_ports() {
  std::set<std::string> own;
  DIR* folder = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(folder)) {
    char target[64] = {};
    if (readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1) > 0) own.insert(target);
  }
  closedir(folder);
  std::vector<int> ports;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string slot, local, remote, state, skip, inode;
    words >> slot >> local >> remote >> state;
    for (int i = 0; i < 5; ++i) words >> skip;
    words >> inode;
    if (state == "0A" && own.contains("socket:[" + inode + "]")) {
      ports.push_back(std::stoi(local.substr(local.find(':') + 1), nullptr, 16));
    }
  }
  return ports;
}

std::optional<Socket> connect_to(int port) {
  std::string why;
  return try_connect({"127.0.0.1", port}, in(1s), why);
}

// Attacks every listening port from a separate thread until destroyed.
class Attacker {
 public:
  using Attack = std::function<void(int port, std::mt19937& random)>;
  explicit Attacker(Attack attack)
      : thread_([this, attack = std::move(attack)] {
          std::mt19937 random(7);
          while (!stop_) {
            for (int port : listening_ports()) attack(port, random), ++attacks;
            std::this_thread::sleep_for(1ms);
          }
        }) {}
  ~Attacker() {
    stop_ = true;
    thread_.join();
  }
  std::atomic<int> attacks{0};

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

GroupOptions group_of(const std::string& rendezvous, int rank, int world, const std::string& secret) {
  return {.rendezvous = rendezvous, .rank = rank, .world = world, .timeout = 20s, .secret = secret};
}

// Runs a rank that joins slightly later than the previous rank and averages a few times.
void train(const std::string& rendezvous, int rank, int world, const std::string& interface = "") {
  std::this_thread::sleep_for(rank * 50ms);
  GroupOptions group = group_of(rendezvous, rank, world, "the run's secret");
  group.interface = interface;
  auto comm = std::make_unique<Communicator>(make_tcp_transport({.group = group}));
  Stream stream = Stream::create(Device::host(), "test");
  Reducer reducer(*comm, CompressionSpec::parse("fp32:schedule=ring"), {{"all", {3000}}}, {});
  for (int step = 0; step < 20; ++step) {
    float* gradient = reducer.gradient(0);
    for (int i = 0; i < 3000; ++i) gradient[i] = static_cast<float>(rank * 3 + i + step);
    reducer.ready(0, stream);
    reducer.wait(stream);
    stream.synchronize();
    for (int i = 0; i < 3000; ++i) ASSERT_EQ(gradient[i], static_cast<float>((world - 1) * 3) / 2 + i + step);
    std::this_thread::sleep_for(5ms);
  }
  comm->barrier();
}

void run_under(const Attacker::Attack& attack) {
  constexpr int kWorld = 4;
  const std::string rendezvous = free_tcp_rendezvous();
  Attacker attacker(attack);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kWorld; ++r)
    ranks.emplace_back([&, r] { EXPECT_NO_THROW(train(rendezvous, r, kWorld)); });
  for (auto& rank : ranks) rank.join();
  EXPECT_GT(attacker.attacks, 0);
}

TEST(UnauthenticatedPeers, RandomBytesDoNotAffectTheRun) {
  run_under([](int port, std::mt19937& random) {
    auto socket = connect_to(port);
    if (!socket) return;
    std::string bytes(random() % 5000, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    send_all(*socket, bytes, in(100ms));
  });
}

TEST(UnauthenticatedPeers, ProtocolMessagesWithoutTheSecretDoNotAffectTheRun) {
  run_under([](int port, std::mt19937& random) {
    auto socket = connect_to(port);
    if (!socket) return;
    introduce(*socket, {random() % 2 ? "a guess" : "", kStorePurpose}, in(500ms));
    // Send a hello frame as rank 1, that rank's orderly departure, and a failure of the group.
    std::string words = Frame{Frame::Op::hello, 0, "watch", StoreHello{1, 4}.encode()}.encode();
    words += Frame{Frame::Op::bye, 0, "", ""}.encode();
    words += Frame{Frame::Op::fail, 0, "an unauthenticated peer says so", ""}.encode();
    send_all(*socket, words, in(100ms));
  });
}

TEST(UnauthenticatedPeers, BytesWithoutAHandshakeAreNotRead) {
  run_under([](int port, std::mt19937&) {
    auto socket = connect_to(port);
    if (!socket) return;
    send_all(*socket, Frame{Frame::Op::fail, 0, "an unauthenticated peer says so", ""}.encode(), in(100ms));
    char byte;
    receive_exactly(*socket, &byte, 1, in(100ms));
  });
}

TEST(UnauthenticatedPeers, SilentConnectionsDoNotBlockRanks) {
  std::vector<Socket> held;  // only the attacker's thread uses it
  run_under([&](int port, std::mt19937& random) {
    if (held.size() > 300) held.erase(held.begin(), held.begin() + 150);
    for (int i = 0; i < 20; ++i) {
      if (auto socket = connect_to(port)) held.push_back(std::move(*socket));
    }
    if (!held.empty())
      send_all(held[random() % held.size()], "gw-rank1"[random() % 8] + std::string(), in(10ms));
  });
}

// Sends the first bytes of a valid handshake slowly, on more connections than the listener accepts.
TEST(UnauthenticatedPeers, SlowConnectionsDoNotBlockRanks) {
  std::map<int, std::vector<std::pair<Socket, size_t>>> held;  // by port; each with the number of bytes sent
  const std::string words = "gw-rank1" + std::string(64, 'x');
  run_under([&](int port, std::mt19937&) {
    auto& slow = held[port];
    if (auto socket = connect_to(port)) slow.emplace_back(std::move(*socket), 0);
    for (auto& [socket, said] : slow) {
      if (said < words.size() && send_all(socket, words.substr(said, 1), in(10ms))) ++said;
    }
    if (slow.size() > 150) slow.erase(slow.begin());
  });
}

size_t times(const std::string& word, const std::string& text) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; at += word.size()) ++n;
  return n;
}

// Connects to the ports of the ranks' links. While ranks 0 and 1 wait for rank 2, both listen for data,
// because their address is known. The store also listens.
TEST(UnauthenticatedPeers, Rank0LogsConnectionsToAnyRanksDataPort) {
  const std::string rendezvous = free_tcp_rendezvous();
  ::testing::internal::CaptureStderr();
  std::vector<std::thread> ranks;
  for (int r = 0; r < 2; ++r) ranks.emplace_back([&, r] { EXPECT_NO_THROW(train(rendezvous, r, 3, "lo")); });
  const auto deadline = in(20s);
  while (listening_ports().size() < 3 && SteadyClock::now() < deadline) std::this_thread::sleep_for(1ms);
  std::vector<Socket> silent;
  for (const int port : listening_ports()) {
    if (auto garbage = connect_to(port)) send_all(*garbage, std::string(100, 'x'), in(5s));
    if (auto socket = connect_to(port)) silent.push_back(std::move(*socket));
  }
  EXPECT_NO_THROW(train(rendezvous, 2, 3, "lo"));
  for (auto& rank : ranks) rank.join();
  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const int r : {0, 1}) {
    const std::string line = fmt::format("gradwire: rank {} rejected a connection from 127.0.0.1: ", r);
    EXPECT_EQ(times(line + "not a rank of this version\n", log), r == 0 ? 2u : 1u)
        << log;  // rank 0 also has the store's port
    EXPECT_GE(times(line + kSaidNothing + "\n", log), 1u) << log;
  }
}

TEST(UnauthenticatedPeers, StoreServesAfterTenThousandConnections) {
  const std::string rendezvous = free_tcp_rendezvous();
  const int port = std::stoi(rendezvous.substr(rendezvous.rfind(':') + 1));
  Membership alone(group_of(rendezvous, 0, 2, "secret"));
  auto resident_pages = [] {
    long total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident;
  };
  std::vector<Socket> held;
  long before = 0;
  for (int i = 0; i < 10'000; ++i) {
    if (held.size() > 200) held.erase(held.begin());
    if (auto socket = connect_to(port)) held.push_back(std::move(*socket));
    if (i == 1000) before = resident_pages();
  }
#ifdef GRADWIRE_SANITIZED
  constexpr long kMax = 100'000;  // 400 MB: sanitizers keep freed memory for a while
#else
  constexpr long kMax = 1000;
#endif
  EXPECT_LT(resident_pages() - before, kMax);
  alone.store().set("key", "value");
  std::thread second([&] {
    EXPECT_EQ(Membership(group_of(rendezvous, 1, 2, "secret")).store().get("key", in(5s), "x"), "value");
  });
  second.join();
}

TEST(Secrets, ReportsADifferentSecretToTheRank) {
  const std::string rendezvous = free_tcp_rendezvous();
  Membership first(group_of(rendezvous, 0, 2, "one"));
  ::testing::internal::CaptureStderr();
  const std::string text = error_of([&] { Membership(group_of(rendezvous, 1, 2, "another")); });
  expect_has(text, {"has another secret", "GRADWIRE_SECRET"});
  // The rank retries a few times, because a run that has just ended may still occupy the port.
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string line = "gradwire: rank 0 rejected a connection from 127.0.0.1: wrong secret";
  EXPECT_EQ(times(line + "\n", log), 1u) << log;
  EXPECT_LE(times("\n", log), 4u) << log;
  EXPECT_EQ(times(line, log), times("\n", log)) << log;
  EXPECT_EQ(error_of([&] { Membership(group_of(rendezvous, 1, 2, "one")); }), "no error");
}

TEST(Secrets, RefusesNetworkPortsWithoutASecret) {
  for (const char* address : {"0.0.0.0", "10.1.2.3", "[::]"}) {
    const std::string rendezvous = fmt::format("tcp://{}:29555", address);
    for (int rank : {0, 1}) {
      const std::string text = error_of([&] { Membership(group_of(rendezvous, rank, 2, "")); });
      expect_has(text, {rendezvous, "GRADWIRE_SECRET"});
    }
  }
}

TEST(Secrets, RejectsListenAddressesOfOtherMachines) {
  const std::string text = error_of([] { Membership(group_of("tcp://192.0.2.1:29555", 0, 2, "secret")); });
  expect_has(text, {"cannot listen on 192.0.2.1:29555: it is not an address of this machine"});
}

TEST(Secrets, StoreListensOnlyAtTheGivenAddress) {
  const std::string rendezvous = free_tcp_rendezvous();
  const std::string port = rendezvous.substr(rendezvous.rfind(':') + 1);
  Membership first(group_of("tcp://127.0.0.2:" + port, 0, 1, ""));
  EXPECT_FALSE(connect_to(std::stoi(port)));  // the listening address is not 127.0.0.1
}

TEST(Secrets, RendezvousFileIsReadableOnlyByItsOwner) {
  const std::string path = scratch_path("meeting");
  Membership first(group_of("file://" + path, 0, 1, ""));
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

GroupOptions rank_of(const std::string& job, const std::string& rendezvous, int rank) {
  GroupOptions options = group_of(rendezvous, rank, 2, "");
  options.job = job;
  return options;
}

TEST(TwoJobsAtOnePort, AreDistinguishedByTheLaunchersIds) {
  const std::string rendezvous = free_tcp_rendezvous();
  Membership first(rank_of("Slurm job 7, step 0", rendezvous, 0));
  const std::string text = error_of([&] { Membership(rank_of("Slurm job 8, step 0", rendezvous, 1)); });
  expect_has(text, {"belongs to another run: Slurm job 7, step 0, and this rank to Slurm job 8, step 0",
                    "a port of its own"});
  // The rank number is still free for the right process.
  EXPECT_EQ(error_of([&] { Membership(rank_of("Slurm job 7, step 0", rendezvous, 1)); }), "no error");
}

TEST(TwoJobsAtOnePort, AreBothRejectedWithoutIds) {
  const std::string rendezvous = free_tcp_rendezvous();
  Membership first(group_of(rendezvous, 0, 2, ""));
  Membership theirs(group_of(rendezvous, 1, 2, ""));  // this rank may belong to the other job
  for (const std::string& text : {error_of([&] { Membership(group_of(rendezvous, 1, 2, "")); }),
                                  error_of([&] { first.barrier(); }), error_of([&] { theirs.barrier(); })}) {
    expect_has(text, {"two processes were started as rank 1; if they belong to two runs"});
  }
}

TEST(TwoJobsAtOnePort, TakeTheirIdsFromLauncherVariables) {
  using Variables = std::map<std::string, std::string>;
  const auto job = [](const Variables& set) {
    return job_from_environment(
        [&](const char* name) { return set.contains(name) ? set.at(name).c_str() : nullptr; });
  };
  EXPECT_EQ(job({}), "");
  EXPECT_EQ(job({{"TORCHELASTIC_RUN_ID", "f00"}, {"SLURM_JOB_ID", "7"}}), "torchrun's f00");
  EXPECT_EQ(job({{"TORCHELASTIC_RUN_ID", "none"}}), "");  // torchrun names a run without a name "none"
  EXPECT_EQ(job({{"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}}),
            "Slurm job 7, step 2");
  // With one srun per rank, the ranks' steps differ, but their job is the same.
  EXPECT_EQ(job({{"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "2"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
            "Slurm job 7");
  EXPECT_EQ(job({{"SLURM_JOB_ID", "8"}, {"SLURM_HET_JOB_ID", "7"}}), "Slurm job 7");
  EXPECT_EQ(job({{"OMPI_COMM_WORLD_SIZE", "4"}, {"PMIX_NAMESPACE", "p1"}, {"SLURM_JOB_ID", "7"}}),
            "mpirun's p1");
  EXPECT_EQ(job({{"PMI_SIZE", "4"}, {"PMI_JOBID", "9"}}), "mpirun's 9");
  EXPECT_EQ(job({{"PMI_SIZE", "1"}, {"PMI_JOBID", "9"}}), "");
  EXPECT_EQ(job({{"GRADWIRE_JOB", "mine"}, {"SLURM_JOB_ID", "7"}}), "'mine'");
  expect_has(error_of([&] { job({{"GRADWIRE_JOB", "a\nb"}}); }), {"GRADWIRE_JOB"});
}

TEST(Secrets, NextGroupReusesTheAddressOfAFailedGroup) {
  const std::string rendezvous = free_tcp_rendezvous();
  auto first = std::make_unique<Membership>(group_of(rendezvous, 0, 2, ""));
  auto other = std::make_unique<Membership>(group_of(rendezvous, 1, 2, ""));
  other->store().report("out of memory");
  other = nullptr;
  // Rank 1 restarts before rank 0 has closed its store.
  std::thread early([&] {
    EXPECT_EQ(error_of([&] { Membership(group_of(rendezvous, 1, 2, "")).barrier(); }), "no error");
  });
  std::this_thread::sleep_for(100ms);
  first = nullptr;
  EXPECT_EQ(error_of([&] { Membership(group_of(rendezvous, 0, 2, "")).barrier(); }), "no error");
  early.join();
}

}  // namespace
}  // namespace gradwire::testing
