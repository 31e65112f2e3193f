// Conservation of gradients with --elastic: a reducer averages known gradients, while ranks die and other
// ranks join. Only the residuals of dead ranks are lost, and the run reports the norms of the lost residuals.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "collectives/reducer/reducer.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"
#include "tests/processes/elastic_runs.h"
#include "trainer/train/elastic.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {
namespace {

using nlohmann::json;
using namespace testing;
using namespace std::chrono_literals;

const std::vector<GradientTensor> kTensors = {{"a", {48, 32}}, {"b", {40}}, {"c", {20, 3, 11}}};

float gradient(int rank, int64_t step, int tensor, int64_t element) {
  uint64_t hash =
      mix(mix(static_cast<uint64_t>(rank + 1), static_cast<uint64_t>(step)), static_cast<uint64_t>(tensor));
  hash = mix(hash, static_cast<uint64_t>(element));
  return static_cast<float>(hash >> 40) / static_cast<float>(1 << 23) - 1.0f;
}

void write_floats(const std::string& path, const std::vector<float>& values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(float)));
}

std::vector<double> read_floats(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<double> values;
  for (float value; file.read(reinterpret_cast<char*>(&value), sizeof value);) values.push_back(value);
  return values;
}

std::string residual_path(const std::string& folder, int rank, int64_t step) {
  return fmt::format("{}/residual.{}.{}", folder, rank, step);
}

// Returns the path of a file of process `rank`: "applied", its results; "asks", created when the process asks
// to join; "joined", created once it has joined.
std::string rank_path(const std::string& folder, const char* what, int rank) {
  return fmt::format("{}/{}.{}", folder, what, rank);
}

struct SoFar {
  int highest = 0;  // number of the last rank that was launched or has joined
  std::set<int> lost = {};
};

// Averages gradients as RankTrainer does, and adds up the results instead of updating weights. Each rank's
// residual is in a file before any rank can know that the step is complete.
class Averaging {
 public:
  Averaging(const Me& me, Elastic& elastic)
      : me_(me),
        elastic_(elastic),
        comm_(elastic.comm()),
        stream_(Stream::create(Device::host(), "test")),
        reducer_(comm_, CompressionSpec::parse(me.option("spec")), kTensors, {.seed = 7}),
        layout_(reducer_layout(reducer_)),
        applied_(make_buffer<float>(Device::host(), layout_.elements)),
        residual_(static_cast<size_t>(layout_.elements)) {
    for (const GradientTensor& tensor : kTensors) parameters_.push_back({tensor.name, tensor.shape});
    fill_zero(stream_, applied_.data(), applied_.bytes());
    stream_.synchronize();
  }
  ~Averaging() {
    try {
      stream_.synchronize();
    } catch (...) {
    }
  }

  // Runs the steps up to `steps` and triggers the fates. `so_far`: the changes reported so far.
  void run(int64_t steps, const std::vector<Fate>& fates, SoFar& so_far) {
    int64_t step = 0;
    if (elastic_.start()) {
      step = elastic_.start()->position.step;
      if (elastic_.restore(state())) throw std::runtime_error("WRONG: a residual has no place");
      for (const GroupRecord& change : elastic_.resumed()) {
        if (change.joined.empty()) {
          so_far.lost.insert(change.lost.begin(), change.lost.end());
          say("shrink", {{"step", step},
                         {"lost", change.lost},
                         {"norms", change.lost_residual_norms},
                         {"ranks", change.ranks},
                         {"seconds", change.seconds}});
        } else {
          so_far.highest = change.ranks.back();
          say("grow", {{"step", step},
                       {"joined", change.joined},
                       {"ranks", change.ranks},
                       {"seconds", change.seconds}});
        }
      }
    } else {
      elastic_.take_snapshot(state(), {}, {});
    }
    for (; step < steps; ++step) {
      // Wait for a process that joins, once all earlier deaths are reported and before the next death.
      bool all_gone = true;
      for (const Fate& fate : fates) {
        if (fate.step > step) break;
        if (fate.what == "join" && fate.rank > so_far.highest) {
          if (!all_gone) break;
          std::ofstream(call_path(me_.option("folder"), fate.rank)) << "come" << std::endl;
          wait_for_file(rank_path(me_.option("folder"), "asks", fate.rank), 10s);
          std::this_thread::sleep_for(50ms);
          break;
        }
        if (fate.what != "join") all_gone = all_gone && so_far.lost.contains(fate.rank);
        if (fate.what == "join" || fate.rank != me_.rank || doomed_at_) continue;
        if (fate.what == "stop") raise(SIGSTOP);
        doomed_at_ = step;
        std::thread(die_soon).detach();
      }
      while (doomed_at_ && step > *doomed_at_) pause();  // a doomed rank runs at most one more step
      average(step);
      if (step + 1 < steps && elastic_.joiners_wait(step + 1) && elastic_.grow()) return;
    }
    write_floats(rank_path(me_.option("folder"), "applied", me_.rank),
                 {applied_.as<float>(), applied_.as<float>() + layout_.elements});
  }

