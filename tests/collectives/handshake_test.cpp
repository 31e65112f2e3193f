// The handshake between ranks: both ends prove that they know the run's secret, and every other input is
// rejected.
#include "collectives/net/handshake.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"
#include "tests/support/temporary_folder.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;
using State = Handshake::State;
constexpr auto kAcceptor = Handshake::Side::acceptor;

std::string hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

TEST(Sha256, MatchesTheVectorsOfFips180) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Hmac, MatchesTheVectorsOfRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(
      hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

SteadyClock::time_point soon() {
  return SteadyClock::now() + 10s;
}

class HandshakeTest : public ::testing::Test {
 protected:
  HandshakeTest() { reconnect(); }
  static std::pair<Socket, Socket> connected() {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
      throw std::runtime_error("socketpair");
    return {Socket(fds[0]), Socket(fds[1])};
  }
  void reconnect() { std::tie(connector, acceptor) = connected(); }
  // Advances the challenge until its state is final or no data arrives for 2 s. Returns the state.
  State settle(Handshake& challenge) {
    State state = State::waiting;
    while (state == State::waiting && wait_readable(acceptor.fd(), SteadyClock::now() + 2s)) {
      state = challenge.advance(acceptor);
    }
    return state;
  }
  void say(const std::string& bytes) { ASSERT_TRUE(send_all(connector, bytes, soon())); }
  static std::string hear_from(const Socket& socket, size_t bytes) {
    std::string text(bytes, '\0');
    EXPECT_TRUE(receive_exactly(socket, text.data(), bytes, soon()));
    return text;
  }
  std::string hear(size_t bytes) { return hear_from(connector, bytes); }
  Socket connector, acceptor;
  const Credentials credentials{"the run's secret", "store"};
  Handshake challenge{credentials, kAcceptor};
};

TEST_F(HandshakeTest, AcceptsTheSameSecretAndLeavesLaterBytesUnread) {
  std::string why = "not called";
  std::thread other([&] {
    why = introduce(connector, credentials, soon());
    send_all(connector, "payload", soon());
  });
  EXPECT_EQ(settle(challenge), State::proved);
  char payload[7];
  EXPECT_TRUE(receive_exactly(acceptor, payload, sizeof payload, soon()));
  EXPECT_EQ(std::string(payload, sizeof payload), "payload");
  other.join();
  EXPECT_EQ(why, "");
}

TEST_F(HandshakeTest, BothEndsRejectAnotherSecretOrPurpose) {
  for (const Credentials& other :
       {Credentials{"another", "store"}, Credentials{"", "store"}, Credentials{credentials.key, "link 3"}}) {
    reconnect();
    Handshake fresh(credentials, kAcceptor);
    std::string why;
    std::thread thread([&] { why = introduce(connector, other, soon()); });
    EXPECT_EQ(settle(fresh), State::refused);
    EXPECT_EQ(fresh.why(), "wrong secret");
    thread.join();
    EXPECT_EQ(why, kOtherSecret);
  }
}

TEST_F(HandshakeTest, RejectsAReflectedProof) {
  say("gw-rank1" + std::string(32, 'c'));
  EXPECT_EQ(challenge.advance(acceptor), State::waiting);
  const std::string answer = hear(64);
  say(answer.substr(32));
  EXPECT_EQ(settle(challenge), State::refused);
  EXPECT_EQ(challenge.why(), "wrong secret");
}

// Forwards bytes between two sockets until either socket is closed.
void relay(const Socket& a, const Socket& b) {
  const auto until = SteadyClock::now() + 20s;
  pollfd both[] = {{a.fd(), POLLIN, 0}, {b.fd(), POLLIN, 0}};
  while (SteadyClock::now() < until && poll(both, 2, 100) >= 0) {
    for (int from : {0, 1}) {
      if (both[from].revents == 0) continue;
      char bytes[64];
      const ssize_t got = read(both[from].fd, bytes, sizeof bytes);
      if (got <= 0) return;
      if (!send_all(from == 0 ? b : a, std::string(bytes, static_cast<size_t>(got)), soon())) return;
    }
  }
}

// Tests the limitation that docs/running.md describes under "A relay".
TEST_F(HandshakeTest, RelaysReachTheSameListenerOnly) {
  for (const char* purpose : {"store", "data of rank 1"}) {
    const Credentials listener{"the run's secret", purpose};
    auto [rank, relay_near] = connected();
    std::tie(connector, acceptor) = connected();
    Handshake at_listener(listener, kAcceptor);
    std::string why = "not called";
    std::thread between([&, &near = relay_near] { relay(near, connector); });
    std::thread connecting([&, &rank = rank] {
      why = introduce(rank, {"the run's secret", "store"}, soon());
      if (why.empty())
        send_all(rank, "payload", soon());
      else
        rank.close();
    });
    const State state = settle(at_listener);
    if (purpose == std::string("store")) {
      EXPECT_EQ(state, State::proved);
      EXPECT_EQ(hear_from(acceptor, 7), "payload") << "a relay could have changed the payload";
    } else {
      EXPECT_NE(state, State::proved);
    }
    acceptor.close();
    connecting.join();
    EXPECT_EQ(why.empty(), purpose == std::string("store"));
    rank.close();
    between.join();
  }
}

TEST_F(HandshakeTest, RejectsReplayedProofs) {
  // The first handshake records the bytes between both ends.
  const auto [rank, tap] = connected();
  std::thread other([&, &rank = rank] { introduce(rank, credentials, soon()); });
  auto relay = [](const Socket& from, const Socket& to, size_t bytes) {
    std::string text(bytes, '\0');
    EXPECT_TRUE(receive_exactly(from, text.data(), bytes, soon()));
    EXPECT_TRUE(send_all(to, text, soon()));
    return text;
  };
  const std::string greeting = relay(tap, connector, 40);
  EXPECT_EQ(challenge.advance(acceptor), State::waiting);
  relay(connector, tap, 64);
  const std::string proof = relay(tap, connector, 32);
  EXPECT_EQ(settle(challenge), State::proved);
  other.join();
  // The second handshake replays the recorded bytes.
  reconnect();
  Handshake again(credentials, kAcceptor);
  say(greeting);
  EXPECT_EQ(again.advance(acceptor), State::waiting);
  say(proof);
  EXPECT_EQ(settle(again), State::refused);
}

TEST_F(HandshakeTest, RejectsGarbageAtItsFirstWrongByteAndWaitsForSlowBytes) {
  say("g");
  EXPECT_EQ(challenge.advance(acceptor), State::waiting);
  say("w-");
  EXPECT_EQ(challenge.advance(acceptor), State::waiting);
  say("x");
  EXPECT_EQ(challenge.advance(acceptor), State::refused);
  EXPECT_EQ(challenge.why(), "not a rank of this version");
}

TEST_F(HandshakeTest, RejectsTruncationAnywhere) {
  const std::string all = "gw-rank1" + std::string(32, 'c') + std::string(32, 'p');
  for (size_t length = 0; length < all.size(); ++length) {
    reconnect();
    Handshake fresh(credentials, kAcceptor);
    say(all.substr(0, length));
    connector.close();
    EXPECT_EQ(settle(fresh), State::refused) << length;
  }
}

TEST_F(HandshakeTest, RejectsRandomBytes) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    reconnect();
    Handshake fresh(credentials, kAcceptor);
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 2 == 0) bytes = "gw-rank1" + bytes;
    say(bytes);
    connector.close();
    EXPECT_EQ(settle(fresh), State::refused);
  }
}

