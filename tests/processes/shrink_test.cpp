// Survivors of a failed group continue: processes are killed or stopped at critical points and at random
// points. At most one group continues, its ranks agree on its members, and its sums are correct.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "collectives/communicator/communicator.h"
#include "collectives/net/handshake.h"
#include "collectives/net/quorum.h"
#include "collectives/program/program.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/processes/processes.h"
#include "tests/support/expect.h"
#include "tests/support/sockets.h"
#include "tests/support/thinned.h"

// Kills the process at its n-th call of connect() or send() from now on.
static std::atomic<int> calls_to_live = -1;
static void count_call() {
  if (calls_to_live > 0 && --calls_to_live == 0) raise(SIGKILL);
}
extern "C" int connect(int socket, const sockaddr* address, socklen_t length) {
  count_call();
  return static_cast<int>(syscall(SYS_connect, socket, address, length));
}
extern "C" ssize_t send(int socket, const void* data, size_t bytes, int flags) {
  count_call();
  return syscall(SYS_sendto, socket, data, bytes, flags, nullptr, 0);
}

namespace gradwire::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using namespace std::chrono_literals;

constexpr int64_t kFloats = 20'000;

// Returns the set of ranks that take part in an allreduce, as bits: every rank adds 2^(its first rank).
// Throws CommError if the group fails.
uint32_t who_takes_part(Communicator& comm, int first_rank) {
  std::vector<float> data(kFloats, static_cast<float>(1 << first_rank));
  Program program(comm.transport(), ring(comm.world()), {data.data(), data.data(), nullptr, kFloats},
                  {.what = "the gradients"});
  Buffer workspace(Device::host(), program.workspace_bytes());
  program.bind(workspace.data());
  Stream stream = Stream::create(Device::host(), "test");
  program.run(stream);
  stream.synchronize();
  if (std::count(data.begin(), data.end(), data[0]) != kFloats) throw std::runtime_error("WRONG DATA");
  return static_cast<uint32_t>(data[0]);
}

// The fate of a rank, and its time: "2 in_call kill" in the calls of its group, "2 regrouping kill" while the
// ranks regroup after the previous fate, "2 regrouping step7" at rank 2's seventh call of connect() or send()
// during the regrouping.
struct Fate {
  int rank = -1;
  std::string when, what;
};

std::vector<Fate> fates_of(const std::string& text) {
  std::vector<Fate> all;
  std::istringstream words(text);
  for (Fate f; words >> f.rank >> f.when >> f.what;) all.push_back(f);
  return all;
}

// Kills the process. A fork of it lives on until the test has ended, at most for a minute.
void leave_fork() {
  const pid_t test = getppid();
  if (fork() != 0) raise(SIGKILL);
  for (int i = 0; i < 600 && kill(test, 0) == 0; ++i) std::this_thread::sleep_for(100ms);
  _exit(0);
}

void meet(const Fate& fate) {
  if (fate.what == "fork") leave_fork();
  if (fate.what == "kill") raise(SIGKILL);
  if (fate.what == "exit") _exit(0);
  if (fate.what == "stop") raise(SIGSTOP);
  if (fate.what == "pause") pause_for(6s);
}

void meet_within(const Fate& fate, microseconds most) {
  std::this_thread::sleep_for(microseconds(std::random_device()() % most.count()));
  meet(fate);
}

// The fates of one group: in its calls, and while it regroups afterwards.
struct GroupFates {
  std::vector<Fate> in_calls, regrouping;
};

// Returns the first fate whose rank is still in the group of `ranks`, and the fates that belong to it.
GroupFates fates_of_group(const std::vector<Fate>& fates, const std::vector<int>& ranks) {
  GroupFates group;
  auto f = std::find_if(fates.begin(), fates.end(), [&](const Fate& fate) {
    return std::find(ranks.begin(), ranks.end(), fate.rank) != ranks.end();
  });
  if (f != fates.end()) group.in_calls.push_back(*f++);
  for (; f != fates.end() && f->when == "together"; ++f) group.in_calls.push_back(*f);
  for (; f != fates.end() && f->when == "regrouping"; ++f) group.regrouping.push_back(*f);
  return group;
}

// Makes calls until one fails; without fates, three calls. Returns whether all calls succeeded.
bool make_calls(Communicator& comm, int rank, const std::vector<int>& ranks, const std::vector<Fate>& fates) {
  const auto mine =
      std::find_if(fates.begin(), fates.end(), [rank](const Fate& fate) { return fate.rank == rank; });
  const std::string when = mine == fates.end() ? "" : mine->when;
  uint32_t expected = 0;
  for (const int r : ranks) expected |= 1u << r;
  std::thread death;
  try {
    for (int call = 0; !fates.empty() || call < 3; ++call) {
      if (call == 1 && (when == "before_call" || when == "together")) meet(*mine);
      if (call == 1 && when == "in_call") death = std::thread(meet_within, *mine, 1500us);
      const uint32_t got = who_takes_part(comm, rank);
      if (death.joinable()) death.join();
      if (got != expected) throw std::runtime_error(fmt::format("WRONG DATA: {} of {}", got, expected));
    }
    comm.barrier();
    return true;
  } catch (const CommError&) {
    if (death.joinable()) death.join();
    return false;
  }
}

