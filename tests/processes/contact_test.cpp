// Tests how ranks connect to hosts with several addresses. Some addresses are unreachable or lead to another
// process.
#include "collectives/net/reach.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "collectives/net/listener.h"
#include "collectives/net/membership.h"
#include "collectives/transport/tcp/tcp_links.h"
#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

SteadyClock::time_point in(std::chrono::milliseconds time) {
  return SteadyClock::now() + time;
}

// Accepts connectors with the given `purpose` at one loopback address until destroyed. Counts connections.
class Acceptor {
 public:
  Acceptor(const std::string& address, int port, const std::string& purpose, bool answers = true)
      : socket_(listen_on({address, port})), credentials_{"key", purpose}, answers_(answers) {
    thread_ = std::thread([this] { serve(); });
  }
  ~Acceptor() {
    stop_ = true;
    thread_.join();
  }
  int port() const { return local_port(socket_); }
  std::atomic<int> connections{0}, proved{0};

 private:
  void serve() {
    std::vector<std::pair<Socket, std::unique_ptr<Handshake>>> callers;
    while (!stop_) {
      while (auto socket = accept_from(socket_)) {
        ++connections;
        callers.emplace_back(std::move(*socket),
                             std::make_unique<Handshake>(credentials_, Handshake::Side::acceptor));
      }
      for (auto& [socket, challenge] : callers) {
        if (!answers_ || !challenge) continue;
        const auto state = challenge->advance(socket);
        if (state == Handshake::State::proved) ++proved;
        if (state != Handshake::State::waiting) challenge = nullptr;
      }
      std::this_thread::sleep_for(1ms);
    }
  }