 private:
  static void say(const char* what, const json& record) {
    std::printf("%s: %s\n", what, record.dump().c_str());
  }
  static void die_soon() {
    std::this_thread::sleep_for(std::chrono::microseconds(std::random_device()() % 2000));
    raise(SIGKILL);
  }

  void average(int64_t step) {
    for (int i = 0; i < reducer_.tensors(); ++i) {
      stream_.submit([this, step, i] {
        for (int64_t e = 0; e < kTensors[i].count(); ++e) {
          reducer_.gradient(i)[e] = gradient(me_.rank, step, i, e);
        }
      });
      reducer_.ready(i, stream_);
    }
    reducer_.wait(stream_);
    stream_.submit([this] {
      const auto* mean = reducer_.gradients().as<const float>();
      auto* applied = applied_.as<float>();
      for (int64_t e = 0; e < layout_.elements; ++e)
        applied[e] += mean[e] * static_cast<float>(comm_.world());
    });
    for (const TensorState& s : reducer_.tensor_state()) {
      if (s.kind != kResidualKind) continue;
      float* const to = residual_.data() + layout_.offsets[s.tensor];
      s.read(stream_, 0, std::as_writable_bytes(std::span<float>(to, static_cast<size_t>(s.count()))));
    }
    stream_.submit(
        [this, step] { write_floats(residual_path(me_.option("folder"), me_.rank, step + 1), residual_); });
    elastic_.take_snapshot(state(), {.step = step + 1}, {});
    stream_.synchronize();
  }

  RankState state() {
    return {.comm = comm_,
            .stream = stream_,
            .reducer = reducer_,
            .parameters = parameters_,
            .layout = layout_,
            .weights = {applied_.as<float>()},
            .moments = {},
            .parts = reducer_.owned()};
  }

  const Me& me_;
  Elastic& elastic_;
  Communicator& comm_;
  Stream stream_;
  Reducer reducer_;
  std::vector<VitParameter> parameters_;
  ParameterLayout layout_;
  Buffer applied_;
  std::vector<float> residual_;
  std::optional<int64_t> doomed_at_;
};

RANK_PROGRAM(AveragesElastically) {
  const int launched = me.number("launched");
  const std::string folder = me.option("folder");
  const std::vector<Fate> fates = fates_of(me.option("fates"));
  TrainConfig config;
  config.devices.assign(static_cast<size_t>(launched), Device::host());
  config.processes = true;
  config.elastic = {1, me.world};
  config.timeout_s = 20;
  config.members = folder + "/members";
  std::unique_ptr<Communicator> first;
  std::unique_ptr<Elastic> elastic;
  SoFar so_far{.highest = launched - 1};
  if (me.rank < launched) {
    Me mine = me;
    mine.world = launched;
    first = join(mine);
    elastic = std::make_unique<Elastic>(config, *first);
  } else {
    wait_for_file(call_path(folder, me.rank));
    // Let processes join in the order of their numbers.
    if (me.rank > launched) wait_for_file(rank_path(folder, "joined", me.rank - 1));
    std::ofstream(rank_path(folder, "asks", me.rank)) << "asks" << std::endl;
    elastic = std::make_unique<Elastic>(config);
    elastic->join(join_later(config.members, "", me.timeout));
    for (const Fate& fate : fates) {  // fates before this rank's join
      if (fate.rank == me.rank) break;
      if (fate.what != "join") so_far.lost.insert(fate.rank);
    }
    std::ofstream(rank_path(folder, "joined", me.rank)) << "here" << std::endl;
  }
  elastic->open_admission([](const std::string&) { return ""; });
  while (true) {
    try {
      if (!elastic->agree()) return;
      elastic->post_members();
      Averaging(me, *elastic).run(me.number("steps"), fates, so_far);
      if (elastic->has_grown()) {
        elastic->move_on();
        continue;
      }
      elastic->comm().barrier();
      return;
    } catch (const CommError& error) {
      elastic->comm().abort(error.what());
      if (!elastic->has_begun()) throw;
      elastic->regroup(error.what());
    }
  }
}

