// Ranks whose messages pass through emulated links: results, failures and deadlines.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/transport/tcp/tcp_links.h"
#include "runtime/util/error.h"
#include "tests/support/expect.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

const EmulatedLink kFast{.bits_per_s = 1e9, .delay = 200us}, kSlow{.bits_per_s = 1e5};
constexpr size_t kBytes = 1 << 20;  // takes 84 s over kSlow

void send_around(Communicator& comm, std::vector<char>& out, std::vector<char>& in) {
  const Stream stream = Stream::create(comm.device(), "test");
  const int next = (comm.rank() + 1) % comm.world(),
            previous = (comm.rank() + comm.world() - 1) % comm.world();
  const std::vector<Transfer> transfers = {{Transfer::Kind::send, next, out.data(), out.size()},
                                           {Transfer::Kind::receive, previous, in.data(), in.size()}};
  const ExchangeLabel label{1, "a ring"};
  comm.transport().exchange(stream, transfers, label);
  stream.synchronize();
}

TEST(EmulatedLinks, ThreadsReceiveTheBytesThatWereSent) {
  const std::vector<Device> devices(3, Device::host());
  run_local_ranks(create_local_ranks(devices, 60s, kFast), [](Communicator& comm) {
    std::vector<char> out(kBytes / 8, static_cast<char>(comm.rank())), in(out.size());
    for (int i = 0; i < 3; ++i) send_around(comm, out, in);
    EXPECT_EQ(in, std::vector<char>(out.size(), static_cast<char>((comm.rank() + 2) % 3)));
    EXPECT_EQ(comm.bytes_sent(), 3 * out.size());
  });
}

TEST(EmulatedLinks, TransferLongerThanTheDeadlineFailsAllThreads) {
  const std::vector<Device> devices(2, Device::host());
  expect_error<CommError>(
      [&] {
        run_local_ranks(create_local_ranks(devices, 200ms, kSlow), [](Communicator& comm) {
          std::vector<char> out(kBytes), in(kBytes);
          send_around(comm, out, in);
        });
      },
      {"no progress for 200 ms", "over links of 100kbit"});
}

TEST(EmulatedLinks, AbortEndsAWaitForASlowTransfer) {
  const std::vector<Device> devices(3, Device::host());
  expect_error<CommError>(
      [&] {
        run_local_ranks(create_local_ranks(devices, 600s, kSlow), [](Communicator& comm) {
          if (comm.rank() == 2) throw CommError("rank 2 is gone");
          std::vector<char> out(kBytes), in(kBytes);
          send_around(comm, out, in);
        });
      },
      {"rank 2 is gone"});
}

// A connection between two threads that act as processes.
class PacedConnection {
 public:
  explicit PacedConnection(const EmulatedLink& link)
      : links_{TcpLinks(0, 2, "127.0.0.1", "key", true, {}, link),
               TcpLinks(1, 2, "127.0.0.1", "key", true, {}, link)} {
    const std::vector<std::string> contacts = {links_[0].contact(), links_[1].contact()};
    std::thread other([&] { links_[1].connect(contacts, SteadyClock::now() + 60s); });
    links_[0].connect(contacts, SteadyClock::now() + 60s);
    other.join();
  }
  TcpLinks& of(int rank) { return links_[static_cast<size_t>(rank)]; }

 private:
  std::array<TcpLinks, 2> links_;
};

TcpLinks::Message message(bool sent, int peer, std::vector<char>& data) {
  TcpLinks::Message made;
  made.sent = sent;
  made.peer = peer;
  made.data = data.data();
  made.bytes = data.size();
  made.tag = 5;
  return made;
}

TEST(EmulatedLinks, ProcessesReceiveTheBytesThatWereSent) {
  PacedConnection connection(kFast);
  std::array<std::vector<char>, 2> out, in;
  auto run = [&](int rank) {
    const auto me = static_cast<size_t>(rank);
    out[me].resize(kBytes / 4);
    in[me].resize(kBytes / 4);
    for (size_t i = 0; i < out[me].size(); ++i) out[me][i] = static_cast<char>(i * 7 + me);
    TcpLinks::Message receive = message(false, 1 - rank, in[me]), send = message(true, 1 - rank, out[me]);
    connection.of(rank).post(receive);
    connection.of(rank).post(send);
    if (rank == 0) connection.of(rank).hand_over();
    EXPECT_TRUE(connection.of(rank).wait(receive, SteadyClock::now() + 60s));
    EXPECT_TRUE(connection.of(rank).wait(send, SteadyClock::now() + 60s));
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  EXPECT_EQ(in[0], out[1]);
  EXPECT_EQ(in[1], out[0]);
}

TEST(EmulatedLinks, SlowTransfersBetweenProcessesEndByTheDeadlineOrAnInterrupt) {
  PacedConnection connection(kSlow);
  std::vector<char> out(kBytes), in(kBytes);
  TcpLinks::Message receive = message(false, 0, in), send = message(true, 1, out);
  connection.of(1).post(receive);
  connection.of(0).post(send);
  EXPECT_FALSE(connection.of(0).wait(send, SteadyClock::now() + 50ms));
  EXPECT_FALSE(connection.of(1).wait(receive, SteadyClock::now() + 50ms));
  std::thread interrupts([&] { connection.of(1).interrupt(); });
  expect_error<CommError>([&] { connection.of(1).wait(receive, SteadyClock::now() + 600s); },
                          {"interrupted"});
  interrupts.join();
  for (int rank : {0, 1}) connection.of(rank).drop();
}

}  // namespace
}  // namespace gradwire::testing
