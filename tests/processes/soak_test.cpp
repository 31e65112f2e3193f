// Rotates through faults of every kind. The schedule, wire format, number of ranks, faulty rank (including
// rank 0), call and moment are random. In every case no rank hangs, no rank accepts a wrong sum, and a signal
// ends only the faulty rank. Every survivor has an error if the fault must be noticed. `make soak` runs
// longer.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/processes/faults.h"
#include "tests/processes/processes.h"
#include "tests/support/schedules.h"

namespace gradwire::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kCalls = 8;

void break_all_connections() {
  for (int fd = 3; fd < 256; ++fd) shutdown(fd, SHUT_RDWR);  // fails for descriptors that are not connections
}

// The arguments of an allreduce.
struct Call {
  int64_t elements = 0;
  std::string schedule;
  Program::Options options;
};

// Changes one argument of the call if the fault is a wrong argument.
void change_arguments(const std::string& fault, Call& call) {
  if (fault == "wrong_count") call.elements += 8;
  if (fault == "wrong_wire") call.options.wire = call.options.wire == kFp32 ? kBf16 : kFp32;
  if (fault == "wrong_scale") call.options.scale = 0.5f;
  if (fault == "wrong_name") call.options.what = "something else";
  if (fault == "wrong_schedule") call.schedule = call.schedule == "ring" ? "two_shot" : "ring";
}

// The functions below inject the faults of one moment each, `after` a random time.
void break_before_joining(const std::string& fault, microseconds after) {
  if (fault == "dies_before_joining") _exit(0);
  if (fault == "joins_late") std::this_thread::sleep_for(after);
  if (fault == "killed_while_joining") {
    std::thread([after] {
      std::this_thread::sleep_for(after / 10);
      raise(SIGKILL);
    }).detach();
  }
}

void break_before_call(const std::string& fault, microseconds after, milliseconds timeout,
                       Communicator& comm) {
  if (fault == "exits") _exit(0);
  if (fault == "delayed") delay_what_is_sent(10ms);
  if (fault == "delayed_too_long") delay_what_is_sent(timeout + 1500ms);
  if (fault == "corrupted_header") corrupt_next_header();
  if (fault == "corrupted_frame") corrupt_next_frame();
  if (fault == "corrupted_payload") corrupt_next_payload();
  if (fault == "reset") reset_next_connection();
  if (fault == "loses_its_connections") break_all_connections();
  if (fault == "aborts") comm.abort("the test says so");
  if (fault == "slow") std::this_thread::sleep_for(after);
}

void break_during_call(const std::string& fault, microseconds after) {
  if (fault != "killed" && fault != "stopped" && fault != "paused") return;
  std::this_thread::sleep_for(after / 100);
  if (fault == "killed") raise(SIGKILL);
  if (fault == "stopped") raise(SIGSTOP);
  if (fault == "paused") pause_for(50ms);
}

// Sums small integers that BF16 also represents, so that every correct result is exact.
RANK_PROGRAM(Soaked) {
  const std::string fault = me.option("fault");
  const bool culprit = me.rank == me.number("who");
  const auto after = microseconds(me.number("after_us"));
  TcpOptions joining;
  joining.group = {me.rendezvous, me.rank, me.world, me.timeout, me.timeout};
  if (fault == "corrupted_payload") setenv("GRADWIRE_VERIFY_PAYLOAD", "1", 1);
  if (culprit) break_before_joining(fault, after);
  auto comm = std::make_unique<Communicator>(make_tcp_transport(joining));
  Stream stream = Stream::create(Device::host(), "test");
  for (int call = 1; call <= kCalls; ++call) {
    Call c{me.number("count"),
           me.option("schedule"),
           {.what = "the gradients", .wire = find_wire_format(me.option("wire"))}};
    const bool now = culprit && call == me.number("call");
    if (now) {
      if (fault == "returns") return;
      change_arguments(fault, c);
      break_before_call(fault, after, me.timeout, *comm);
    }
    std::vector<float> data(c.elements);
    for (int64_t i = 0; i < c.elements; ++i)
      data[i] = static_cast<float>((i * 7 + call) % 16 * (me.rank + 1));
    Program program(comm->transport(), schedule_named(c.schedule, me.world),
                    {data.data(), data.data(), nullptr, c.elements}, c.options);
    Buffer workspace(Device::host(), program.workspace_bytes());
    program.bind(workspace.data());
    program.run(stream);
    if (now) break_during_call(fault, after);
    stream.synchronize();
    for (int64_t i = 0; i < c.elements; ++i) {
      const auto sum = static_cast<float>((i * 7 + call) % 16 * (me.world * (me.world + 1) / 2));
      if (data[i] != sum) throw std::runtime_error(fmt::format("WRONG DATA in call {}", call));
    }
  }
  comm->barrier();
}