TEST(Secret, IsTheSameFromAVariableAndAFile) {
  const TemporaryFolder folder;
  const std::string path = folder.path("secret");
  const auto set = [&](const char* variable, const std::string& text) {
    unsetenv("GRADWIRE_SECRET");
    unsetenv("GRADWIRE_SECRET_FILE");
    std::ofstream(path, std::ios::trunc) << text;
    chmod(path.c_str(), 0600);
    setenv(variable, variable == std::string("GRADWIRE_SECRET") ? text.c_str() : path.c_str(), 1);
  };
  for (const char* variable : {"GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE"}) {
    for (const char* text : {"a b", "a b\n", "a b \t\r\n\n",
                             "\xEF\xBB\xBF"
                             "a b\n"}) {
      set(variable, text);
      EXPECT_EQ(secret_from_environment(), "a b") << variable << ": " << text;
    }
    for (const auto& [text, why] :
         std::map<std::string, std::string>{{"\n", "empty or blank"},
                                            {" ", "empty or blank"},
                                            {"\xEF\xBB\xBF", "empty or blank"},
                                            {std::string(5000, 'a'), "longer than 4096 bytes"}}) {
      set(variable, text);
      expect_error<BadInput>([] { secret_from_environment(); }, {variable, why});
    }
  }
  set("GRADWIRE_SECRET_FILE", std::string("a\0b", 3));
  expect_error<BadInput>([] { secret_from_environment(); }, {path, "NUL byte"});
  set("GRADWIRE_SECRET_FILE", std::string(4096, 'a'));
  EXPECT_EQ(secret_from_environment().size(), 4096u);
  unsetenv("GRADWIRE_SECRET_FILE");
}

