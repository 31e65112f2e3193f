// Tests the TCP transport with ranks as processes: data arrives, disagreements and deaths are noticed, and no
// rank hangs.
#include "collectives/transport/tcp/tcp.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <bit>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/util/error.h"
#include "tests/collectives/example_specs.h"
#include "tests/collectives/group.h"
#include "tests/processes/processes.h"
#include "tests/support/expect.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<Communicator> join(const Me& me) {
  TcpOptions options;
  options.group = {me.rendezvous, me.rank, me.world, me.timeout};
  return std::make_unique<Communicator>(make_tcp_transport(options));
}

void check(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

unsigned char pattern(int from, int to, int step, size_t i) {
  return static_cast<unsigned char>(from * 31 + to * 17 + step * 7 + i * 3 + (i >> 8));
}

// Sends a message of each size from every rank to every other rank.
RANK_PROGRAM(AllToAll) {
  auto comm = join(me);
  Stream stream = Stream::create(Device::host(), "test");
  const std::vector<size_t> sizes = {0, 1, 2, 127, 4096, 65'537, 1 << 20, 3, 3};
  uint64_t bytes = 0;
  for (int step = 0; step < static_cast<int>(sizes.size()); ++step) {
    // Sizes differ by peer. Each peer gets two messages of equal size, which must arrive in order.
    auto size = [&](int from, int to) { return sizes[(step + from + to) % sizes.size()]; };
    std::vector<std::vector<unsigned char>> in, out;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < me.world; ++peer) {
      for (int k = 0; k < 2 && peer != me.rank; ++k) {
        auto& outgoing = out.emplace_back(size(me.rank, peer));
        for (size_t i = 0; i < outgoing.size(); ++i) outgoing[i] = pattern(me.rank, peer, step + k, i);
        auto& incoming = in.emplace_back(size(peer, me.rank), 0xcd);
        transfers.push_back({Transfer::Kind::send, peer, outgoing.data(), outgoing.size()});
        transfers.push_back({Transfer::Kind::receive, peer, incoming.data(), incoming.size()});
        bytes += outgoing.size();
      }
    }
    ExchangeLabel label{7, fmt::format("step {}", step)};
    comm->transport().exchange(stream, transfers, label);
    stream.synchronize();
    size_t message = 0;
    for (int peer = 0; peer < me.world; ++peer) {
      for (int k = 0; k < 2 && peer != me.rank; ++k) {
        const auto& got = in[message++];
        for (size_t i = 0; i < got.size(); ++i) {
          check(got[i] == pattern(peer, me.rank, step + k, i), fmt::format("wrong byte {} from {}", i, peer));
        }
      }
    }
  }
  check(comm->bytes_sent() == bytes, fmt::format("bytes_sent is {}", comm->bytes_sent()));
  comm->barrier();
}

TEST(Tcp, AllToAllOfManySizes) {
  for (int world : {1, 2, 4}) all_succeeded(run_processes("AllToAll", world));
}

TEST(Tcp, RanksMeetThroughATcpRendezvous) {
  all_succeeded(run_processes("AllToAll", 3, {.rendezvous = free_tcp_rendezvous()}));
}

// Runs a ring without a pause between the exchanges, so that neighbours are several exchanges apart.
RANK_PROGRAM(Ring) {
  auto comm = join(me);
  Stream stream = Stream::create(Device::host(), "test");
  constexpr int kSteps = 200, kFloats = 5000;
  std::vector<std::vector<float>> buffers(kSteps + 1, std::vector<float>(kFloats, -1.0f));
  buffers[0].assign(kFloats, static_cast<float>(me.rank));
  int next = (me.rank + 1) % me.world, previous = (me.rank + me.world - 1) % me.world;
  std::vector<std::vector<Transfer>> transfers(kSteps);
  std::vector<ExchangeLabel> labels(kSteps);
  for (int i = 0; i < kSteps; ++i) {
    transfers[i] = {{Transfer::Kind::send, next, buffers[i].data(), kFloats * 4},
                    {Transfer::Kind::receive, previous, buffers[i + 1].data(), kFloats * 4}};
    labels[i] = {static_cast<uint64_t>(i), fmt::format("step {}", i)};
    comm->transport().exchange(stream, transfers[i], labels[i]);
  }
  stream.synchronize();
  for (int i = 0; i <= kSteps; ++i) {
    float origin = static_cast<float>(((me.rank - i) % me.world + me.world) % me.world);
    check(buffers[i] == std::vector<float>(kFloats, origin), fmt::format("wrong data in step {}", i));
  }
}

TEST(Tcp, RingsKeepOrderWithoutBarriers) {
  all_succeeded(run_processes("Ring", 4));
}

RANK_PROGRAM(TwoGroups) {
  for (int i = 0; i < 3; ++i) {
    auto comm = join(me);
    if (me.rank == i) std::this_thread::sleep_for(50ms);
    comm->barrier();
  }
}

TEST(Tcp, GroupsCanReuseAPort) {
  all_succeeded(run_processes("TwoGroups", 3, {.rendezvous = free_tcp_rendezvous()}));
}

// --- the same bits as with threads, for every spec ---
//
// tests/collectives/reducer_test.cpp proves with threads that no gradient is lost and that ranks end with the
// same bits. In these tests, each process has the same bits in results and residuals as the thread of the
// same rank, so both properties also hold for processes.

// Returns a line with a hash of this rank's averaged gradients, residuals and factors after two steps. Uses
// slices, so that exchanges overlap with kernels.
std::string two_steps(Communicator& comm, const std::string& spec) {
  const std::vector<GradientTensor> tensors = {{"bias", {37}}, {"matrix", {48, 31}}, {"square", {40, 40}}};
  Stream stream = Stream::create(comm.device(), "test");
  comm.set_ranks_per_node(comm.world() % 2 == 0 ? 2 : 1);
  Reducer reducer(comm, CompressionSpec::parse(spec), tensors,
                  {.bucket_bytes = 7000, .seed = 3, .slice_bytes = 500});
  uint64_t hash = 14695981039346656037ull;
  auto add = [&](const float* data, int64_t count) {
    for (float v : to_host(stream, data, count)) {
      hash = (hash ^ std::bit_cast<uint32_t>(v)) * 1099511628211ull;
    }
  };
  for (uint32_t step = 0; step < 2; ++step) {
    for (int i = 0; i < reducer.tensors(); ++i) {
      const int64_t count = tensors[i].count();
      const auto gradient = normal(count, 1000 * step + 100 * comm.rank() + i);
      to_device(stream, reducer.gradient(i), std::span<const float>(gradient));
      reducer.ready(i, stream);
    }
    reducer.wait(stream);
    add(reducer.gradients().as<const float>(), reducer.elements());
  }
  for (const TensorState& s : reducer.tensor_state()) {
    std::vector<float> values(s.count());
    s.read(stream, 0, std::as_writable_bytes(std::span(values)));
    stream.synchronize();
    add(values.data(), s.count());
  }
  return fmt::format("{} {}\n", spec, hash);
}

RANK_PROGRAM(ReduceEverything) {
  auto comm = join(me);
  for (const std::string& spec : thinned(example_specs_with_schedules(), 25))
    std::printf("%s", two_steps(*comm, spec).c_str());
}

TEST(Tcp, EverySpecAndScheduleMatchesThreadsBitForBit) {
  for (int world : {2, 3, 4}) {
    auto ranks = run_processes("ReduceEverything", world);
    if (!all_succeeded(ranks)) continue;
    std::vector<std::string> expected(world);
    run_ranks(world, Device::host(), [&](Communicator& comm) {
      for (const std::string& spec : thinned(example_specs_with_schedules(), 25))
        expected[comm.rank()] += two_steps(comm, spec);
    });
    for (int r = 0; r < world; ++r)
      EXPECT_EQ(ranks[r].output, expected[r]) << "rank " << r << " of " << world;
  }
}

// Measures the links and chooses a schedule. Every rank makes the same choice.
RANK_PROGRAM(ChoosesASchedule) {
  auto comm = join(me);
  Reducer reducer(*comm, CompressionSpec::parse("bf16"), {{"matrix", {512, 512}}}, {});
  std::printf("%s", reducer.describe().c_str());
}

TEST(Tcp, EveryRankMakesTheSameChoiceForTheSameReason) {
  auto ranks = run_processes("ChoosesASchedule", 3);
  ASSERT_TRUE(all_succeeded(ranks));
  expect_has(ranks[0].output, {"links measured: to a neighbour"});
  EXPECT_EQ(ranks[1].output, ranks[0].output);
  EXPECT_EQ(ranks[2].output, ranks[0].output);
}

// --- failures: every survivor has an error in time that names the faulty rank, and ends by itself ---

// Exchanges repeatedly between all ranks. In step 5 one rank fails in the way that its options name.
RANK_PROGRAM(Misbehaving) {
  auto comm = join(me);
  Stream stream = Stream::create(Device::host(), "test");
  std::string how = me.option("how");
  size_t bytes = 100'000;
  for (int step = 0; step < 1000; ++step) {
    bool now = me.rank == me.number("who") && step == 5;
    if (now && how == "killed") raise(SIGKILL);
    if (now && how == "stopped") raise(SIGSTOP);
    if (now && how == "returns") return;
    if (now && how == "exits") _exit(0);
    if (now && how == "aborts") {
      comm->abort("the disk is full");
      comm->barrier();
    }
    if (now && how == "late") std::this_thread::sleep_for(me.timeout + 1500ms);
    if (now && how == "waits at a barrier") comm->barrier();
    std::vector<char> out(bytes, 'a'), in(bytes * me.world);
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < me.world; ++peer) {
      if (peer == me.rank) continue;
      size_t size = now && how == "wrong size" ? bytes - 4 : bytes;
      transfers.push_back({Transfer::Kind::send, peer, out.data(), size});
      transfers.push_back(
          {Transfer::Kind::receive, peer, in.data() + static_cast<size_t>(peer) * bytes, bytes});
    }
    ExchangeLabel label{static_cast<uint64_t>(now && how == "wrong tag" ? 99 : step),
                        fmt::format("step {}", step)};
    comm->transport().exchange(stream, transfers, label);
    try {
      stream.synchronize();
    } catch (const CommError&) {
      // Later calls fail at once, with an error.
      auto start = std::chrono::steady_clock::now();
      Stream other = Stream::create(Device::host(), "other");
      comm->transport().exchange(other, transfers, label);
      try {
        other.synchronize();
        std::printf("an exchange of a failed group succeeded\n");
      } catch (const CommError&) {
      }
      if (std::chrono::steady_clock::now() - start > 4s)
        std::printf("a failed group took its time to say so\n");
      throw;
    }
    for (int peer = 0; peer < me.world; ++peer) {
      bool whole =
          std::all_of(in.begin() + static_cast<int64_t>(peer * bytes),
                      in.begin() + static_cast<int64_t>((peer + 1) * bytes), [](char c) { return c == 'a'; });
      check(peer == me.rank || whole, "wrong data");
    }
  }
}