// Prints and returns the survivors among `ranks`. Replaces the communicator.
std::vector<int> regroup(std::unique_ptr<Communicator>& comm, const Me& me, const std::vector<int>& ranks) {
  std::vector<int> left;
  const auto start = SteadyClock::now();
  comm = comm->regroup(milliseconds(me.number("regroup_ms")), left);
  if (calls_to_live > 0) raise(SIGKILL);  // the rank made fewer calls of connect() and send()
  for (int& r : left) r = ranks[r];
  fmt::print("left: {}; rank {} after {} ms\n", fmt::join(left, " "), comm->rank(),
             (SteadyClock::now() - start) / 1ms);
  if (comm->world() != static_cast<int>(left.size()) || left[comm->rank()] != me.rank) {
    throw std::runtime_error("WRONG WORLD");
  }
  return left;
}

// Runs the fates one after another, each in the group that has formed after the previous fate. "before_call"
// and "in_call" apply to the group's second call. "together" applies to the same call as the previous fate.
// "regrouping" applies to the regrouping after the previous fate. Survivors make three more calls and print
// the members of their group.
RANK_PROGRAM(Survives) {
  const std::vector<Fate> fates = fates_of(me.option("fates"));
  TcpOptions joining;
  joining.group = {
      .rendezvous = me.rendezvous, .rank = me.rank, .world = me.world, .timeout = me.timeout, .joining = 60s};
  joining.shrinkable = true;
  auto comm = std::make_unique<Communicator>(make_tcp_transport(joining));
  std::vector<int> ranks(me.world);
  std::iota(ranks.begin(), ranks.end(), 0);
  bool doomed = false;  // this process will end during a regrouping
  while (true) {
    const GroupFates group = fates_of_group(fates, ranks);
    if (make_calls(*comm, me.rank, ranks, group.in_calls)) break;
    for (const Fate& fate : group.regrouping) {
      if (fate.rank != me.rank || std::exchange(doomed, true)) continue;
      if (fate.what.starts_with("step")) {
        calls_to_live = std::atoi(fate.what.c_str() + 4);
      } else {
        std::thread(meet_within, fate, 60ms).detach();
      }
    }
    ranks = regroup(comm, me, ranks);
  }
  fmt::print("end: {}\n", fmt::join(ranks, " "));
}

std::string end_of(const Outcome& rank) {
  const size_t at = rank.output.find("end: ");
  return at == std::string::npos ? "" : rank.output.substr(at + 5, rank.output.find('\n', at) - at - 5);
}

// Prints how long the slowest rank took to regroup.
void print_slowest(const std::string& fates, const std::vector<Outcome>& ranks) {
  int slowest_ms = 0;
  for (const Outcome& rank : ranks) {
    for (size_t at = 0; (at = rank.output.find(" after ", at)) != std::string::npos; ++at) {
      slowest_ms = std::max(slowest_ms, std::atoi(rank.output.c_str() + at + 7));
    }
  }
  fmt::print("{}: regrouped in at most {} ms\n", fates, slowest_ms);
}

// Runs the fates. Expects every rank except `lost` to end in the group of all ranks except `lost`.
void expect_survivors(int world, const std::string& fates, const std::set<int>& lost,
                      ProcessOptions options = {}) {
  SCOPED_TRACE(fates);
  options.options["fates"] = fates;
  options.options.try_emplace("regroup_ms", "20000");
  const auto ranks = run_processes("Survives", world, options);
  print_slowest(fates, ranks);
  std::vector<int> left;
  for (int r = 0; r < world; ++r) {
    if (!lost.contains(r)) left.push_back(r);
  }
  for (int r = 0; r < world; ++r) {
    SCOPED_TRACE(fmt::format("rank {}: {}", r, ranks[r].output));
    EXPECT_EQ(ranks[r].output.find("WRONG"), std::string::npos);
    if (lost.contains(r)) {
      EXPECT_EQ(end_of(ranks[r]), "");
    } else {
      EXPECT_EQ(ranks[r].exit_code, 0);
      EXPECT_EQ(end_of(ranks[r]), fmt::format("{}", fmt::join(left, " ")));
    }
  }
}

