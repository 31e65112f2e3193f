#include "tests/processes/elastic_runs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "collectives/net/membership.h"
#include "collectives/transport/tcp/tcp.h"
#include "runtime/util/error.h"
#include "tests/trainer/runs.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/config/config.h"
#include "trainer/log/records.h"

namespace gradwire::testing {

using nlohmann::json;

std::vector<Fate> fates_of(const std::string& text) {
  std::vector<Fate> all;
  std::istringstream words(text);
  for (Fate f; words >> f.step >> f.rank >> f.what;) all.push_back(f);
  return all;
}

int joining(const std::vector<Fate>& fates) {
  return static_cast<int>(
      std::count_if(fates.begin(), fates.end(), [](const Fate& f) { return f.what.starts_with("join"); }));
}

std::string call_path(const std::string& folder, int rank) {
  return fmt::format("{}/call.{}", folder, rank);
}

std::unique_ptr<Communicator> join(const Me& me) {
  TcpOptions options;
  options.group = {
      .rendezvous = me.rendezvous, .rank = me.rank, .world = me.world, .timeout = me.timeout, .joining = 60s};
  options.shrinkable = true;
  return std::make_unique<Communicator>(make_tcp_transport(options));
}

std::function<std::string()> invitation_of(const std::string& members) {
  return [members] {
    try {
      return read_members(members).invitation;
    } catch (const BadInput&) {
      return std::string();
    }
  };
}

std::unique_ptr<Communicator> join_later(const std::string& members, const std::string& about,
                                         std::chrono::milliseconds timeout) {
  TcpOptions options;
  options.group.timeout = timeout;
  return std::make_unique<Communicator>(
      join_tcp_transport(options, {.invitation = invitation_of(members), .about = about}));
}

std::vector<std::string> lines_with(const std::string& word, const std::string& text) {
  std::vector<std::string> found;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) {
    if (line.starts_with(word)) found.push_back(line.substr(word.size()));
  }
  return found;
}

DataSplits tiny_data() {
  return make_synthetic(tiny_model(), 200, 10, 1);
}

TrainConfig tiny_run(int world, const std::string& spec, int64_t steps) {
  TrainConfig config = run_config(tiny_model(), world, Device::host(), spec);
  config.batch_size = 8;
  config.steps = steps;
  config.warmup_steps = 2;
  config.lr = 1e-2;
  config.seed = 3;
  config.timeout_s = 20;
  return config;
}

std::vector<double> undisturbed_losses(const TrainConfig& config) {
  return train(config, tiny_data()).losses;
}

namespace {

std::string pid_path(const std::string& folder, int rank) {
  return fmt::format("{}/pid.{}", folder, rank);
}

// Returns the path of the file that process `rank` creates when its attempt to join has ended.
std::string answered_path(const std::string& folder, int rank) {
  return call_path(folder, rank) + ".answered";
}

std::set<int> numbers_in(const std::string& text) {
  std::istringstream words(text);
  return {std::istream_iterator<int>(words), {}};
}

// Writes the log and triggers the fates. Runs on the current rank 0.
class Watcher final : public RunObserver {
 public:
  Watcher(const Me& me, const TrainConfig& config, const DataSplits& data)
      : me_(me),
        fates_(fates_of(me.option("fates"))),
        steps_(config.steps),
        log_(me.option("folder") + "/run.jsonl", config, data) {}

  void on_run(const RunInfo& info) override { log_.on_run(info); }
  void on_step(const StepRecord& step) override {
    log_.on_step(step);
    for (size_t i = 0; i < fates_.size(); ++i) {
      const Fate& fate = fates_[i];
      if (step.step < fate.step || !struck_.insert(i).second) continue;
      if (fate.what.starts_with("join")) {
        called_at_ = step.step;
        std::ofstream(call_path(me_.option("folder"), fate.rank)) << "come" << std::endl;
        continue;
      }
      const int signal = fate.what == "stop" ? SIGSTOP : SIGKILL;
      pid_t pid = 0;
      std::ifstream(pid_path(me_.option("folder"), fate.rank)) >> pid;
      if (pid <= 0) throw std::runtime_error("WRONG: no process to kill");
      if (fate.what != "soon") {
        kill(pid, signal);
        continue;
      }
      std::thread([pid, signal, after = std::chrono::microseconds(std::random_device()() % 5000)] {
        std::this_thread::sleep_for(after);
        kill(pid, signal);
      }).detach();
    }
    // Give a process time to join; after the process has joined, the run continues at full speed. The run
    // must not end before a process that it rejects has its answer.
    if (step.step < called_at_ + (awaited() > 0 ? 30 : 5) || rejects()) std::this_thread::sleep_for(100ms);
    if (step.step >= steps_ - 6 && me_.option("fates").find("soon") != std::string::npos) {
      std::this_thread::sleep_for(20ms);  // so that no rank reaches the end before its fate
    }
  }
  void on_group(const GroupRecord& group) override {
    log_.on_group(group);
    come_ += group.joined.size();
    const bool grows = !group.joined.empty();
    std::printf("%s %s in %.3f s\n", grows ? "joined" : "lost",
                fmt::format("{}", fmt::join(grows ? group.joined : group.lost, ", ")).c_str(), group.seconds);
  }
  void on_eval(const EvalRecord& eval) override { log_.on_eval(eval); }
  void on_checkpoint(const CheckpointRecord& checkpoint) override { log_.on_checkpoint(checkpoint); }
  void on_end(const EndRecord& end) override { std::printf("end: %016lx\n", end.parameter_hash); }