struct Case {
  const char* how;
  const char* says;      // text in every survivor's error; # is the misbehaving rank
  int exit_code = 3;     // the misbehaving rank's exit code; -1: a signal
  bool endless = false;  // the misbehaving rank cannot end by itself
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.how;
}

class TcpFault : public ::testing::TestWithParam<std::tuple<Case, int>> {};

TEST_P(TcpFault, EverySurvivorNamesTheCulpritAndEndsInTime) {
  const auto& [c, who] = GetParam();
  const auto timeout = 3000ms;  // allows for joining on a busy machine
  std::string says = c.says;
  says.replace(says.find('#'), 1, fmt::to_string(who));
  ProcessOptions options{
      .timeout = timeout, .limit = 60s, .options = {{"how", c.how}, {"who", fmt::to_string(who)}}};
  if (c.endless) options.never_ending = {who};
  auto ranks = run_processes("Misbehaving", 4, options);
  for (int r = 0; r < 4; ++r) {
    SCOPED_TRACE(fmt::format("rank {}: {}", r, ranks[r].output));
    if (r == who && c.endless) continue;
    EXPECT_TRUE(ranks[r].ended_by_itself);
    if (r == who) {
      EXPECT_EQ(ranks[r].exit_code, c.exit_code);
      continue;
    }
    EXPECT_EQ(ranks[r].exit_code, 3) << "signal " << ranks[r].signal;
    // The limit allows for joining and for a busy machine.
    EXPECT_LT(ranks[r].took, timeout + 5s + 5s);
    expect_has(ranks[r].output, {says, "step "});
    EXPECT_EQ(ranks[r].output.find("failed group"), std::string::npos);
  }
}