TEST(Secret, MustBeInAFileReadableOnlyByItsOwner) {
  const TemporaryFolder folder;
  const std::string path = folder.path("secret");
  std::ofstream(path) << "of the file\n";
  setenv("GRADWIRE_SECRET_FILE", path.c_str(), 1);
  chmod(path.c_str(), 0644);
  expect_error<BadInput>([] { secret_from_environment(); }, {path, "mode 644", "chmod 600"});
  chmod(path.c_str(), 0600);
  EXPECT_EQ(secret_from_environment(), "of the file");
  setenv("GRADWIRE_SECRET", "direct", 1);
  expect_error<BadInput>([] { secret_from_environment(); }, {"both set"});
  unsetenv("GRADWIRE_SECRET_FILE");
  EXPECT_EQ(secret_from_environment(), "direct");
  unsetenv("GRADWIRE_SECRET");
  EXPECT_EQ(secret_from_environment(), "");
  setenv("GRADWIRE_SECRET_FILE", folder.path("nowhere").c_str(), 1);
  expect_error<BadInput>([] { secret_from_environment(); }, {"nowhere", "No such file"});
  unsetenv("GRADWIRE_SECRET_FILE");
  EXPECT_NE(random_secret(), random_secret());
}

// A group may read a file that root owns (a Kubernetes secret with fsGroup), so root does not test mode 640.
TEST(Secret, RejectsAFileWithAnyPermissionOfOtherUsers) {
  const TemporaryFolder folder;
  const std::string path = folder.path("secret");
  std::ofstream(path) << "of the file\n";
  setenv("GRADWIRE_SECRET_FILE", path.c_str(), 1);
  for (const mode_t others : {001, 002, 004, 010, 020, 040, 044, 060}) {
    if (others == 040 && geteuid() == 0) continue;
    chmod(path.c_str(), 0600 | others);
    expect_error<BadInput>([] { secret_from_environment(); },
                           {path, fmt::format("mode {:03o}", 0600 | others), "chmod 600"});
  }
  unsetenv("GRADWIRE_SECRET_FILE");
}

TEST(RejectedConnections, LogsEachAddressAndLimitsTheLinesOfAFlood) {
  RejectedConnections listener;
  EXPECT_EQ(listener.note("10.0.0.7", "hung up"), "rejected a connection from 10.0.0.7: hung up");
  EXPECT_EQ(listener.note("10.0.0.8", "hung up"), "rejected a connection from 10.0.0.8: hung up");
  EXPECT_EQ(listener.note("10.0.0.7", "wrong secret"), "rejected a connection from 10.0.0.7: wrong secret");
  EXPECT_EQ(listener.note("10.0.0.7", "hung up"), "rejected a connection from 10.0.0.7: hung up (2 so far)");
  EXPECT_EQ(listener.note("", "hung up"), "rejected a connection from a peer that is gone: hung up");
  size_t lines = 0;
  for (int i = 0; i < 100'000; ++i) lines += !listener.note("10.0.0.7", "hung up").empty();
  EXPECT_EQ(lines, 15u);  // 4, 8, ... 65,536
  std::string last;
  for (int i = 0; i < 100'000; ++i) {
    const std::string line = listener.note(fmt::format("10.1.{}.{}", i / 256, i % 256), "hung up");
    if (line.empty()) continue;
    last = line;
    ++lines;
  }
  EXPECT_LT(lines, 15 + RejectedConnections::kMaxNamed + 20);
  expect_has(last, {"(65536 so far from more addresses than are named)"});
}

}  // namespace
}  // namespace gradwire::testing