 private:
  // Returns the number of processes that were called and have not joined. A new rank 0 does not know about
  // earlier calls.
  int64_t awaited() const {
    const auto called = std::count_if(struck_.begin(), struck_.end(), [&](size_t i) {
      return fates_[i].what == "join" && !refused_.contains(fates_[i].rank);
    });
    return called - static_cast<int64_t>(come_);
  }

  // Returns whether a process was called that the group must reject, and that has no answer yet.
  bool rejects() const {
    return called_at_ >= 0 && std::any_of(refused_.begin(), refused_.end(), [&](int rank) {
             return !std::filesystem::exists(answered_path(me_.option("folder"), rank));
           });
  }

  const Me& me_;
  const std::vector<Fate> fates_;
  const std::set<int> refused_ = numbers_in(me_.option("refused"));
  const int64_t steps_;
  std::set<size_t> struck_;
  size_t come_ = 0;
  int64_t called_at_ = -100;
  RunLog log_;
};

RANK_PROGRAM(TrainsElastically) {
  const std::string folder = me.option("folder");
  std::ofstream(pid_path(folder, me.rank)) << getpid() << std::endl;
  const int launched = me.number("launched");
  // Another job may start the joining processes.
  setenv("GRADWIRE_JOB", me.rank < launched ? "a job" : "another job", 1);
  TrainConfig config = tiny_run(launched, me.option("spec"), me.number("steps"));
  config.processes = true;
  config.elastic = {me.number("least"), me.number("most")};
  config.elastic_batch =
      me.option("batch") == "keep-local" ? ElasticBatch::keep_local : ElasticBatch::keep_global;
  config.graph = me.option("graph") == "on";
  config.shard_optimizer = me.option("shard") == "on";
  config.timeout_s = static_cast<double>(me.timeout.count()) * 1e-3;
  config.members = folder + "/members";
  if (me.option("checkpoints") == "on") {
    config.checkpoint_directory = folder + "/saved";
    config.checkpoint_every = kCheckpointEvery;
    config.checkpoint_keep = 100;
  }
  if (numbers_in(me.option("refused")).contains(me.rank)) config.weight_decay = 0.125;
  const DataSplits data = tiny_data();
  Watcher watcher(me, config, data);
  if (me.rank < launched) {
    Me first = me;
    first.world = launched;
    return run_training(config, data, {{&watcher}}, join(first).get());
  }
  wait_for_file(call_path(folder, me.rank));
  const std::vector<Fate> fates = fates_of(me.option("fates"));
  const auto mine = std::find_if(fates.begin(), fates.end(), [&](const Fate& fate) {
    return fate.what.starts_with("join") && fate.rank == me.rank;
  });
  join_training(config, data, {{&watcher}}, [&](const std::string& about) {
    if (mine->what == "join-guesses") setenv("GRADWIRE_SECRET", "a guess", 1);
    if (mine->what == "join-stops-waiting") {
      std::thread([] {
        std::this_thread::sleep_for(20ms);
        raise(SIGSTOP);
      }).detach();
    }
    if (mine->what == "join-dies" || mine->what == "join-stops") {
      const Admitted admitted =
          request_admission({.rendezvous = "", .timeout = me.timeout},
                            {.invitation = invitation_of(config.members), .about = about});
      raise(mine->what == "join-dies" ? SIGKILL : SIGSTOP);
    }
    std::unique_ptr<Communicator> comm;
    try {
      comm = join_later(config.members, about, me.timeout);
    } catch (const std::exception&) {
      std::ofstream(answered_path(folder, me.rank)) << "rejected" << std::endl;
      throw;
    }
    if (mine->what == "join-dies-inside") raise(SIGKILL);
    return comm;
  });
}

}  // namespace

