// Connections between ranks, alone: the threads that work on them take turns without losing a message.
#include "collectives/transport/tcp_links.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "runtime/error.h"

// poll() as a busy machine does it: a rank's own thread comes to it late, and the links' thread returns from it late,
// with what has happened meanwhile.
static thread_local bool of_a_rank = false;
static std::atomic<bool> busy_machine = false;
extern "C" int poll(pollfd* entries, nfds_t count, int timeout_ms) {
  auto real = [&](int ms) {
    const timespec timeout = {ms / 1000, ms % 1000 * 1'000'000L};
    return static_cast<int>(
        syscall(SYS_ppoll, entries, count, ms < 0 ? nullptr : &timeout, nullptr, size_t{0}));
  };
  if (!busy_machine) return real(timeout_ms);
  if (of_a_rank) {
    usleep(300);
    return real(timeout_ms);
  }
  real(timeout_ms);
  usleep(100);
  return real(0);
}

namespace gradwire {
namespace {

// A message that the links' own thread moves after its owner has begun to wait must wake the owner.
TEST(TcpLinks, EveryMessageWakesItsWaiterWhicheverThreadMovesIt) {
  constexpr int kRounds = 500;
  std::array<TcpLinks, 2> links = {TcpLinks(0, 2, "127.0.0.1", "key"), TcpLinks(1, 2, "127.0.0.1", "key")};
  const std::vector<std::string> contacts = {links[0].contact(), links[1].contact()};
  // Rank 1 soon gives up, and ends rank 0's wait.
  auto run = [&](int rank) {
    const auto deadline = SteadyClock::now() + std::chrono::seconds(rank == 0 ? 60 : 30);
    TcpLinks& mine = links[static_cast<size_t>(rank)];
    mine.connect(contacts, deadline);
    of_a_rank = true;
    uint32_t random = static_cast<uint32_t>(rank);
    int i = 0;
    for (bool ok = true; i < kRounds && ok; i += ok) {
      int out = i, in = -1;
      TcpLinks::Message receive, send;
      receive.peer = send.peer = 1 - rank;
      receive.tag = send.tag = 7;
      receive.bytes = send.bytes = sizeof out;
      receive.data = &in;
      send.data = &out;
      send.sent = true;
      auto answer = [&] {
        mine.post(send);
        return mine.wait(send, deadline);
      };
      random = random * 1664525u + 1013904223u;
      volatile uint32_t spin = random >> 16;  // moves wait() around the arrival
      try {
        if (rank == 0) ok = answer();
        mine.post(receive);
        mine.hand_over();
        while (spin > 0) spin = spin - 1;
        ok = ok && mine.wait(receive, deadline) && in == i;
        if (rank == 1) ok = ok && answer();
      } catch (const CommError&) {
        ok = false;
      }
    }
    if (i < kRounds) links[0].interrupt();
    of_a_rank = false;
    return i;
  };
  busy_machine = true;
  int rounds_of_1 = 0;
  std::thread other([&] { rounds_of_1 = run(1); });
  EXPECT_EQ(run(0), kRounds);
  other.join();
  busy_machine = false;
  EXPECT_EQ(rounds_of_1, kRounds);
}

}  // namespace
}  // namespace gradwire