double norm_of(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

// Returns the sum of all ranks' gradients of all steps. `group_from`: for each key, a step,
// the group's ranks from that step on.
std::vector<double> sum_of_gradients(const std::map<int64_t, std::vector<int>>& group_from, int64_t steps,
                                     size_t elements) {
  std::vector<double> sum(elements);
  const GradientLayout layout = lay_out(kTensors, 4, 25 << 20);
  for (int64_t step = 0; step < steps; ++step) {
    for (const int r : std::prev(group_from.upper_bound(step))->second) {
      for (size_t t = 0; t < kTensors.size(); ++t) {
        for (int64_t e = 0; e < kTensors[t].count(); ++e) {
          sum[layout.offsets[t] + e] += gradient(r, step, static_cast<int>(t), e);
        }
      }
    }
  }
  return sum;
}

// Runs AveragesElastically, and expects all ranks except `dead` to succeed.
std::vector<Outcome> run_averages(const std::string& spec, int launched, const std::string& fates,
                                  const std::set<int>& dead, int64_t steps, const std::string& folder) {
  const bool stops = fates.find("stop") != std::string::npos;
  const auto ranks =
      run_processes("AveragesElastically", launched + joining(fates_of(fates)),
                    {.timeout = stops ? 3s : 20s,
                     .limit = 120s,
                     .never_ending = stops ? std::vector<int>(dead.begin(), dead.end()) : std::vector<int>(),
                     .options = {{"spec", spec},
                                 {"fates", fates},
                                 {"steps", std::to_string(steps)},
                                 {"folder", folder},
                                 {"launched", std::to_string(launched)}}});
  for (size_t r = 0; r < ranks.size(); ++r) {
    EXPECT_EQ(ranks[r].exit_code, dead.contains(static_cast<int>(r)) ? -1 : 0)
        << "rank " << r << ": " << ranks[r].output;
  }
  return ranks;
}

// What a rank that took part in all steps reported.
struct History {
  // For each key, a step, the group's ranks from that step on.
  std::map<int64_t, std::vector<int>> group_from;
  int joined = 0, lost = 0;
  std::vector<std::string> lost_residuals;  // paths of the residuals of lost ranks
  // The longest time from an error (or from the end of a step) until all ranks are ready for the next step.
  double shrunk_s = 0, grown_s = 0;
};

// Reads a rank's output. Expects that it reports the norm of each lost residual.
History read_history(const std::string& output, int launched, const std::string& folder) {
  History history;
  history.group_from[0].resize(launched);
  std::iota(history.group_from[0].begin(), history.group_from[0].end(), 0);
  const auto add = [&](const json& record, double& slowest_s) {
    // The last record of a step counts, because only that record includes all losses.
    history.group_from[record["step"].get<int64_t>()] = record["ranks"].get<std::vector<int>>();
    slowest_s = std::max(slowest_s, record["seconds"].get<double>());
  };
  for (const std::string& line : lines_with("grow: ", output)) {
    const json record = json::parse(line);
    add(record, history.grown_s);
    history.joined += static_cast<int>(record["joined"].size());
  }
  for (const std::string& line : lines_with("shrink: ", output)) {
    const json record = json::parse(line);
    add(record, history.shrunk_s);
    const auto step = record["step"].get<int64_t>();
    for (size_t i = 0; i < record["lost"].size(); ++i, ++history.lost) {
      const std::string path = residual_path(folder, record["lost"][i].get<int>(), step);
      const double norm = step == 0 ? 0 : norm_of(read_floats(path));
      EXPECT_NEAR(record["norms"][i].get<double>(), norm, 1e-6 * norm) << line;
      if (!std::filesystem::exists(path)) continue;
      EXPECT_GT(norm, 0) << line;  // the rank had completed the step
      history.lost_residuals.push_back(path);
    }
  }
  return history;
}

// Expects that the results plus the residual of every rank, alive or dead, equal the sum of all gradients.
// `launched` ranks begin; at least one of them takes part in all steps.
History expect_conservation(const std::string& spec, int launched, const std::string& fates,
                            const std::set<int>& dead, int64_t steps = 12) {
  SCOPED_TRACE(fmt::format("{}, {} launched, {}", spec, launched, fates));
  static int runs = 0;
  const std::string folder = scratch_path(fmt::format("averages.{}", runs++));
  std::filesystem::create_directories(folder);
  const std::vector<Outcome> ranks = run_averages(spec, launched, fates, dead, steps, folder);
  if (::testing::Test::HasFailure()) return {};
  std::vector<int> survivors;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (!dead.contains(r)) survivors.push_back(r);
  }
  const History history = read_history(ranks[survivors[0]].output, launched, folder);
  EXPECT_EQ(history.joined, joining(fates_of(fates)));
  EXPECT_EQ(history.lost, static_cast<int>(dead.size()));
  const auto applied = [&](int rank) { return read_floats(rank_path(folder, "applied", rank)); };
  std::vector<std::string> residuals = history.lost_residuals;
  std::vector<double> sum = applied(survivors[0]);
  EXPECT_FALSE(sum.empty());
  for (const int r : survivors) {
    EXPECT_EQ(applied(r), sum) << "rank " << r << " has different bits";
    residuals.push_back(residual_path(folder, r, steps));
  }
  const std::vector<double> gradients = sum_of_gradients(history.group_from, steps, sum.size());
  for (size_t i = 0; i < sum.size(); ++i) sum[i] -= gradients[i];
  for (const std::string& path : residuals) {
    const std::vector<double> residual = read_floats(path);
    EXPECT_EQ(residual.size(), sum.size()) << path;
    for (size_t i = 0; i < std::min(residual.size(), sum.size()); ++i) sum[i] += residual[i];
  }
  EXPECT_LT(norm_of(sum) / norm_of(gradients), 1e-6);
  std::filesystem::remove_all(folder);
  return history;
}

