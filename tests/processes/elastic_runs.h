// Runs with --elastic whose ranks are processes: a small model, and the fates of its ranks.
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
#include "trainer/data/dataset.h"
#include "trainer/train/run.h"

namespace gradwire::testing {

// The fate of a process. "5 3 kill 9 0 stop 12 4 join": after step 5, rank 3 is killed; after step 9, rank 0
// is stopped; after step 12, process 4, which was not launched with the other processes, asks to join.
// "soon": the rank is killed within 5 ms. Further fates of a joiner: "join-dies" or "join-stops" once it is
// invited, "join-stops-waiting" before the invitation, "join-dies-inside" once it is a rank, "join-guesses"
// the secret.
struct Fate {
  int64_t step = 0;
  int rank = 0;
  std::string what;
};
std::vector<Fate> fates_of(const std::string& text);
// Returns how many of the fates are joins.
int joining(const std::vector<Fate>& fates);

// Returns the path of the file whose creation makes process `rank` ask to join.
std::string call_path(const std::string& folder, int rank);

// Joins the group as one of the ranks that are launched together.
std::unique_ptr<Communicator> join(const Me& me);
// Returns a function that reads the group's address from the file `members` at each call.
std::function<std::string()> invitation_of(const std::string& members);
// Joins a running group by the file `members`, which Elastic::post_members() writes.
std::unique_ptr<Communicator> join_later(const std::string& members, const std::string& about,
                                         std::chrono::milliseconds timeout);

// Returns the rest of each line of `text` that begins with `word`.
std::vector<std::string> lines_with(const std::string& word, const std::string& text);

constexpr int64_t kCheckpointEvery = 4;
DataSplits tiny_data();
// Returns the configuration of a run with 32 images per step with 4 ranks: 6 steps are an epoch.
TrainConfig tiny_run(int world, const std::string& spec, int64_t steps = 24);

// Returns the losses of a run whose ranks neither leave nor join.
std::vector<double> undisturbed_losses(const TrainConfig& config);

struct Case {
  std::string spec = "int8", fates;
  int world = 4, least = 1;  // world: number of launched ranks
  std::string batch = "keep-global", checkpoints = "off", graph = "off";
  bool shard_optimizer = false;
  std::chrono::milliseconds timeout = 20s;
  int64_t steps = 24;
  int most = 0;                // 0: the number of processes is the maximum
  std::set<int> refused = {};  // processes that the group must reject
};

struct Trained {
  std::string folder;
  int64_t steps = 0;
  std::vector<Outcome> ranks;
  std::vector<nlohmann::json> log;
  std::vector<nlohmann::json> records(const std::string& type) const;
  // Returns the ranks in the field `field`, "lost" or "joined", of all records of one type.
  std::vector<int> named(const std::string& type, const std::string& field) const;
  std::vector<int> lost() const { return named("shrink", "lost"); }
  std::vector<int> joined() const { return named("grow", "joined"); }
  // Returns the steps of all records of one type.
  std::vector<int64_t> steps_of(const std::string& type) const;
  std::string checkpoint(int64_t step) const;
};

// Runs the case, whose fates kill or stop the ranks `dead`. Expects all other ranks to exit successfully.
Trained train(const Case& c, const std::set<int>& dead);

// Expects each step at most once and in order. Per lost rank, at most two steps may be missing from the log:
// a step that all ranks had completed when the rank was lost may not have been reported yet.
void expect_steps(const Trained& trained);
// Returns the steps 0, 1, ... steps - 1.
std::vector<int64_t> every_step(int64_t steps);
// Expects each reported step's loss to equal the step's loss in `whole`, up to the order of additions.
void expect_losses(const Trained& trained, const std::vector<double>& whole);
// Expects all checkpoints, the last of which has `world` ranks. Expects that a run resumes from the
// checkpoint of `step`.
void expect_checkpoints(const Trained& trained, int world, const TrainConfig& rest, int64_t step);

}  // namespace gradwire::testing
