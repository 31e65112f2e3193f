// Tests the limits on the data that ranks store at rank 0's store.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>

#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"
#include "tests/processes/store_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

StoreLimits small_limits() {
  StoreLimits limits(3);
  limits.message_bytes_of_rank = 100'000;
  limits.message_bytes = 150'000;
  limits.key_bytes_of_rank = 20'000;
  limits.key_bytes = 30'000;
  limits.unanswered_of_rank = 10;
  limits.unread_bytes = 1'000'000;
  limits.connections_of_rank = 4;
  limits.notes_of_rank = 5;
  return limits;
}

class StoreLimitsTest : public StoreFixture {
 protected:
  StoreLimitsTest() {
    server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), kWorld, "key", "", small_limits());
  }
  // Returns a connection that has proved the secret and sent no frame.
  Socket proved() {
    std::string why;
    auto socket = try_connect({"127.0.0.1", server->port()}, in(5s), why);
    EXPECT_EQ(introduce(*socket, {"key", kStorePurpose}, in(5s)), "");
    return std::move(*socket);
  }
  Socket hello(int rank) {
    Socket socket = proved();
    const std::string me = StoreHello{rank, kWorld}.encode();
    EXPECT_TRUE(send_frame(socket, {Frame::Op::hello, 1, "command", me}, in(5s)));
    return socket;
  }
  static bool is_cut_off(const Socket& socket) {
    char bytes[4096];
    while (wait_readable(socket.fd(), in(20s))) {
      const ssize_t n = recv(socket.fd(), bytes, sizeof bytes, 0);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
    }
    return false;
  }
  static long resident_pages() {
    long total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident;
  }
};