std::vector<json> Trained::records(const std::string& type) const {
  std::vector<json> found;
  for (const json& record : log) {
    if (record["type"] == type) found.push_back(record);
  }
  return found;
}

std::vector<int64_t> Trained::steps_of(const std::string& type) const {
  std::vector<int64_t> steps;
  for (const json& record : records(type)) steps.push_back(record["step"].get<int64_t>());
  return steps;
}

std::string Trained::checkpoint(int64_t step) const {
  return NewCheckpoint::final_path(folder + "/saved", step);
}

std::vector<int> Trained::named(const std::string& type, const std::string& field) const {
  std::vector<int> all;
  for (const json& record : records(type)) {
    for (const int rank : record[field]) all.push_back(rank);
  }
  return all;
}

Trained train(const Case& c, const std::set<int>& dead) {
  static int runs = 0;
  Trained trained{
      .folder = scratch_path(fmt::format("elastic{}", runs++)), .steps = c.steps, .ranks = {}, .log = {}};
  const int all = c.world + joining(fates_of(c.fates));
  std::filesystem::create_directories(trained.folder);
  ProcessOptions options{.timeout = c.timeout,
                         .options = {{"spec", c.spec},
                                     {"fates", c.fates},
                                     {"steps", std::to_string(c.steps)},
                                     {"launched", std::to_string(c.world)},
                                     {"most", std::to_string(c.most == 0 ? all : c.most)},
                                     {"refused", fmt::format("{}", fmt::join(c.refused, " "))},
                                     {"least", std::to_string(c.least)},
                                     {"batch", c.batch},
                                     {"graph", c.graph},
                                     {"shard", c.shard_optimizer ? "on" : "off"},
                                     {"checkpoints", c.checkpoints},
                                     {"folder", trained.folder}}};
  for (const Fate& fate : fates_of(c.fates)) {
    if (fate.what.find("stop") != std::string::npos) options.never_ending.push_back(fate.rank);
  }
  trained.ranks = run_processes("TrainsElastically", all, options);
  for (int r = 0; r < all; ++r) {
    const Outcome& rank = trained.ranks[r];
    if (c.least == 1 && !c.refused.contains(r)) {
      EXPECT_EQ(rank.exit_code, dead.contains(r) ? -1 : 0) << "rank " << r << ": " << rank.output;
    }
    for (const char* word : {"lost ", "joined "}) {
      for (const std::string& line : lines_with(word, rank.output))
        fmt::print("{}: {}{}\n", c.fates, word, line);
    }
  }
  std::ifstream log(trained.folder + "/run.jsonl");
  for (std::string line; std::getline(log, line);) trained.log.push_back(json::parse(line));
  return trained;
}

void expect_steps(const Trained& trained) {
  int64_t last = -1, missing = 0;
  for (const json& record : trained.records("step")) {
    const auto step = record["step"].get<int64_t>();
    EXPECT_GT(step, last);
    missing += step - last - 1;
    last = step;
  }
  missing += trained.steps - 1 - last;
  EXPECT_LE(missing, 2 * static_cast<int64_t>(trained.records("shrink").size()));
}

std::vector<int64_t> every_step(int64_t steps) {
  std::vector<int64_t> all(steps);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void expect_losses(const Trained& trained, const std::vector<double>& whole) {
  for (const json& record : trained.records("step")) {
    const double expected = whole.at(record["step"].get<size_t>());
    EXPECT_NEAR(record["loss"].get<double>(), expected, 1e-4 * expected) << record;
  }
}

void expect_checkpoints(const Trained& trained, int world, const TrainConfig& rest, int64_t step) {
  for (int64_t s = kCheckpointEvery; s <= trained.steps; s += kCheckpointEvery) {
    EXPECT_GT(checkpoint_world(trained.checkpoint(s)), 0) << s;
  }
  EXPECT_EQ(checkpoint_world(trained.checkpoint(trained.steps)), world);
  TrainConfig resumed = rest;
  resumed.resume = trained.checkpoint(step);
  EXPECT_EQ(checkpoint_world(resumed.resume), static_cast<int>(rest.devices.size()));
  run_training(resumed, tiny_data(), {});
}

}  // namespace gradwire::testing
