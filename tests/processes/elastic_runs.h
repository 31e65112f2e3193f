// Runs with --elastic whose ranks are processes: a small model, and what happens to whom, and when.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "tests/processes/processes.h"
#include "trainer/config/run.h"
#include "trainer/data/dataset.h"

namespace gradwire::testing {

// "5 3 kill 9 0 stop 12 4 join": after step 5 rank 3 is killed, after step 9 rank 0 is stopped, after step 12 process 4,
// which was not launched with the others, asks to join. "soon": killed within 5 ms. What joins may also be one that
// "join-dies" or "join-stops" once it is invited, "join-stops-waiting" before that, "join-dies-inside" once it is a rank,
// and "join-guesses" the secret.
struct Fate {
  int64_t step = 0;
  int rank = 0;
  std::string what;
};
std::vector<Fate> fates_of(const std::string& text);
// How many of these processes join.
int joining(const std::vector<Fate>& fates);

// There once process `rank` is to ask.
std::string call_path(const std::string& folder, int rank);

// One of the ranks that are launched together.
std::unique_ptr<Communicator> join(const Me& me);
// What the file `members` says of where the group is, at each call.
std::function<std::string()> doors_of(const std::string& members);
// One that joins later by the file `members`, which Elastic::post_members() writes.
std::unique_ptr<Communicator> join_later(const std::string& members, const std::string& about,
                                         std::chrono::milliseconds timeout);

// The rest of the lines that begin with `word`.
std::vector<std::string> lines_with(const std::string& word, const std::string& text);

constexpr int64_t kCheckpointEvery = 4;
DataSplits tiny_data();
// 32 images per step with 4 ranks: 6 steps are an epoch.
TrainConfig tiny_run(int world, const std::string& spec, int64_t steps = 24);

// The losses of ranks that never leave, nor join.
std::vector<double> undisturbed_losses(const TrainConfig& config);

struct Case {
  std::string spec = "int8", fates;
  int world = 4, least = 1;  // launched
  std::string batch = "keep-global", checkpoints = "off", graph = "off";
  Sharding shard = Sharding::none;
  std::chrono::milliseconds timeout = 20s;
  int64_t steps = 24;
  int most = 0;                // 0: as many as there are processes
  std::set<int> refused = {};  // who joins with other settings
};

struct Trained {
  std::string folder;
  int64_t steps = 0;
  std::vector<Outcome> ranks;
  std::vector<nlohmann::json> log;
  std::vector<nlohmann::json> records(const std::string& type) const;
  // By the records of one type: "lost" or "joined".
  std::vector<int> named(const std::string& type, const std::string& field) const;
  std::vector<int> lost() const { return named("shrink", "lost"); }
  std::vector<int> joined() const { return named("grow", "joined"); }
};

// Runs the case, whose fates kill or stop `dead`; all others must end in good order.
Trained train(const Case& c, const std::set<int>& dead);

// Each step at most once, in order. A step that all had done when a rank was lost, but that was not reported yet, is not
// in the log: two at most for each loss.
void expect_steps(const Trained& trained);

}  // namespace gradwire::testing