TEST(Shrink, FromFourToThreeToTwoToOneForAnyDeaths) {
  expect_survivors(4, "3 in_call kill 1 in_call kill", {1, 3});
  expect_survivors(4, "0 in_call kill 1 in_call kill", {0, 1});
  expect_survivors(4, "0 before_call exit 2 in_call kill 1 before_call kill", {0, 1, 2});
  expect_survivors(2, "0 in_call kill", {0});
}

// A fork that lives on, such as a DataLoader's worker, must not keep the connections of a dead rank open.
TEST(Shrink, DetectsDeathImmediatelyAlthoughAForkLivesOn) {
  for (const int world : {2, 3}) {
    const auto begin = std::chrono::steady_clock::now();
    expect_survivors(world, "0 in_call fork", {0}, {.timeout = 40s});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 30s) << "found the death at the deadline";
  }
}

TEST(Shrink, LeavesOutRanksThatDieWhileRegrouping) {
  for (const int second : {0, 1, 2}) {
    expect_survivors(4, fmt::format("3 in_call kill {} regrouping kill", second), {3, second});
  }
}

// Kills a rank at a given step of regrouping. The timeout of regroup() is shorter than the time that a group
// gives one of its ranks. GRADWIRE_FULL_SWEEPS: all steps.
TEST(Shrink, DetectsDeathsAtAnyStepOfRegroupingImmediately) {
  std::vector<int> steps = {1, 4, 8, 12, 16, 20, 24};
  if (full_sweeps()) {
    steps.resize(30);
    std::iota(steps.begin(), steps.end(), 1);
  }
  for (const int who : {0, 1}) {
    std::vector<std::thread> runs;  // threads that mostly wait
    for (const int step : steps) {
      runs.emplace_back([=] {
        expect_survivors(4, fmt::format("3 in_call kill {} regrouping step{}", who, step), {3, who},
                         {.options = {{"regroup_ms", "4000"}}});
      });
      if (runs.size() % 4 != 0 && step != steps.back()) continue;
      for (auto& run : runs) run.join();
      runs.clear();
    }
  }
}

TEST(Shrink, LeavesOutStoppedRanksAtTheDeadlineAndTellsThemOnReturn) {
  for (const int who : {0, 2}) {
    const auto ranks = run_processes(
        "Survives", 3,
        {.timeout = 700ms,
         .options = {{"fates", fmt::format("{} before_call pause", who)}, {"regroup_ms", "20000"}}});
    print_slowest(fmt::format("{} stopped", who), ranks);
    for (int r = 0; r < 3; ++r) {
      SCOPED_TRACE(fmt::format("rank {}: {}", r, ranks[r].output));
      if (r != who) {
        EXPECT_EQ(ranks[r].exit_code, 0);
        continue;
      }
      // If the other ranks have already exited, this rank cannot tell a normal exit from a failure.
      EXPECT_EQ(ranks[r].exit_code, 3);
      const std::string& text = ranks[r].output;
      EXPECT_TRUE(text.find("have continued without rank") != std::string::npos ||
                  text.find("may continue without it") != std::string::npos);
    }
  }
}

// Stops the lowest ranks, which the other ranks ask first. GRADWIRE_FULL_SWEEPS: more runs.
TEST(Shrink, MajorityContinuesWithAShortTimeoutWhenLowRanksAreStopped) {
  struct Case {
    int world;
    std::set<int> stopped;
    const char* timeout_ms;
  };
  const std::vector<Case> cases = {{3, {0}, "1000"},    {3, {0}, "1500"},    {3, {0}, "2000"},
                                   {5, {0, 1}, "2000"}, {5, {0, 1}, "3000"}, {5, {0, 1}, "8000"}};
  const int runs = full_sweeps() ? 8 : 1;
  for (int run = 0; run < runs; ++run) {
    for (size_t first = 0; first < cases.size(); first += 3) {
      std::vector<std::thread> together;  // threads that mostly wait
      for (size_t i = first; i < first + 3; ++i) {
        together.emplace_back([&c = cases[i]] {
          std::string fates;
          for (const int r : c.stopped) {
            fates += fmt::format("{} {} stop ", r, fates.empty() ? "before_call" : "together");
          }
          expect_survivors(c.world, fates, c.stopped,
                           {.timeout = 1s,
                            .never_ending = {c.stopped.begin(), c.stopped.end()},
                            .options = {{"regroup_ms", c.timeout_ms}}});
        });
      }
      for (auto& thread : together) thread.join();
    }
  }
}

TEST(Shrink, MinorityStops) {
  // Two of four ranks are stopped, including the lowest rank. The two other ranks cannot know that they are
  // not the minority.
  const auto ranks =
      run_processes("Survives", 4,
                    {.timeout = 700ms,
                     .never_ending = {0, 1},
                     .options = {{"fates", "0 before_call stop 1 together stop"}, {"regroup_ms", "20000"}}});
  for (const size_t r : {size_t{2}, size_t{3}}) {
    EXPECT_EQ(ranks[r].exit_code, 3);
    expect_has(ranks[r].output, {"may be alive"});
  }
}

