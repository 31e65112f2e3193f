// Connections between ranks, tested without a communicator: their threads alternate without losing a message.
#include "collectives/transport/tcp/tcp_links.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "runtime/util/error.h"
#include "runtime/util/hash.h"

// Imitates poll() on a busy machine. A rank's thread calls poll() late. The links' thread returns from poll()
// late, with all events up to then.
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

// Expects a message to wake its owner even if the links' thread moves the message after the owner has begun
// to wait.
TEST(TcpLinks, MessagesWakeTheirOwnerWhicheverThreadMovesThem) {
  constexpr int kRounds = 500;
  std::array<TcpLinks, 2> links = {TcpLinks(0, 2, "127.0.0.1", "key"), TcpLinks(1, 2, "127.0.0.1", "key")};
  const std::vector<std::string> contacts = {links[0].contact(), links[1].contact()};
  // Rank 1 has the shorter deadline. Its failure ends rank 0's wait.
  auto run = [&](int rank) {
    const auto deadline = SteadyClock::now() + std::chrono::seconds(rank == 0 ? 60 : 30);
    TcpLinks& mine = links[rank];
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
      volatile uint32_t spin = random >> 16;  // varies when wait() is called relative to the arrival
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

// Sends messages of any size, in any order, with checksums at either end.
TEST(TcpLinks, MessagesArriveWholeWithChecksumsAndWithout) {
  for (const auto& [of_0, of_1] : {std::pair{true, true}, {true, false}, {false, true}}) {
    std::array<TcpLinks, 2> links = {TcpLinks(0, 2, "127.0.0.1", "key", of_0),
                                     TcpLinks(1, 2, "127.0.0.1", "key", of_1)};
    const std::vector<std::string> contacts = {links[0].contact(), links[1].contact()};
    const size_t sizes[] = {0, 1, 7, 8, 4096, (128 << 10) - 1, 128 << 10, (128 << 10) + 5, 5'000'001};
    auto byte = [](int rank, size_t size, size_t i) { return static_cast<char>(i * 31 + size + rank); };
    auto run = [&](int rank) {
      const auto deadline = SteadyClock::now() + std::chrono::seconds(60);
      TcpLinks& mine = links[rank];
      mine.connect(contacts, deadline);
      for (const size_t size : sizes) {
        std::vector<char> out(size), in(size);
        for (size_t i = 0; i < size; ++i) out[i] = byte(rank, size, i);
        TcpLinks::Message receive, send;
        receive.peer = send.peer = 1 - rank;
        receive.tag = send.tag = size;
        receive.bytes = send.bytes = size;
        receive.data = in.data();
        send.data = out.data();
        send.sent = true;
        mine.post(receive);
        mine.post(send);
        EXPECT_TRUE(mine.wait(send, deadline));
        EXPECT_TRUE(mine.wait(receive, deadline));
        size_t wrong = 0;
        for (size_t i = 0; i < size; ++i) wrong += in[i] != byte(1 - rank, size, i);
        EXPECT_EQ(wrong, 0u) << size;
      }
    };
    std::thread other([&] { run(1); });
    run(0);
    other.join();
  }
}

TEST(Crc32c, MatchesTheStandardByInstructionAndByTable) {
  EXPECT_EQ(crc32c("123456789", 9, 0), 0xe3069283u);
  std::vector<unsigned char> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * i + 3 * i);
  for (size_t begin : {0, 1, 5}) {
    for (size_t size : {0, 1, 7, 8, 9, 64, 501}) {
      const uint32_t whole = crc32<kCrc32c>(bytes.data() + begin, size);
      EXPECT_EQ(crc32c(bytes.data() + begin, size, 0), whole);
      const size_t half = size / 3;
      EXPECT_EQ(crc32c(bytes.data() + begin + half, size - half, crc32c(bytes.data() + begin, half, 0)),
                whole);
    }
  }
}

}  // namespace
}  // namespace gradwire
