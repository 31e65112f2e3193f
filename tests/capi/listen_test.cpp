// gw_listen(): the interface and the ports at which a rank listens.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <future>
#include <sstream>

#include "tests/capi/ranks.h"
#include "tests/temporary_folder.h"

namespace {

// Sockets of this machine that listen at these ports, IPv4.
int listeners(int first, int last) {
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  int found = 0;
  while (std::getline(table, line)) {
    unsigned number = 0, address = 0, port = 0, remote = 0, remote_port = 0, state = 0;
    if (std::sscanf(line.c_str(), " %u: %x:%x %x:%x %x", &number, &address, &port, &remote, &remote_port,
                    &state) == 6 &&
        state == 0x0a && static_cast<int>(port) >= first && static_cast<int>(port) <= last) {
      ++found;
    }
  }
  return found;
}

template <typename Body>
void on_two_ranks(const Body& body) {
  const gradwire::testing::TemporaryFolder folder;
  const std::string name = "file://" + folder.path("meet");
  std::thread other([&] { body(name, 1); });
  body(name, 0);
  other.join();
}

constexpr int kPorts = 8;
// The first of kPorts at which nobody listens.
int free_ports() {
  int first = 20'000 + getpid() % 10'000;
  while (listeners(first, first + kPorts - 1) > 0) first += kPorts;
  return first;
}

TEST(CApiListen, DataGoesThroughTheInterfaceAndThePortsThatWereChosen) {
  const int first = free_ports(), last = first + kPorts - 1;
  on_two_ranks([&](const std::string& name, int rank) {
    GW_EXPECT_OK(gw_shrinkable(1));  // so that one is kept after joining
    GW_EXPECT_OK(gw_listen("lo", first, last));
    gw_comm comm = nullptr;
    GW_EXPECT_OK(gw_comm_create(name.c_str(), rank, 2, GW_HOST, 30'000, &comm));
    float x = 1;
    GW_EXPECT_OK(gw_allreduce(comm, &x, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    EXPECT_EQ(x, 2.0f);
    if (rank == 0) {
      EXPECT_EQ(listeners(first, last), 3);  // one of each rank, and rank 0's store
    }
    GW_EXPECT_OK(gw_allreduce(comm, &x, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));  // rank 0 has looked
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
}

TEST(CApiListen, ANewcomerListensWhereItChoseTo) {
  const int first = free_ports(), last = first + kPorts - 1;
  std::promise<std::string> told;
  std::thread newcomer([&] {
    const std::string doors = told.get_future().get();
    GW_EXPECT_OK(gw_listen("lo", first, last));
    gw_comm comm = nullptr;
    GW_EXPECT_OK(gw_comm_join(doors.c_str(), 30'000, &comm));
    EXPECT_EQ(listeners(first, last), 1);
    float x = 1;
    GW_EXPECT_OK(gw_allreduce(comm, &x, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    EXPECT_EQ(x, 3.0f);
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  on_two_ranks([&](const std::string& name, int rank) {
    GW_EXPECT_OK(gw_shrinkable(1));
    gw_comm comm = nullptr, grown = nullptr;
    GW_EXPECT_OK(gw_comm_create(name.c_str(), rank, 2, GW_HOST, 30'000, &comm));
    GW_EXPECT_OK(gw_comm_admit(comm, 3));
    if (rank == 0) {
      char doors[4096];
      size_t bytes = 0;
      GW_EXPECT_OK(gw_comm_doors(comm, doors, sizeof doors, &bytes));
      told.set_value(doors);
    }
    for (int call = 0; grown == nullptr && call < 4000; ++call) {
      int32_t waiting = 0;
      GW_EXPECT_OK(gw_comm_waiting(comm, &waiting));
      auto somebody = static_cast<float>(waiting);
      GW_EXPECT_OK(gw_broadcast(comm, &somebody, 1, GW_FLOAT32, 0, "fp32", nullptr));
      if (somebody > 0) {
        GW_EXPECT_OK(gw_comm_grow(comm, &grown));
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    float x = 1;
    GW_EXPECT_OK(gw_allreduce(grown, &x, 1, GW_FLOAT32, GW_SUM, "fp32", nullptr));
    GW_EXPECT_OK(gw_comm_destroy(grown));
    GW_EXPECT_OK(gw_comm_destroy(comm));
  });
  newcomer.join();
}

TEST(CApiListen, PortsThatAreTakenAreNamed) {
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  socklen_t size = sizeof any;
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&any), size), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  ASSERT_EQ(getsockname(taken, reinterpret_cast<sockaddr*>(&any), &size), 0);
  const int port = ntohs(any.sin_port);
  on_two_ranks([&](const std::string& name, int rank) {
    if (rank == 1) {
      GW_EXPECT_OK(gw_listen(nullptr, port, port));
    }
    gw_comm comm = nullptr;
    EXPECT_EQ(gw_comm_create(name.c_str(), rank, 2, GW_HOST, 5'000, &comm), GW_COMM_FAILED);
    EXPECT_NE(std::string(gw_last_error()).find(std::to_string(port)), std::string::npos) << gw_last_error();
  });
  close(taken);
}

TEST(CApiListen, WhatIsNoRangeOrNoInterfaceIsRefused) {
  GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "ports 9 to 8", gw_listen(nullptr, 9, 8));
  GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "ports 0 to 8", gw_listen(nullptr, 0, 8));
  GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "ports 1 to 65536", gw_listen(nullptr, 1, 65536));
  GW_EXPECT_FAILS(GW_BAD_ARGUMENT, "nosuch", gw_listen("nosuch", 0, 0));
}

}  // namespace