TEST(Elastic, LosesOnlyTheResidualsOfDeadRanksAndReportsTheirNorms) {
  expect_conservation("int8", 4, "3 3 kill 7 1 kill", {1, 3});
  expect_conservation("powersgd:rank=2", 4, "4 0 kill 4 2 kill", {0, 2});
  expect_conservation("powersgd:rank=2,wire=bf16", 3, "5 0 kill", {0});
}

// Shrinks the group from 4 ranks to 3 and 2, then grows it to 4. Rank 0 also dies.
TEST(Elastic, JoinersStartWithoutResidualAndOthersKeepTheirs) {
  for (const char* spec : {"int8", "powersgd:rank=2"}) {
    expect_conservation(spec, 4, "3 3 kill 6 0 kill 8 4 join 8 5 join", {0, 3}, 40);
    expect_conservation(spec, 2, "3 2 join 12 0 kill", {0}, 40);
  }
}

// The events of one run: up to five, one at a time. At least two ranks are always alive, since a single rank
// has no residual. At least one launched rank never dies. None dies in the step after a join: a joiner that
// has no state yet would end, where join_training() lets it try again.
struct Drawn {
  int launched = 0, joins = 0, stops = 0;
  std::string spec = {}, fates = {};
  std::set<int> dead = {};
};

Drawn draw(uint32_t seed) {
  std::mt19937 random(seed);
  const char* specs[] = {"int8", "powersgd:rank=2", "powersgd:rank=1,wire=bf16", "fp8"};
  Drawn drawn{.launched = 2 + static_cast<int>(random() % 3), .spec = specs[random() % 4]};
  std::vector<int> there(drawn.launched);
  std::iota(there.begin(), there.end(), 0);
  const int spared = static_cast<int>(random() % there.size());
  const size_t events = 2 + random() % 4;
  int64_t step = 1 + static_cast<int64_t>(random() % 4), joined_at = -1;
  for (size_t i = 0; i < events; ++i, step += 1 + static_cast<int64_t>(random() % 4)) {
    if (there.size() < 3 || (there.size() < 5 && random() % 2 == 0)) {
      const int rank = drawn.launched + drawn.joins++;
      drawn.fates += fmt::format("{} {} join ", step, rank);
      there.push_back(rank);
      joined_at = step;
      continue;
    }
    size_t at = random() % there.size();
    if (there[at] == spared) at = (at + 1) % there.size();
    // Stop at most one rank, because the other ranks detect a stopped rank only at the deadline.
    const bool stops = drawn.stops == 0 && random() % 8 == 0;
    step = std::max(step, joined_at + 2);
    drawn.stops += stops;
    drawn.fates += fmt::format("{} {} {} ", step, there[at], stops ? "stop" : "kill");
    drawn.dead.insert(there[at]);
    there.erase(there.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return drawn;
}

// Draws random events. `make soak` draws for longer.
TEST(Elastic, LossesMatchUnderRandomFailuresAndJoins) {
  SoakSeeds seeds(3);
  int runs = 0, kills = 0, stops = 0, joins = 0;
  double killed_s = 0, stopped_s = 0, grown_s = 0;
  for (auto seed = seeds.next(); seed && !HasFailure(); seed = seeds.next(), ++runs) {
    SCOPED_TRACE(fmt::format("seed {}", *seed));
    const Drawn drawn = draw(*seed);
    const History history = expect_conservation(drawn.spec, drawn.launched, drawn.fates, drawn.dead, 60);
    kills += history.lost - drawn.stops;
    stops += drawn.stops;
    joins += history.joined;
    double& shrunk_s = drawn.stops > 0 ? stopped_s : killed_s;
    shrunk_s = std::max(shrunk_s, history.shrunk_s);
    grown_s = std::max(grown_s, history.grown_s);
  }
  fmt::print(
      "{} runs, seeds from {}: {} ranks killed, {} stopped, {} joined; the slowest took {:.2f} s to "
      "continue after a kill, {:.2f} s after the error in runs with a stop, {:.2f} s to admit ranks\n",
      runs, seeds.first, kills, stops, joins, killed_s, stopped_s, grown_s);
}

}  // namespace
}  // namespace gradwire
