// Tests of the key-value store: keys, failure notification and roll call, with ranks as threads.
#include "collectives/net/store.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"
#include "runtime/util/error.h"
#include "tests/processes/store_fixture.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;
using Presence = RollCall::Presence;

class StoreTest : public StoreFixture {};

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
  std::thread taker(
      [&] { expect_has(error_of([&] { server->take_message(2, in(20s)); }), {"the disk is full"}); });
  b->report("the disk is full");  // ends the wait for rank 2's message, which never arrives
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
  expect_has(error_of([&] { b->get("never", in(20ms), "waiting for Godot"); }),
             {"waiting for Godot: nothing after"});
  // The late answer to the abandoned request must not be used for the next request.
  a->set("never", "too late");
  a->set("key", "value");
  EXPECT_EQ(b->get("key", in(20s), "x"), "value");
}

TEST_F(StoreTest, RejectsInvalidRanksAndUnauthenticatedPeers) {
  auto a = join(0), b = join(1);
  EXPECT_EQ(error_of([&] { join(2, 4); }), "rank 2 was started with a world of 4, rank 0 with 3");
  EXPECT_EQ(error_of([&] { join(7); }), "there is no rank 7 in a world of 3");
  EXPECT_TRUE(error_of([&] { join(2, 3, "another"); }).ends_with(": the process there has another secret"));
  // A client that speaks another protocol is disconnected without affecting the ranks.
  std::string why;
  auto http = try_connect({"127.0.0.1", server->port()}, in(5s), why);
  ASSERT_TRUE(http);
  ASSERT_TRUE(send_all(*http, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", in(5s)));
  char byte;
  EXPECT_FALSE(receive_exactly(*http, &byte, 1, in(20s)));
  b->set("still", "fine");
  EXPECT_EQ(a->get("still", in(10s), "x"), "fine");
}

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
  expect_has(error_of([&] { a->get("never", in(100s), "x"); }), {"first"});
}

TEST_F(StoreTest, RollNamesSilentGoneAndMissingRanks) {
  server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), 5, "key");
  auto a = join(0, 5), silent = join(1, 5), here = join(2, 5);
  Told told;
  told.watch(*a, 0);
  {
    std::string why;
    Endpoint there{"127.0.0.1", server->port()};
    auto watch = try_connect(there, in(5s), why);
    ASSERT_EQ(introduce(*watch, {"key", kStorePurpose}, in(5s)), "");
    ASSERT_TRUE(send_frame(*watch, {Frame::Op::hello, 1, "watch", StoreHello{3, 5}.encode()}, in(5s)));
    char byte;
    ASSERT_TRUE(receive_exactly(*watch, &byte, 1, in(10s)));
  }  // closes the connection without announcing a departure
  expect_has(told.of(0), {"rank 3 is gone"});
  here.reset();  // leaves because of the failure
  RollCall roll = a->roll_call();
  EXPECT_EQ(roll.absent(), "no answer from rank 1; gone: rank 3; never came: rank 4");
  EXPECT_EQ(roll.ranks[0].state, "state of 0");
}

TEST_F(StoreTest, RanksThatLeaveEndOnlyAFormingGroup) {
  const std::string left = "rank 1 left before all ranks had joined";
  auto a = join(0), b = join(1);
  Told told;
  told.watch(*a, 0);
  b.reset();
  EXPECT_EQ(told.of(0), left);
  expect_has(error_of([&] { a->get("never set", in(20s), "x"); }), {left});

  server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), 2, "key");
  auto first = join(0, 2), second = join(1, 2);
  second.reset();
  first->set("key", "value");
  EXPECT_EQ(first->get("key", in(5s), "x"), "value");
  EXPECT_EQ(first->report("over"), "over");
  EXPECT_EQ(first->roll_call().absent(), "no answer from rank 0; left before: rank 1");
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

// Invites the last two of three ranks. Each invited rank has a separate connection to the server for the
// invitation.
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
  expect_has(error_of([&] { first->get("never set", in(600s), "x"); }), {gone});
  // A rank that joins later also receives the failure and does not wait.
  auto second = join(1);
  expect_has(error_of([&] { second->get("never set", in(600s), "x"); }), {gone});
}

TEST_F(StoreTest, ServerShutdownIsNotAFailure) {
  server = std::make_unique<StoreServer>(listen_on({"127.0.0.1", 0}), 2, "key");
  auto a = join(0, 2), b = join(1, 2);
  Told told;
  told.watch(*b, 1);
  a.reset();
  server.reset();
  EXPECT_THROW(b->set("x", "y"), CommError);
  b.reset();  // joins the watching thread
  EXPECT_EQ(told.causes.count(1), 0u);
}

// Simulates rank 0 of a stopped program, whose kernel still accepts data.
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
      Handshake challenge(credentials, Handshake::Side::acceptor);
      while (challenge.advance(*socket) == Handshake::State::waiting) wait_readable(socket->fd(), in(10s));
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
  client = nullptr;  // must not wait for the store to hang up, which never happens
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

}  // namespace
}  // namespace gradwire::testing