  Socket socket_;
  const Credentials credentials_;
  const bool answers_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

const Credentials kRight{"key", "right"};

TEST(Contact, IsOneLineThatSurvivesARoundTrip) {
  for (const Contact& contact : {Contact{{"10.0.0.1"}, 4000, "name"},
                                 Contact{{"10.0.0.1", "fd00::1", "127.0.0.1"}, 1, "x", "boot.4.5"}}) {
    const auto parsed = Contact::parse(contact.text());
    ASSERT_TRUE(parsed) << contact.text();
    EXPECT_EQ(parsed->addresses, contact.addresses);
    EXPECT_EQ(parsed->port, contact.port);
    EXPECT_EQ(parsed->name, contact.name);
    EXPECT_EQ(parsed->host, contact.host);
  }
  for (const char* text :
       {"", "10.0.0.1", "10.0.0.1 0 x", "10.0.0.1 70000 x", "@host 1 x", ", 1 x", "a b c"}) {
    EXPECT_FALSE(Contact::parse(text)) << text;
  }
}

TEST(Contact, LoopbackIsForRanksOfOneHost) {
  Contact here{{"10.99.0.1", "127.0.0.1"}, 1, "x", host_id()};
  ASSERT_NE(host_id(), "");
  EXPECT_EQ(addresses_to_try(here), (std::vector<std::string>{"127.0.0.1", "10.99.0.1"}));
  here.host = "another";
  EXPECT_EQ(addresses_to_try(here), (std::vector<std::string>{"10.99.0.1"}));
  here.addresses = {"127.0.0.1"};
  EXPECT_EQ(addresses_to_try(here), (std::vector<std::string>{"127.0.0.1"})) << "there is no other address";
}

TEST(Contact, OrdersThisHostsAddressesLast) {
  const std::string own = own_addresses().front();
  if (is_loopback(own)) GTEST_SKIP() << "this machine has only a loopback interface";
  const Contact elsewhere{{own, "10.99.0.1"}, 1, "x", "another"};
  EXPECT_EQ(addresses_to_try(elsewhere), (std::vector<std::string>{"10.99.0.1", own}));
}

TEST(Reach, FindsTheListenerDespiteWrongAndSilentAddresses) {
  Acceptor wrong("127.0.0.2", 0, "wrong");
  Acceptor silent("127.0.0.3", wrong.port(), "right", false);
  Acceptor right("127.0.0.4", wrong.port(), "right");
  // 127.0.0.1 refuses connections; 192.0.2.1 is unreachable.
  const Contact contact{{"192.0.2.1", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"}, wrong.port(), "x"};
  for (const bool retry : {false, true}) {
    const Reach reached = reach(contact, kRight, in(20s), retry);
    ASSERT_TRUE(reached.socket) << reached.why;
    EXPECT_EQ(reached.socket->peer_address(), "127.0.0.4");
  }
  EXPECT_GE(wrong.connections, 2) << "it was tried before";
}

TEST(Reach, MakesOneConnectionIfTheFirstAddressAnswers) {
  Acceptor first("127.0.0.1", 0, "right");
  Acceptor second("127.0.0.2", first.port(), "right");
  const Reach reached = reach({{"127.0.0.1", "127.0.0.2"}, first.port(), "x"}, kRight, in(20s));
  ASSERT_TRUE(reached.socket) << reached.why;
  EXPECT_EQ(first.connections, 1);
  EXPECT_EQ(second.connections, 0);
}

TEST(Reach, ErrorsNameEachAddressWithItsFailure) {
  Acceptor wrong("127.0.0.2", 0, "wrong");
  const Contact both{{"127.0.0.1", "127.0.0.2"}, wrong.port(), "x"};
  Reach reached = reach(both, kRight, in(20s));
  EXPECT_FALSE(reached.socket);
  EXPECT_TRUE(reached.gone) << "the process listens at neither address";
  EXPECT_FALSE(reached.other_secret);
  expect_has(reached.why, {"127.0.0.1:", ": Connection refused; 127.0.0.2:", kOtherSecret});
  reached = reach({{"127.0.0.2"}, wrong.port(), "x"}, kRight, in(20s), true);
  EXPECT_TRUE(reached.other_secret) << "the port belongs to another process";
  reached = reach({{"127.0.0.1"}, wrong.port(), "x"}, kRight, in(20s));
  EXPECT_TRUE(reached.gone) << reached.why;
  reached = reach({{"no.such.host.invalid"}, 1, "x"}, kRight, in(20s));
  EXPECT_FALSE(reached.gone);
  expect_has(reached.why, {"no.such.host.invalid"});
}

TEST(Reach, RetriesRefusedConnectionsUntilTheDeadline) {
  int port = 0;
  {
    const Socket free = listen_on({"127.0.0.1", 0});
    port = local_port(free);
  }
  std::unique_ptr<Acceptor> late;
  std::thread opens([&] {
    std::this_thread::sleep_for(300ms);
    late = std::make_unique<Acceptor>("127.0.0.1", port, "right");
  });
  const Reach reached = reach({{"127.0.0.1"}, port, "x"}, kRight, in(20s), true);
  opens.join();
  EXPECT_TRUE(reached.socket) << reached.why;
}

TEST(Reach, StopsWaitingForASilentListenerAtTheDeadline) {
  Acceptor silent("127.0.0.1", 0, "right", false);
  const Reach reached = reach({{"127.0.0.1"}, silent.port(), "x"}, kRight, in(300ms), true);
  EXPECT_FALSE(reached.socket);
  expect_has(reached.why, {"127.0.0.1:", "no answer"});
}

// Checks that a rank whose network is not up yet does not end the group.
TEST(Links, ReachesARankThatListensLater) {
  const std::string key = "key";
  TcpLinks zero(0, 2, "127.0.0.1", key), one(1, 2, "127.0.0.1", key);
  const std::vector<std::string> contacts = {zero.contact(), one.contact()};
  std::thread late([&] {
    std::this_thread::sleep_for(200ms);
    zero.connect(contacts, in(20s));
  });
  EXPECT_NO_THROW(one.connect(contacts, in(20s)));
  late.join();
}

TEST(Links, StopsConnectingWhenInterrupted) {
  TcpLinks links(1, 2, "127.0.0.1", "key");
  int port = 0;
  {
    const Socket free = listen_on({"127.0.0.1", 0});
    port = local_port(free);
  }
  const std::vector<std::string> contacts = {Contact{{"127.0.0.1"}, port, "gone"}.text(), links.contact()};
  std::thread interrupts([&] {
    std::this_thread::sleep_for(200ms);
    links.interrupt();
  });
  expect_error<CommError>([&] { links.connect(contacts, in(60s)); }, {"the group failed while"});
  interrupts.join();
}

TEST(Listening, AllAddressesMeansIPv4AndIPv6) {
  const Socket all = listen_on({"", 0});
  std::string why;
  for (const char* address : {"127.0.0.1", "::1"}) {
    const auto socket = try_connect({address, local_port(all)}, in(5s), why);
    if (!socket && std::string(address) == "::1") GTEST_SKIP() << "no IPv6 here: " << why;
    ASSERT_TRUE(socket) << address << ": " << why;
    const auto accepted = wait_readable(all.fd(), in(5s)) ? accept_from(all) : std::nullopt;
    ASSERT_TRUE(accepted);
    EXPECT_EQ(accepted->peer_address(), address);
  }
}

TEST(Listening, HangsUpOnSilentCallersWhenItEnds) {
  Listener listener(listen_on({"127.0.0.1", 0}), {"key", "test"});
  std::string why;
  const auto silent = try_connect({"127.0.0.1", local_port(listener.socket())}, in(5s), why);
  ASSERT_TRUE(silent) << why;
  ASSERT_TRUE(wait_readable(listener.socket().fd(), in(5s)));
  std::vector<pollfd> entries;
  listener.add_entries(entries);
  poll(entries.data(), entries.size(), 0);
  EXPECT_TRUE(listener.advance(entries, 2).empty());
  char byte;
  EXPECT_EQ(recv(silent->fd(), &byte, 1, MSG_DONTWAIT), -1) << "hung up before the end";
  listener.close();
  ASSERT_TRUE(wait_readable(silent->fd(), in(5s)));
  EXPECT_EQ(recv(silent->fd(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST(Listening, RejectsInvalidPortRanges) {
  EXPECT_EQ(parse_ports("P", "20000-20100").last, 20100);
  EXPECT_EQ(parse_ports("P", "20000").last, 20000);
  for (const char* text : {"", "x", "1-", "-1", "0", "0-0", "5-4", "1-65536", "1-2-3", "1 - 2"}) {
    expect_error<BadInput>([&] { parse_ports("P", text); }, {"P"});
  }
}

}  // namespace
}  // namespace gradwire::testing
