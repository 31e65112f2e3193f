// The key-value store: keys, failure notification and roll call, with ranks as threads; and how ranks find
// the store.
#include "collectives/net/store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <fstream>

#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/membership.h"
#include "collectives/net/message.h"
#include "collectives/net/store_server.h"
#include "runtime/util/error.h"
#include "tests/processes/processes.h"

namespace gradwire {
namespace {

using namespace std::chrono_literals;
using Presence = RollCall::Presence;

SteadyClock::time_point in(std::chrono::milliseconds time) {
  return SteadyClock::now() + time;
}

template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class StoreTest : public ::testing::Test {
 protected:
  std::unique_ptr<StoreClient> join(int rank, int world = kWorld, const std::string& key = "key") {
    return std::make_unique<StoreClient>(Contact{{"127.0.0.1"}, server->port()}, key, rank, world, in(10s));
  }
  static constexpr int kWorld = 3;
  std::unique_ptr<StoreServer> server =
      std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), kWorld, "key");
};

TEST_F(StoreTest, KeysAndCountsAreShared) {
  auto a = join(0), b = join(1);
  a->set("key", std::string("va\0lue\n", 7));
  EXPECT_EQ(b->get("key", in(10s), "x"), std::string("va\0lue\n", 7));
  EXPECT_EQ(b->look("key"), std::string("va\0lue\n", 7));
  EXPECT_EQ(b->look("another"), "");
  EXPECT_EQ(a->add("n"), 1);
  EXPECT_EQ(b->add("n"), 2);
  std::string large(300'000, 'x');
  b->set("large", large);
  EXPECT_EQ(a->get("large", in(10s), "x"), large);
}

TEST_F(StoreTest, MessagesReachRankZeroInEachRanksOrder) {
  auto a = join(0), b = join(1);
  b->send_message("first");
  b->send_message(std::string("sec\0nd", 6));
  a->send_message("mine");
  EXPECT_EQ(server->take_message(0, in(10s)), "mine");
  EXPECT_EQ(server->take_message(1, in(10s)), "first");
  EXPECT_EQ(server->take_message(1, in(10s)), std::string("sec\0nd", 6));
  EXPECT_EQ(server->take_message(1, in(20ms)), std::nullopt);
  std::thread taker([&] {
    EXPECT_NE(error_of([&] { server->take_message(2, in(20s)); }).find("the disk is full"),
              std::string::npos);
  });
  b->report("the disk is full");  // ends the wait for a message that never arrives
  taker.join();
}

TEST_F(StoreTest, GetWaitsForTheKey) {
  auto a = join(0), b = join(1);
  std::thread later([&] {
    std::this_thread::sleep_for(50ms);
    a->set("late", "here");
  });
  EXPECT_EQ(b->get("late", in(20s), "x"), "here");
  later.join();
}

TEST_F(StoreTest, GetEndsAtItsDeadlineAndTheConnectionStaysUsable) {
  auto a = join(0), b = join(1);
  EXPECT_NE(error_of([&] {
              b->get("never", in(20ms), "waiting for Godot");
            }).find("waiting for Godot: nothing after"),
            std::string::npos);
  // The late answer to the abandoned request must not be used for this one.
  a->set("never", "too late");
  a->set("key", "value");
  EXPECT_EQ(b->get("key", in(20s), "x"), "value");
}

TEST_F(StoreTest, RejectsInvalidRanksAndUnauthenticatedPeers) {
  auto a = join(0), b = join(1);
  EXPECT_EQ(error_of([&] { join(2, 4); }), "rank 2 was started with a world of 4, rank 0 with 3");
  EXPECT_EQ(error_of([&] { join(7); }), "there is no rank 7 in a world of 3");
  EXPECT_TRUE(error_of([&] { join(2, 3, "another"); }).ends_with(": the process there has another secret"));
  // A client that speaks another protocol is disconnected without affecting the others.
  std::string why;
  auto http = try_connect({"127.0.0.1", server->port()}, in(5s), why);
  ASSERT_TRUE(http);
  ASSERT_TRUE(send_all(*http, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", in(5s)));
  char byte;
  EXPECT_FALSE(receive_exactly(*http, &byte, 1, in(20s)));
  b->set("still", "fine");
  EXPECT_EQ(a->get("still", in(10s), "x"), "fine");
}

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

TEST_F(StoreTest, EveryRankIsNotifiedOfTheFirstFailureAndAnswersTheRoll) {
  auto a = join(0), b = join(1), c = join(2);
  Told told;
  told.watch(*a, 0);
  told.watch(*b, 1);
  told.watch(*c, 2);
  EXPECT_EQ(b->report("first"), "first");
  EXPECT_EQ(c->report("second"), "first");
  for (int r = 0; r < 3; ++r) EXPECT_EQ(told.of(r), "first");
  RollCall roll = a->roll_call();
  ASSERT_EQ(roll.ranks.size(), 3u);
  EXPECT_EQ(roll.absent(), "");
  EXPECT_EQ(roll.ranks[2].state, "state of 2");
  // A failed group will never set the key, so the wait ends at once.
  EXPECT_NE(error_of([&] { a->get("never", in(100s), "x"); }).find("first"), std::string::npos);
}

TEST_F(StoreTest, RollNamesSilentGoneDepartedAndMissingRanks) {
  server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), 5, "key");
  auto a = join(0, 5), silent = join(1, 5), left = join(2, 5);
  Told told;
  told.watch(*a, 0);
  left.reset();  // closes properly
  {
    std::string why;
    Endpoint there{"127.0.0.1", server->port()};
    auto watch = try_connect(there, in(5s), why);
    ASSERT_EQ(introduce(*watch, {"key", kStorePurpose}, in(5s)), "");
    ASSERT_TRUE(send_frame(*watch, {Frame::Op::hello, 1, "watch", StoreHello{3, 5}.encode()}, in(5s)));
    char byte;
    ASSERT_TRUE(receive_exactly(*watch, &byte, 1, in(10s)));
  }  // disappears without a goodbye
  EXPECT_NE(told.of(0).find("rank 3 is gone"), std::string::npos) << told.of(0);
  RollCall roll = a->roll_call();
  EXPECT_EQ(roll.absent(), "no answer from rank 1; gone: rank 3; left before: rank 2; never came: rank 4");
  EXPECT_EQ(roll.ranks[0].state, "state of 0");
}

TEST_F(StoreTest, DuplicateRanksEndAFormingGroup) {
  auto a = join(0), b = join(1);
  Told told;
  told.watch(*a, 0);
  told.watch(*b, 1);
  const std::string text = "two processes were started as rank 1";
  EXPECT_EQ(error_of([&] { join(1); }).find(text), 0u);
  for (int r : {0, 1}) EXPECT_EQ(told.of(r).find(text), 0u) << told.of(r);
}

TEST_F(StoreTest, DuplicateRanksAreRejectedByAWorkingGroup) {
  auto a = join(0), b = join(1), c = join(2);
  std::this_thread::sleep_for(StoreServer::kForming + 100ms);
  EXPECT_EQ(error_of([&] { join(1); }), "two processes were started as rank 1");
  b->set("still", "fine");
  EXPECT_EQ(a->get("still", in(10s), "x"), "fine");
}

// The last two of three ranks are invited; each has a separate connection to the server for that.
TEST_F(StoreTest, InvitedProcessesEndTheGroupIfTheyDieBeforeJoining) {
  std::vector<Socket> here, there;
  for (int i = 0; i < 2; ++i) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    here.emplace_back(ends[0]);
    there.emplace_back(ends[1]);
  }
  server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), kWorld, "key", "", StoreLimits(kWorld),
                                         std::move(here));
  auto first = join(0);
  ASSERT_TRUE(send_all(there[0], "joined", in(5s)));
  there[0].close();
  first->set("key", "value");
  EXPECT_EQ(first->get("key", in(5s), "x"), "value") << "rank 1 has reported that it joined";
  there[1].close();
  const std::string gone = "the process that was to become rank 2 is gone";
  EXPECT_NE(error_of([&] { first->get("never set", in(600s), "x"); }).find(gone), std::string::npos);
  // A rank that joins later also learns of the failure and does not wait.
  auto second = join(1);
  EXPECT_NE(error_of([&] { second->get("never set", in(600s), "x"); }).find(gone), std::string::npos);
}