TEST_F(StoreLimitsTest, EndsTheGroupAndNamesARankThatFloodsRankZero) {
  auto a = join(0), b = join(1);
  Told told;
  told.watch(*a, 0);
  const long before = resident_pages();
  const std::string note(10'000, 'x');
  for (int i = 0; i < 5000; ++i) b->send_message(note);
  EXPECT_EQ(told.of(0).find("rank 1 has sent rank 0 more messages than it has room for"), 0u) << told.of(0);
  EXPECT_EQ(b->report("x"), told.of(0));
#ifndef GRADWIRE_SANITIZED
  EXPECT_LT(resident_pages() - before, 2500) << "of 50 MB, 10 MB were kept";
#endif
  (void)before;
}

TEST_F(StoreLimitsTest, ReceivedMessagesFreeRoomAndEmptyOnesCount) {
  auto a = join(0), b = join(1);
  for (int i = 0; i < 100; ++i) {
    b->send_message(std::string(50'000, 'x'));
    ASSERT_TRUE(server->take_message(1, in(10s)));
  }
  Told told;
  told.watch(*a, 0);
  for (int i = 0; i < 2000; ++i) b->send_message("");
  EXPECT_EQ(told.of(0).find("rank 1 has sent"), 0u) << told.of(0);
}

TEST_F(StoreLimitsTest, LimitsAllRanksTogether) {
  auto a = join(0), b = join(1), c = join(2);
  Told told;
  told.watch(*a, 0);
  b->send_message(std::string(90'000, 'x'));
  c->send_message(std::string(90'000, 'x'));
  EXPECT_EQ(told.of(0).find("rank "), 0u) << told.of(0);
  expect_has(told.of(0), {"more messages than it has room for"});
}

TEST_F(StoreLimitsTest, EndsTheGroupAndNamesARankThatStoresTooManyKeys) {
  auto a = join(0), b = join(1);
  const std::string text = error_of([&] {
    for (int i = 0; i < 1000; ++i) b->set(fmt::format("key {}", i), "value");
  });
  EXPECT_EQ(text.find("rank 1 leaves more with rank 0 than it has room for"), 0u) << text;
  expect_has(error_of([&] { a->add("n"); }), {"rank 1 leaves more"});
}

TEST_F(StoreLimitsTest, CountersCountAsKeysAndDroppedOrReplacedKeysFreeRoom) {
  auto a = join(0), b = join(1);
  for (int i = 0; i < 1000; ++i) {
    b->set("the same", std::string(5000, 'x'));
    b->add(fmt::format("count {}", i));
    b->set(fmt::format("count {}", i), "open");
    b->drop(fmt::format("count {}", i));
  }
  EXPECT_EQ(b->add("count 7"), 1);  // the count restarts from zero
  const std::string text = error_of([&] {
    for (int i = 0; i < 1000; ++i) b->add(fmt::format("another {}", i));
  });
  EXPECT_EQ(text.find("rank 1 leaves more with rank 0"), 0u) << text;
}

TEST_F(StoreLimitsTest, Rank0LogsNotesAsLinesAndLimitsTheirNumber) {
  ::testing::internal::CaptureStderr();
  {
    auto a = join(0), b = join(1);
    EXPECT_TRUE(b->note("has seen\x1b[2J\na peer"));
    for (int i = 0; i < 100; ++i) b->note(std::string(1500, 'x'));
    a->note("has seen nobody");
  }
  server = nullptr;
  const std::string log = ::testing::internal::GetCapturedStderr();
  expect_has(log, {"gradwire: rank 1 has seen [2J a peer\n", "gradwire: rank 0 has seen nobody\n",
                   "gradwire: rank 1 says more than is printed from here on\n"});
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 6) << log;
  EXPECT_LT(log.size(), 5000u);
}

TEST_F(StoreLimitsTest, ClosesConnectionsAtTheHeaderOfATooLargeFrame) {
  auto a = join(0);
  const Socket socket = hello(1);
  ASSERT_TRUE(send_all(socket, std::string("\x01\x00\x10\x00", 4), in(5s)));  // 1 MiB and a byte
  EXPECT_TRUE(is_cut_off(socket));
  a->set("still", "fine");
}

TEST_F(StoreLimitsTest, LimitsPendingRequests) {
  auto a = join(0);
  Told told;
  told.watch(*a, 0);
  const Socket socket = hello(2);
  for (uint32_t i = 0; i < 30; ++i) {
    send_frame(socket, {Frame::Op::get, i, "never", ""}, in(5s));
  }
  EXPECT_EQ(told.of(0), "rank 2 waits for the answers to 10 requests at once");
}

TEST_F(StoreLimitsTest, EndsTheGroupAndNamesARankThatDoesNotRead) {
  auto a = join(0);
  Told told;
  told.watch(*a, 0);
  a->set("key", std::string(15'000, 'x'));
  const Socket socket = hello(2);
  const std::string get = Frame{Frame::Op::get, 1, "key", ""}.encode();
  for (int i = 0; i < 2000 && send_all(socket, get, in(5s)); ++i) continue;
  EXPECT_EQ(told.of(0).find("rank 2 does not read what it asked for"), 0u) << told.of(0);
}

TEST_F(StoreLimitsTest, LimitsConnectionsPerRankAndAcceptsOneHelloOnEach) {
  std::vector<Socket> held;
  for (int i = 0; i < 4; ++i) held.push_back(hello(1));
  // The answers to these connections arrive first, so the server has registered the connections before the
  // next connection.
  char byte;
  for (const Socket& socket : held) ASSERT_TRUE(receive_exactly(socket, &byte, 1, in(5s)));
  EXPECT_EQ(error_of([&] { join(1); }), "rank 1 has 4 connections to rank 0's store already");
  // A connection cannot become another rank's connection later, in order to announce that rank's departure.
  ASSERT_TRUE(send_frame(held[0], {Frame::Op::hello, 2, "command", StoreHello{0, 3}.encode()}, in(5s)));
  EXPECT_TRUE(is_cut_off(held[0]));
}

TEST_F(StoreLimitsTest, SilentConnectionsCountAsPendingAfterProvingTheSecret) {
  std::vector<Socket> held;
  for (size_t i = 0; i < 2 * kMaxUnauthenticated; ++i) held.push_back(proved());
  auto a = join(0), b = join(1);
  b->set("still", "fine");
  EXPECT_EQ(a->get("still", in(10s), "x"), "fine");
  EXPECT_TRUE(is_cut_off(held[0])) << "the oldest connection is closed";
}

}  // namespace
}  // namespace gradwire::testing