std::string fault_name(const ::testing::TestParamInfo<std::tuple<Case, int>>& info) {
  std::string text = fmt::format("{}_rank_{}", std::get<0>(info.param).how, std::get<1>(info.param));
  std::replace(text.begin(), text.end(), ' ', '_');
  return text;
}

INSTANTIATE_TEST_SUITE_P(
    AnyRank, TcpFault,
    ::testing::Combine(::testing::Values(Case{"killed", "rank #", -1},
                                         Case{"stopped", "no answer from rank #", -1, true},
                                         Case{"exits", "rank #", 0},
                                         Case{"aborts", "rank # gave up: the disk is full"},
                                         Case{"wrong size", "rank #"}),
                       ::testing::Values(0, 2)),
    fault_name);
INSTANTIATE_TEST_SUITE_P(OneRank, TcpFault,
                         ::testing::Combine(::testing::Values(Case{"returns", "left before: rank #", 0},
                                                              Case{"late", "from rank #"},
                                                              Case{"waits at a barrier", "rank #"},
                                                              Case{"wrong tag", "rank #"}),
                                            ::testing::Values(2)),
                         fault_name);

// A deadline that passes without an answer is not an error of the connection.
TEST(Tcp, ReportsAMissedDeadlineNotALostConnection) {
  auto ranks =
      run_processes("Misbehaving", 2,
                    {.timeout = 2000ms, .never_ending = {1}, .options = {{"how", "stopped"}, {"who", "1"}}});
  EXPECT_EQ(ranks[0].exit_code, 3) << ranks[0].output;
  expect_has(ranks[0].output, {"step 5", "not done after 2000 ms", "no answer from rank 1"});
  EXPECT_EQ(ranks[0].output.find("connection lost"), std::string::npos) << ranks[0].output;
}

RANK_PROGRAM(JustJoins) {
  join(me);
}

TEST(Tcp, ARankThatIsMissingIsNamed) {
  auto ranks = run_processes("JustJoins", 3, {.timeout = 4000ms, .only = {0, 1}});
  for (int r : {0, 1}) {
    EXPECT_EQ(ranks[r].exit_code, 3) << ranks[r].output;
    expect_has(ranks[r].output, {"never came: rank 2"});
    EXPECT_LT(ranks[r].took, 4s + 5s + 5s);
  }
}

TEST(Tcp, ABusyPortIsReported) {
  Socket taken = listen_on({"127.0.0.1", 0});
  auto ranks =
      run_processes("JustJoins", 2,
                    {.rendezvous = fmt::format("tcp://127.0.0.1:{}", local_port(taken)), .timeout = 1000ms});
  expect_has(ranks[0].output, {"Address already in use"});
  EXPECT_EQ(ranks[1].exit_code, 3) << ranks[1].output;
}

}  // namespace
}  // namespace gradwire::testing