TEST_F(StoreTest, ServerShutdownIsNotAFailure) {
  auto a = join(0), b = join(1);
  Told told;
  told.watch(*b, 1);
  a.reset();
  server.reset();
  EXPECT_THROW(b->set("x", "y"), CommError);
  b.reset();  // joins the watcher
  EXPECT_EQ(told.causes.count(1), 0u);
}

// --- what ranks may store with rank 0 ---

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

class StoreLimitsTest : public StoreTest {
 protected:
  StoreLimitsTest() {
    server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), kWorld, "key", "", small_limits());
  }
  // Returns a connection that has proved the secret and sent nothing else.
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
  EXPECT_NE(told.of(0).find("more messages than it has room for"), std::string::npos) << told.of(0);
}

TEST_F(StoreLimitsTest, EndsTheGroupAndNamesARankThatStoresTooManyKeys) {
  auto a = join(0), b = join(1);
  const std::string text = error_of([&] {
    for (int i = 0; i < 1000; ++i) b->set(fmt::format("key {}", i), "value");
  });
  EXPECT_EQ(text.find("rank 1 leaves more with rank 0 than it has room for"), 0u) << text;
  EXPECT_NE(error_of([&] { a->add("n"); }).find("rank 1 leaves more"), std::string::npos);
}

TEST_F(StoreLimitsTest, CountersCountAsKeysAndDroppedOrReplacedKeysFreeRoom) {
  auto a = join(0), b = join(1);
  for (int i = 0; i < 1000; ++i) {
    b->set("the same", std::string(5000, 'x'));
    b->add(fmt::format("count {}", i));
    b->set(fmt::format("count {}", i), "open");
    b->drop(fmt::format("count {}", i));
  }
  EXPECT_EQ(b->add("count 7"), 1);  // starts again from zero
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
  EXPECT_NE(log.find("gradwire: rank 1 has seen [2J a peer\n"), std::string::npos) << log;
  EXPECT_NE(log.find("gradwire: rank 0 has seen nobody\n"), std::string::npos) << log;
  EXPECT_NE(log.find("gradwire: rank 1 says more than is printed from here on\n"), std::string::npos) << log;
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
  // The answers to these arrive first, so the next connection finds them registered.
  char byte;
  for (const Socket& socket : held) ASSERT_TRUE(receive_exactly(socket, &byte, 1, in(5s)));
  EXPECT_EQ(error_of([&] { join(1); }), "rank 1 has 4 connections to rank 0's store already");
  // A connection cannot become another rank later, to say goodbye for it.
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

// Rank 0 of a stopped program: its kernel still accepts data.
TEST(StoreClient, DoesNotQueryAnUnresponsiveStoreAgain) {
  const Credentials credentials{"key", kStorePurpose};
  Socket listener = listen_on({"127.0.0.1", 0});
  const Endpoint there{"127.0.0.1", local_port(listener)};
  std::vector<Socket> connections;
  std::vector<Frame::Op> asked;
  std::thread stopping([&] {
    while (connections.size() < 2) {
      wait_readable(listener.fd(), in(10s));
      auto socket = accept_from(listener);
      if (!socket) continue;
      Challenge challenge(credentials);
      while (challenge.advance(*socket) == Challenge::State::waiting) wait_readable(socket->fd(), in(10s));
      connections.push_back(std::move(*socket));
    }
    for (uint32_t id : {1, 0}) {
      const Socket& socket = connections[id == 1 ? 0 : 1];
      char hello[256];
      wait_readable(socket.fd(), in(10s));
      EXPECT_GT(recv(socket.fd(), hello, sizeof hello, 0), 0);
      send_frame(socket, {Frame::Op::ok, id, "", ""}, in(10s));
    }
  });
  auto client = std::make_unique<StoreClient>(Contact{{there.host}, there.port}, "key", 1, 3, in(10s));
  stopping.join();
  EXPECT_EQ(client->report("out of memory"), std::nullopt);
  EXPECT_EQ(client->roll_call().absent(), "no answer from rank 0");
  client = nullptr;  // without waiting for the store to hang up, which never happens
  std::string received;
  char bytes[4096];
  for (ssize_t n; (n = recv(connections[0].fd(), bytes, sizeof bytes, 0)) > 0;) received.append(bytes, n);
  while (auto message = Frame::decode(received)) asked.push_back(message->op);
  EXPECT_EQ(asked, std::vector{Frame::Op::fail});
}

TEST(RollCall, SurvivesARoundTrip) {
  RollCall roll;
  roll.ranks = {
      {Presence::here, "in a\nb"}, {Presence::gone, ""}, {Presence::silent, ""}, {Presence::silent, ""}};
  RollCall copy = RollCall::decode(roll.encode());
  ASSERT_EQ(copy.ranks.size(), 4u);
  EXPECT_EQ(copy.ranks[0].state, "in a b");
  EXPECT_EQ(copy.absent(), "no answer from ranks 2, 3; gone: rank 1");
}

TEST(Message, KeepsAnyBytesAndRepeatedKeys) {
  const std::string bytes("a\n\0b", 4);
  Message sent;
  sent.add("text", bytes).add("rank", 3).add("rank", 5).add("", "");
  const Message received = Message::decode(sent.encode());
  EXPECT_EQ(received.fields(), sent.fields());
  EXPECT_EQ(received.text("text"), bytes);
  EXPECT_EQ(received.number("rank", 0, 3), 3);
  EXPECT_EQ(received.numbers("rank", 0, 5), (std::vector{3, 5}));
  EXPECT_TRUE(received.texts("other").empty());
}

TEST(Message, RejectsMissingKeysInvalidNumbersAndTruncation) {
  const Message message = Message().add("rank", 3).add("text", "three");
  EXPECT_THROW(message.text("other"), CommError);
  EXPECT_THROW(message.number("text", 0), CommError);
  EXPECT_THROW(message.number("rank", 4), CommError);
  EXPECT_THROW(message.numbers("rank", 0, 2), CommError);
  const std::string bytes = message.encode();
  const size_t first = Message().add("rank", 3).encode().size();
  for (size_t size = 1; size < bytes.size(); ++size) {
    if (size == first) continue;
    EXPECT_THROW(Message::decode(bytes.substr(0, size)), CommError) << size;
  }
}

TEST(Frame, DecodesInPiecesAndRejectsGarbage) {
  std::string bytes = Frame{Frame::Op::set, 7, "key", "value"}.encode() + "rest";
  std::string partial;
  std::optional<Frame> message;
  for (size_t i = 0; !message; ++i) {
    ASSERT_LT(i, bytes.size());
    partial += bytes[i];
    message = Frame::decode(partial);
  }
  EXPECT_EQ(message->id, 7u);
  EXPECT_EQ(message->key, "key");
  EXPECT_EQ(message->value, "value");
  EXPECT_TRUE(partial.empty());
  for (std::string garbage : {std::string("GET / HTTP/1.1\r\n"), std::string(20, '\0'),
                              std::string("\x0d\0\0\0\x63", 5) + std::string(12, '\0')}) {
    EXPECT_THROW(Frame::decode(garbage), CommError);
  }
}

// --- how ranks find the store ---

void join_all(const std::string& rendezvous, int world) {
  std::atomic<int> joined{0};
  std::vector<std::thread> ranks;
  for (int r = world - 1; r >= 0; --r) {  // in descending order: the others have to wait for rank 0
    ranks.emplace_back([&, r] {
      if (r == 0) std::this_thread::sleep_for(30ms);
      Membership group({rendezvous, r, world, 20s});
      group.barrier();
      EXPECT_FALSE(group.address(in(20s)).empty());
      group.barrier();
      ++joined;
    });
  }
  for (auto& t : ranks) t.join();
  EXPECT_EQ(joined, world);
}

TEST(Membership, JoinsRepeatedlyThroughTcp) {
  std::string rendezvous = testing::free_tcp_rendezvous();
  for (int i = 0; i < 3; ++i) join_all(rendezvous, 4);
}

TEST(Membership, JoinsThroughAFileAndDeletesIt) {
  std::string path = testing::scratch_path("meet");
  // A file left by a crashed run must not mislead new ranks.
  std::ofstream(path) << "gradwire-rendezvous-1\n0123456789abcdef 1 127.0.0.1\n";
  for (int i = 0; i < 3; ++i) join_all("file://" + path, 3);
  EXPECT_FALSE(std::ifstream(path).good());
}

TEST(Membership, BadInputNamesTheRemedy) {
  auto error = [](const std::string& rendezvous, int rank, int world) {
    return error_of([&] { Membership group({rendezvous, rank, world, 1s}); });
  };
  EXPECT_EQ(error("http://x:1", 0, 1),
            "rendezvous 'http://x:1': unknown kind; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host", 0, 1),
            "rendezvous 'tcp://host': no host and port; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host:99999", 0, 1),
            "rendezvous 'tcp://host:99999': '99999' is not a port; give tcp://host:port or file:///path");
  EXPECT_EQ(error("tcp://host:80", 3, 2), "there is no rank 3 in a group of 2");
  EXPECT_NE(error("file:///no/such/folder/x", 0, 1).find("cannot be written"), std::string::npos);
}

TEST(Membership, ReportsAMissingRankZeroAtTheDeadline) {
  std::string text = error_of([] { Membership group({testing::free_tcp_rendezvous(), 1, 2, 200ms}); });
  EXPECT_NE(text.find("rank 1 did not reach rank 0 through tcp://127.0.0.1:"), std::string::npos) << text;
  EXPECT_NE(text.find("Connection refused"), std::string::npos) << text;
}

TEST(Membership, BarrierReportsAMissingRank) {
  std::string text = error_of([] {
    Membership group({"file://" + testing::scratch_path("alone"), 0, 2, 100ms});
    group.barrier();
  });
  EXPECT_NE(text.find("waiting for all ranks: nothing after"), std::string::npos) << text;
}

}  // namespace
}  // namespace gradwire