enum class Ends { well, badly, either };
struct Kind {
  const char* name;
  Ends others;
  bool waits_for_deadline = false;
  bool stays = false;  // the faulty rank does not end by itself
};
constexpr Kind kKinds[] = {
    {"killed", Ends::badly},
    {"stopped", Ends::badly, true, true},
    {"paused", Ends::well},
    {"slow", Ends::well},
    {"exits", Ends::badly},
    {"returns", Ends::badly},
    {"aborts", Ends::badly},
    {"wrong_count", Ends::badly},
    {"wrong_wire", Ends::badly},
    {"wrong_scale", Ends::badly},
    {"wrong_name", Ends::badly},
    {"wrong_schedule", Ends::badly},
    {"delayed", Ends::well},
    {"delayed_too_long", Ends::badly, true},
    {"corrupted_header", Ends::badly},
    {"corrupted_frame", Ends::badly, true},
    {"corrupted_payload", Ends::badly},
    {"reset", Ends::badly},
    {"loses_its_connections", Ends::badly},
    {"dies_before_joining", Ends::badly, true},
    // The group may exist, or have finished, before the rank is killed.
    {"killed_while_joining", Ends::either, true},
    {"joins_late", Ends::well},
};

struct Count {
  int runs = 0, hangs = 0, wrong = 0, crashes = 0, unnoticed = 0;
};

// Injects one fault. Returns a description of the errors in the outcome, or "".
std::string one_fault(uint32_t seed, Count& count, std::string& name) {
  std::mt19937 random(seed);
  const Kind& kind = kKinds[seed % std::size(kKinds)];
  name = kind.name;
  const auto schedules = schedule_names();
  const std::string schedule = schedules[random() % schedules.size()];
  int world = 2 + static_cast<int>(random() % 4);
  if (schedule == "hierarchical") world = 4;
  const int who = static_cast<int>(random() % static_cast<uint32_t>(world));
  // The corruption of payload requires a sufficiently large message.
  const int floats = 20'000 + static_cast<int>(random() % 60'000);
  // The deadline is short if the fault is noticed only at the deadline, and otherwise far longer than the
  // case may take.
  const milliseconds deadline = kind.waits_for_deadline ? 1500ms : 60'000ms;
  ProcessOptions options{.timeout = deadline,
                         .limit = 120s,
                         .options = {{"fault", kind.name},
                                     {"schedule", schedule},
                                     {"wire", random() % 2 == 0 ? "fp32" : "bf16"},
                                     {"count", fmt::to_string(floats)},
                                     {"who", fmt::to_string(who)},
                                     {"call", fmt::to_string(1 + random() % kCalls)},
                                     {"after_us", fmt::to_string(random() % 200'000)}}};
  if (kind.stays) options.never_ending = {who};
  const auto ranks = run_processes("Soaked", world, options);
  ++count.runs;
  std::string trouble;
  for (int r = 0; r < world; ++r) {
    const Outcome& o = ranks[r];
    const bool hangs = !o.ended_by_itself && !(kind.stays && r == who);
    const bool wrong = o.output.find("WRONG DATA") != std::string::npos;
    const bool crashed = o.signal != 0 && r != who && !hangs;
    const bool unnoticed = r != who && !hangs && !crashed &&
                           ((kind.others == Ends::well && o.exit_code != 0) ||
                            (kind.others == Ends::badly && o.exit_code != 3) ||
                            (kind.others == Ends::either && o.exit_code != 0 && o.exit_code != 3));
    count.hangs += hangs;
    count.wrong += wrong;
    count.crashes += crashed;
    count.unnoticed += unnoticed;
    if (hangs || wrong || crashed || unnoticed) {
      trouble += fmt::format("seed {}, {} of rank {} of {}, {}: rank {} ended with code {}, signal {}: {}\n",
                             seed, kind.name, who, world, schedule, r, o.exit_code, o.signal, o.output);
    }
  }
  return trouble;
}

TEST(TcpFaults, AnyFaultAtAnyTimeIsBounded) {
  SoakSeeds seeds(std::size(kKinds));
  std::mutex mutex;
  Count all;
  std::map<std::string, int> kinds;
  std::vector<std::thread> workers;
  for (int w = 0; w < 4; ++w) {
    workers.emplace_back([&] {
      while (const auto seed = seeds.next()) {
        Count count;
        std::string name;
        const std::string trouble = one_fault(*seed, count, name);
        std::lock_guard lock(mutex);
        all.runs += count.runs, all.hangs += count.hangs, all.wrong += count.wrong;
        all.crashes += count.crashes, all.unnoticed += count.unnoticed;
        ++kinds[name];
        std::fputs(trouble.c_str(), stdout);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  std::printf(
      "%d random faults of %zu kinds, seeds from %u: %d hangs, %d wrong sums, %d crashes, %d not noticed\n",
      all.runs, kinds.size(), seeds.first, all.hangs, all.wrong, all.crashes, all.unnoticed);
  EXPECT_EQ(all.hangs, 0);
  EXPECT_EQ(all.wrong, 0);
  EXPECT_EQ(all.crashes, 0);
  EXPECT_EQ(all.unnoticed, 0);
}

}  // namespace
}  // namespace gradwire::testing
