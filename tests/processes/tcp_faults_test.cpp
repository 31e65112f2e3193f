// The fault matrix: faults x schedules, on four processes over TCP. docs/results/elastic.md has the
// outcomes.
//
// No rank hangs, accepts a wrong sum or leaves a process behind, and each survivor's error names the rank,
// the operation, the call, and the awaited event.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <random>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/processes/faults.h"
#include "tests/processes/processes.h"
#include "tests/support/expect.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

constexpr int kWorld = 4;
constexpr int kFaultyCall = 6;  // the call with the fault, numbered from 1
constexpr int64_t kFloats = 50'000;

int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void die_soon(const std::string& how) {
  std::this_thread::sleep_for(std::chrono::microseconds(std::random_device()() % 2000));
  raise(how == "stopped" ? SIGSTOP : SIGKILL);
}

// Sums small integers repeatedly; every correct result is exact. Prints the times of the fault and of the
// error on this machine's clock.
RANK_PROGRAM(Faulty) {
  const std::string fault = me.option("fault");
  const bool culprit = me.rank == me.number("who");
  TcpOptions joining;
  joining.group = {me.rendezvous, me.rank, me.world, me.timeout, 60s};
  if (fault == "corrupted_payload") setenv("GRADWIRE_VERIFY_PAYLOAD", "1", 1);
  auto comm = std::make_unique<Communicator>(make_tcp_transport(joining));
  Stream stream = Stream::create(Device::host(), "test");
  if (culprit && fault == "killed_at_any_time") {
    std::thread([after = std::chrono::microseconds(me.number("after_us"))] {
      std::this_thread::sleep_for(after);
      raise(SIGKILL);
    }).detach();
  }
  try {
    for (int call = 1; call <= me.number("calls"); ++call) {
      const bool now = culprit && call == kFaultyCall;
      int64_t count = kFloats;
      Schedule schedule = schedule_named(me.option("schedule"), kWorld);
      Program::Options options{.what = "the gradients"};
      if (now) {
        std::printf("fault at %lld\n", static_cast<long long>(now_ms()));
        if (fault == "exits") _exit(0);
        if (fault == "returns") return;
        if (fault == "wrong_count") count -= 1000;
        if (fault == "wrong_spec") options.wire = kBf16;
        if (fault == "wrong_schedule")
          schedule = schedule_named(schedule.kind == ScheduleKind::ring ? "tree" : "ring", kWorld);
        if (fault == "short_delay") delay_what_is_sent(30ms);
        if (fault == "long_delay") delay_what_is_sent(me.timeout + 1500ms);
        if (fault == "corrupted_header") corrupt_next_header();
        if (fault == "corrupted_frame") corrupt_next_frame();
        if (fault == "corrupted_payload") corrupt_next_payload();
        if (fault == "reset") reset_next_connection();
      }
      std::vector<float> data(count);
      for (int64_t i = 0; i < count; ++i) data[i] = static_cast<float>((i * 7 + call) % 1000 * (me.rank + 1));
      Program program(comm->transport(), schedule, {data.data(), data.data(), nullptr, count}, options);
      Buffer workspace(Device::host(), program.workspace_bytes());
      program.bind(workspace.data());
      program.run(stream);
      if (now && (fault == "killed" || fault == "stopped")) die_soon(fault);
      stream.synchronize();
      for (int64_t i = 0; i < count; ++i) {
        const auto sum = static_cast<float>((i * 7 + call) % 1000 * (me.world * (me.world + 1) / 2));
        if (data[i] != sum) throw std::runtime_error(fmt::format("WRONG DATA in call {}", call));
      }
    }
    comm->barrier();
  } catch (const CommError&) {
    std::printf("error at %lld\n", static_cast<long long>(now_ms()));
    throw;
  }
}

int64_t time_in(const std::string& output, const char* what) {
  size_t at = output.find(what);
  return at == std::string::npos ? -1 : std::atoll(output.c_str() + at + std::strlen(what));
}

bool holds_one_of(const std::string& text, std::initializer_list<const char*> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const char* part) { return text.find(part) != std::string::npos; });
}

// Returns whether any process of this test is left.
bool has_children() {
  return waitpid(-1, nullptr, WNOHANG) != -1;
}

struct Fault {
  const char* name;
  // Exit codes of the survivors and of the faulty rank: 0 done, 3 an error, -1 a signal, -2 the rank does not
  // end by itself.
  int others, culprit;
  const char* says;  // text in every error; # is replaced by the faulty rank
  bool waits_for_deadline = false;
};

void PrintTo(const Fault& f, std::ostream* out) {
  *out << f.name;
}

const Fault kFaults[] = {
    {"killed", 3, -1, "rank #"},
    {"stopped", 3, -2, "no answer from rank #", true},
    {"exits", 3, 0, "rank #"},
    {"returns", 3, 0, "left before: rank #"},
    {"wrong_count", 3, 3, "allreduce of the gradients (49000 floats, fp32"},
    {"wrong_spec", 3, 3, "allreduce of the gradients (50000 floats, bf16"},
    {"wrong_schedule", 3, 3, "ranks disagree: "},
    {"short_delay", 0, 0, ""},
    {"long_delay", 3, 3, "rank #", true},
    {"corrupted_header", 3, 3, "the message from rank # is not a Gradwire header: it is corrupted"},
    {"corrupted_frame", 3, 3, "rank #", true},
    {"corrupted_payload", 3, 3, "bytes from rank # do not have the checksum that it sent with them"},
    {"reset", 3, 3, "rank #"},
};

