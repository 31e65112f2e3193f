// Rotates through faults of every kind. The schedule, wire format, number of ranks, faulty rank (including
// rank 0), call and moment are random. In every case no rank hangs, no rank accepts a wrong sum, and a signal
// ends only the faulty rank. Every survivor has an error if the fault must be noticed. GRADWIRE_SOAK_S sets
// the duration; see make soak.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/processes/faults.h"
#include "tests/processes/processes.h"

namespace gradwire {
namespace {

using testing::Me;
using testing::number_from_environment;
using testing::Outcome;
using namespace std::chrono_literals;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kCalls = 8;

Schedule schedule_of(const std::string& text, int world) {
  if (text == "hierarchical") return hierarchical(world / 2, 2);
  if (text == "two_shot") return two_shot(world);
  return text == "tree" ? double_tree(world) : ring(world);
}

void break_all_connections() {
  for (int fd = 3; fd < 256; ++fd) shutdown(fd, SHUT_RDWR);  // fails for descriptors that are not connections
}

// Sums small integers that BF16 also represents, so that every correct result is exact.
RANK_PROGRAM(Soaked) {
  const std::string fault = me.option("fault");
  const bool culprit = me.rank == me.number("who");
  const int faulty_call = me.number("call");
  const auto after = microseconds(me.number("after_us"));
  if (culprit && fault == "dies_before_joining") _exit(0);
  if (culprit && fault == "joins_late") std::this_thread::sleep_for(after);
  TcpOptions joining;
  joining.group = {me.rendezvous, me.rank, me.world, me.timeout, me.timeout};
  joining.verify_payload = fault == "corrupted_payload";
  if (culprit && fault == "killed_while_joining") {
    std::thread([after] {
      std::this_thread::sleep_for(after / 10);
      raise(SIGKILL);
    }).detach();
  }
  auto comm = Communicator::create_tcp(joining);
  Stream stream = Stream::create(Device::host(), "test");
  const auto count = static_cast<int64_t>(me.number("count"));
  for (int call = 1; call <= kCalls; ++call) {
    const bool now = culprit && call == faulty_call;
    int64_t elements = count;
    Schedule schedule = schedule_of(me.option("schedule"), me.world);
    Program::Options options{.what = "the gradients", .wire = find_wire_format(me.option("wire"))};
    if (now) {
      if (fault == "exits") _exit(0);
      if (fault == "returns") return;
      if (fault == "wrong_count") elements += 8;
      if (fault == "wrong_wire") options.wire = options.wire == kFp32 ? kBf16 : kFp32;
      if (fault == "wrong_scale") options.scale = 0.5f;
      if (fault == "wrong_name") options.what = "something else";
      if (fault == "wrong_schedule")
        schedule = schedule_of(me.option("schedule") == "ring" ? "two_shot" : "ring", me.world);
      if (fault == "delayed") testing::delay_what_is_sent(10ms);
      if (fault == "delayed_too_long") testing::delay_what_is_sent(me.timeout + 1500ms);
      if (fault == "corrupted_header") testing::corrupt_next_header();
      if (fault == "corrupted_frame") testing::corrupt_next_frame();
      if (fault == "corrupted_payload") testing::corrupt_next_payload();
      if (fault == "reset") testing::reset_next_connection();
      if (fault == "loses_its_connections") break_all_connections();
      if (fault == "aborts") comm->abort("the test says so");
      if (fault == "slow") std::this_thread::sleep_for(after);
    }
    std::vector<float> data(elements);
    for (int64_t i = 0; i < elements; ++i) data[i] = static_cast<float>((i * 7 + call) % 16 * (me.rank + 1));
    Program program(comm->transport(), schedule, {data.data(), data.data(), nullptr, elements}, options);
    Buffer workspace(Device::host(), program.workspace_bytes());
    program.bind(workspace.data());
    program.run(stream);
    if (now) {
      if (fault == "killed" || fault == "stopped" || fault == "paused")
        std::this_thread::sleep_for(after / 100);
      if (fault == "killed") raise(SIGKILL);
      if (fault == "stopped") raise(SIGSTOP);
      if (fault == "paused") testing::pause_for(50ms);
    }
    stream.synchronize();
    for (int64_t i = 0; i < elements; ++i) {
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
  const char* schedules[] = {"ring", "tree", "two_shot", "hierarchical"};
  const std::string schedule = schedules[random() % 4];
  int world = 2 + static_cast<int>(random() % 4);
  if (schedule == "hierarchical") world = 4;
  const int who = static_cast<int>(random() % static_cast<uint32_t>(world));
  // The corruption of payload requires a sufficiently large message.
  const int floats = 20'000 + static_cast<int>(random() % 60'000);
  // The deadline is short if the fault is noticed only at the deadline, and otherwise far longer than the
  // case may take.
  const milliseconds deadline = kind.waits_for_deadline ? 1500ms : 60'000ms;
  testing::ProcessOptions options{.timeout = deadline,
                                  .limit = 120s,
                                  .options = {{"fault", kind.name},
                                              {"schedule", schedule},
                                              {"wire", random() % 2 == 0 ? "fp32" : "bf16"},
                                              {"count", fmt::to_string(floats)},
                                              {"who", fmt::to_string(who)},
                                              {"call", fmt::to_string(1 + random() % kCalls)},
                                              {"after_us", fmt::to_string(random() % 200'000)}}};
  if (kind.stays) options.never_ending = {who};
  const auto ranks = testing::run_processes("Soaked", world, options);
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
  const auto until =
      std::chrono::steady_clock::now() + std::chrono::seconds(number_from_environment("GRADWIRE_SOAK_S", 0));
  const auto first = static_cast<uint32_t>(number_from_environment("GRADWIRE_TEST_SEED", 1));
  constexpr uint32_t kAtLeast = std::size(kKinds);
  std::atomic<uint32_t> next = 0;
  std::mutex mutex;
  Count all;
  std::map<std::string, int> kinds;
  std::vector<std::thread> workers;
  for (int w = 0; w < 4; ++w) {
    workers.emplace_back([&] {
      while (true) {
        const uint32_t run = next++;
        if (run >= kAtLeast && std::chrono::steady_clock::now() >= until) return;
        Count count;
        std::string name;
        const std::string trouble = one_fault(first + run, count, name);
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
      all.runs, kinds.size(), first, all.hangs, all.wrong, all.crashes, all.unnoticed);
  EXPECT_EQ(all.hangs, 0);
  EXPECT_EQ(all.wrong, 0);
  EXPECT_EQ(all.crashes, 0);
  EXPECT_EQ(all.unnoticed, 0);
}

}  // namespace
}  // namespace gradwire
