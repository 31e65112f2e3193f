// Tests gw_comm_options.interface and .ports, which determine the address and port at which a rank listens.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <string>

#include "tests/capi/ranks.h"
#include "tests/support/temporary_folder.h"

namespace {

// Returns the inodes of this process's sockets.
std::set<std::string> own_sockets() {
  std::set<std::string> inodes;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;  // directory_iterator's own file may be closed by now
    const std::string target = std::filesystem::read_symlink(file.path(), closed);
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

enum class Owner { kAny, kThisProcess };

// Returns the number of IPv4 sockets of `owner` that listen at ports `first` to `last`. Other tests that run
// at the same time may listen at ports of the same range.
int listeners(int first, int last, Owner owner) {
  const std::set<std::string> own = own_sockets();
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  int found = 0;
  while (std::getline(table, line)) {
    unsigned port = 0, state = 0;
    char inode[32] = {};
    if (std::sscanf(line.c_str(), " %*u: %*x:%x %*x:%*x %x %*s %*s %*s %*s %*s %31s", &port, &state, inode) ==
            3 &&
        state == 0x0a && static_cast<int>(port) >= first && static_cast<int>(port) <= last &&
        (owner == Owner::kAny || own.contains(inode))) {
      ++found;
    }
  }
  return found;
}

template <typename Body>
void on_two_ranks(const Body& body) {
  const gradwire::testing::TemporaryFolder folder;
  const std::string name = "file://" + folder.path("meet");
  capi::in_threads(2, [&](int rank) { body(name, rank); });
}

gw_status create(gw_comm_options options, const char* interface, int first, int last, gw_comm* comm) {
  options.interface = interface;
  options.ports[0] = first;
  options.ports[1] = last;
  return gw_comm_create(&options, comm);
}

constexpr int kPorts = 8;
// Returns the first of kPorts free ports.
int free_ports() {
  int first = 20'000 + getpid() % 10'000;
  while (listeners(first, first + kPorts - 1, Owner::kAny) > 0) first += kPorts;
  return first;
}

TEST(CApiListen, UsesTheChosenInterfaceAndPorts) {
  const int first = free_ports(), last = first + kPorts - 1;
  on_two_ranks([&](const std::string& name, int rank) {
    gw_comm comm = nullptr;
    auto options = capi::comm_options(name.c_str(), rank, 2, GW_HOST, 30'000);
    options.shrinkable = 1;  // ranks keep listening after joining
    GW_EXPECT_OK(create(options, "lo", first, last, &comm));
    float x = 1;
    GW_EXPECT_OK(capi::sum(comm, x));
    EXPECT_EQ(x, 2.0f);
    if (rank == 0) {
      EXPECT_EQ(listeners(first, last, Owner::kThisProcess),
                3);  // one socket per rank, and the store of rank 0
    }
    GW_EXPECT_OK(capi::sum(comm, x));  // waits until rank 0 has counted
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

TEST(CApiListen, JoinerListensAtTheInterfaceAndPortsItChose) {
  const int first = free_ports(), last = first + kPorts - 1;
  std::promise<std::string> invited;
  std::thread joiner([&] {
    const std::string invitation = invited.get_future().get();
    gw_comm comm = nullptr;
    auto options = capi::comm_options(nullptr, 0, 0, GW_HOST, 30'000);
    options.invitation = invitation.c_str();
    GW_EXPECT_OK(create(options, "lo", first, last, &comm));
    EXPECT_EQ(listeners(first, last, Owner::kThisProcess), 1);
    float x = 1;
    GW_EXPECT_OK(capi::sum(comm, x));
    EXPECT_EQ(x, 3.0f);
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  on_two_ranks([&](const std::string& name, int rank) {
    gw_comm comm = nullptr, grown = nullptr;
    auto options = capi::comm_options(name.c_str(), rank, 2, GW_HOST, 30'000);
    options.shrinkable = 1;
    GW_EXPECT_OK(gw_comm_create(&options, &comm));
    GW_EXPECT_OK(gw_comm_admit(comm, 3));
    if (rank == 0) invited.set_value(capi::query(comm).invitation);
    for (int call = 0; grown == nullptr && call < 4000; ++call) {
      auto somebody = static_cast<float>(capi::query(comm).joiners);
      GW_EXPECT_OK(gw_broadcast(comm, &somebody, 1, GW_FLOAT32, 0, "fp32", nullptr, nullptr));
      if (somebody > 0) {
        GW_EXPECT_OK(gw_comm_grow(comm, &grown));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    float x = 1;
    GW_EXPECT_OK(capi::sum(grown, x));
    GW_EXPECT_OK(gw_comm_destroy(grown));
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  joiner.join();
}

TEST(CApiListen, NamesPortsInUse) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  socklen_t size = sizeof any;
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&any), size), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  ASSERT_EQ(getsockname(taken, reinterpret_cast<sockaddr*>(&any), &size), 0);
  const int port = ntohs(any.sin_port);
  on_two_ranks([&](const std::string& name, int rank) {
    gw_comm comm = nullptr;
    const int own = rank == 1 ? port : 0;
    GW_EXPECT_FAILS(
        GW_COMM_FAILED, std::to_string(port),
        create(capi::comm_options(name.c_str(), rank, 2, GW_HOST, 5'000), nullptr, own, own, &comm));
  });
  close(taken);
}

TEST(CApiListen, RejectsInvalidPortRangesAndInterfaces) {
  gw_comm comm = nullptr;
  for (int world : {1, 2}) {
    const auto options = capi::comm_options("tcp://127.0.0.1:9", 0, world);
    GW_EXPECT_BAD("ports 9 to 8", create(options, nullptr, 9, 8, &comm));
    GW_EXPECT_BAD("ports 0 to 8", create(options, nullptr, 0, 8, &comm));
    GW_EXPECT_BAD("ports 1 to 65536", create(options, nullptr, 1, 65536, &comm));
    GW_EXPECT_BAD("nosuch", create(options, "nosuch", 0, 0, &comm));
  }
  EXPECT_EQ(comm, nullptr);
}

}  // namespace