class FaultMatrix : public ::testing::TestWithParam<std::tuple<Fault, std::string>> {};

TEST_P(FaultMatrix, IsBounded) {
  const auto& [fault, schedule] = GetParam();
  const int who = 2;
  // The deadline is much longer than the test for faults that must be noticed before the deadline.
  const milliseconds deadline = fault.waits_for_deadline ? 1500ms : 30'000ms;
  ProcessOptions options{
      .timeout = deadline,
      .limit = 100s,
      .options = {
          {"fault", fault.name}, {"schedule", schedule}, {"who", fmt::to_string(who)}, {"calls", "9"}}};
  if (fault.culprit == -2) options.never_ending = {who};
  auto ranks = run_processes("Faulty", kWorld, options);
  EXPECT_FALSE(has_children());

  std::string says = fault.says;
  if (size_t at = says.find('#'); at != std::string::npos) says.replace(at, 1, fmt::to_string(who));
  const int64_t began = time_in(ranks[who].output, "fault at ");
  ASSERT_GE(began, 0) << ranks[who].output;
  int64_t slowest = 0;
  for (int r = 0; r < kWorld; ++r) {
    SCOPED_TRACE(fmt::format("rank {}: {}", r, ranks[r].output));
    EXPECT_EQ(ranks[r].output.find("WRONG DATA"), std::string::npos);
    const int expected = r == who ? fault.culprit : fault.others;
    if (expected == -2) continue;
    EXPECT_TRUE(ranks[r].ended_by_itself);
    EXPECT_EQ(ranks[r].exit_code, expected) << "signal " << ranks[r].signal;
    if (expected != 3) continue;
    const std::string& text = ranks[r].output;
    expect_has(text, {says, fmt::format("rank {}", who)});
    // Ranks may be a call apart, and a stopped rank may have completed its part of the faulty call.
    EXPECT_TRUE(
        holds_one_of(text, {"call 5, allreduce of the gradients (", "call 6, allreduce of the gradients (",
                            "call 7, allreduce of the gradients ("}));
    EXPECT_TRUE(holds_one_of(text, {"waiting", "starting", "ranks disagree", "corrupted"}));
    slowest = std::max(slowest, time_in(text, "error at ") - began);
  }
  EXPECT_LE(slowest, (fault.waits_for_deadline ? deadline.count() : 0) + 5000);
  const int errors =
      static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [](auto& o) { return o.exit_code == 3; }));
  fmt::print("{:<16}  {:<12}  {}\n", fault.name, schedule,
             errors == 0 ? "right sums on every rank"
                         : fmt::format("{} errors, the last after {} ms; deadline {} ms", errors, slowest,
                                       deadline.count()));
}

INSTANTIATE_TEST_SUITE_P(Tcp, FaultMatrix,
                         ::testing::Combine(::testing::ValuesIn(kFaults),
                                            ::testing::ValuesIn(schedule_names())),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param);
                         });

// Kills any rank at any time, under any schedule. GRADWIRE_FULL_SWEEPS: more runs.
TEST(TcpFaults, KillingARankAtAnyTimeCausesNeitherHangsNorWrongSums) {
  const int runs = random_runs(10);
  std::atomic<int> next = 0, hangs = 0, wrong = 0, unnamed = 0;
  std::mutex mutex;
  std::vector<std::thread> workers;
  for (int w = 0; w < 3; ++w) {
    workers.emplace_back([&] {
      for (int run; (run = next++) < runs;) {
        std::mt19937 random(static_cast<uint32_t>(run));
        const auto schedules = schedule_names();
        const std::string who = fmt::to_string(random() % kWorld),
                          schedule = schedules[random() % schedules.size()];
        auto ranks = run_processes("Faulty", kWorld,
                                   {.timeout = 30'000ms,
                                    .limit = 60s,
                                    .options = {{"fault", "killed_at_any_time"},
                                                {"calls", "1000000000"},
                                                {"who", who},
                                                {"schedule", schedule},
                                                {"after_us", fmt::to_string(random() % 100'000)}}});
        std::string trace;
        for (int r = 0; r < kWorld; ++r) {
          const Outcome& o = ranks[r];
          const bool is_killed = fmt::to_string(r) == who;
          hangs += o.ended_by_itself ? 0 : 1;
          wrong += o.output.find("WRONG DATA") != std::string::npos ? 1 : 0;
          bool right_end = is_killed ? o.signal == SIGKILL : o.exit_code == 3;
          bool named = is_killed || o.output.find("rank " + who) != std::string::npos;
          if (!right_end || !named) {
            ++unnamed;
            trace +=
                fmt::format("rank {}, exit code {}, signal {}: {}\n", r, o.exit_code, o.signal, o.output);
          }
        }
        if (!trace.empty()) {
          std::lock_guard lock(mutex);
          fmt::print("run {}, {}, rank {} killed:\n{}", run, schedule, who, trace);
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  std::printf("%d runs with a killed rank: %d hangs, %d wrong results, %d survivors without a proper error\n",
              runs, hangs.load(), wrong.load(), unnamed.load());
  EXPECT_EQ(hangs, 0);
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(unnamed, 0);
  EXPECT_FALSE(has_children());
}

}  // namespace
}  // namespace gradwire::testing