// Kills random ranks at random times. GRADWIRE_FULL_SWEEPS: more runs.
TEST(Shrink, KillingAnyRanksAtAnyTimeLeavesOneGroup) {
  const int runs = random_runs(12);
  for (int run = 0; run < runs; ++run) {
    std::mt19937 random(static_cast<uint32_t>(run));
    const int world = 3 + static_cast<int>(random() % 3);
    std::vector<int> order;
    for (int r = 0; r < world; ++r) order.push_back(r);
    std::shuffle(order.begin(), order.end(), random);
    const size_t deaths = 1 + random() % static_cast<size_t>(world - 1);
    std::string fates;
    std::set<int> lost;
    for (size_t i = 0; i < deaths; ++i) {
      const char* when[] = {"in_call", "before_call", "regrouping"};
      fates += fmt::format("{} {} {} ", order[i], i == 0 ? when[random() % 2] : when[random() % 3],
                           random() % 4 == 0 ? "exit" : "kill");
      lost.insert(order[i]);
    }
    expect_survivors(world, fates, lost);
  }
}

// ---- The quorum without a transport ---------------------------------------------------------------------

struct Group {
  explicit Group(int world, const std::string& key = "a secret") {
    std::vector<std::string> contacts;
    for (int r = 0; r < world; ++r) {
      ranks.push_back(std::make_unique<Quorum>("127.0.0.1", key));
      contacts.push_back(ranks.back()->contact());
    }
    for (int r = 0; r < world; ++r) ranks[r]->enter(r, contacts, [](const auto&) {});
  }
  // Runs the rank's part of regrouping. Returns the members, "0 2", or an error text.
  std::string regroup(int rank, milliseconds time) {
    try {
      Quorum& r = *ranks[rank];
      auto found = r.regroup(time);
      if (found.location.empty()) r.publish(found, "a location");
      return fmt::format("{}", fmt::join(found.ranks, " "));
    } catch (const CommError& error) {
      return error.what();
    }
  }
  std::vector<std::string> regroup(const std::vector<int>& who, milliseconds time) {
    std::vector<std::string> results(who.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < who.size(); ++i) {
      threads.emplace_back([&, i] { results[i] = regroup(who[i], time); });
    }
    for (auto& thread : threads) thread.join();
    return results;
  }
  std::vector<std::unique_ptr<Quorum>> ranks;
};

TEST(Quorum, LeavesOutMissingRanksAtTheDeadlineAndTellsThemOnReturn) {
  Group group(4);
  for (const std::string& result : group.regroup({0, 2, 3}, 600ms)) EXPECT_EQ(result, "0 2 3");
  expect_has(group.regroup(1, 600ms), {"have continued without rank 1"});
  // The ranks of a later group are numbered from 0, and the rank that was left out stays out.
  group.ranks[0].reset();
  for (const std::string& result : group.regroup({2, 3}, 600ms)) EXPECT_EQ(result, "1 2");
}

TEST(Quorum, MinorityStopsEvenIfItAnswersFirst) {
  Group group(5);
  for (const std::string& result : group.regroup({3, 4}, 400ms)) {
    EXPECT_TRUE(result.find("may be alive") != std::string::npos ||
                result.find("in time") != std::string::npos)
        << result;
  }
  for (const std::string& result : group.regroup({0, 1, 2}, 400ms)) EXPECT_EQ(result, "0 1 2");
}

TEST(Quorum, UnauthenticatedPeersAreNeitherCountedNorBlocking) {
  Group group(2);
  std::string contact = group.ranks[0]->contact(), host, name, why;
  int port = 0;
  std::istringstream(contact) >> host >> port >> name;
  const auto soon = [] { return SteadyClock::now() + 2s; };
  std::vector<Socket> silent;
  for (int i = 0; i < 200; ++i) {
    auto socket = try_connect({host, port}, soon(), why);
    ASSERT_TRUE(socket) << why;
    silent.push_back(std::move(*socket));
  }
  auto garbage = try_connect({host, port}, soon(), why);
  ASSERT_TRUE(garbage);
  send_all(*garbage, std::string(100'000, 'x'), soon());
  auto guess = try_connect({host, port}, soon(), why);
  ASSERT_TRUE(guess);
  EXPECT_NE(introduce(*guess, {"another secret", "quorum " + name}, soon()), "");
  const std::string me = Message().add("rank", 1).add("number", 0).add("name", "-").encode();
  send_frame(*guess, {Frame::Op::call, 0, "", me}, soon());
  for (const std::string& result : group.regroup({0, 1}, 2s)) EXPECT_EQ(result, "0 1");
}

}  // namespace
}  // namespace gradwire::testing
