// The settings of a run, as one table: the flags of train, compare, doctor and plan, the keys of the records,
// and what a resumed run may change are derived from it. A new setting is a row of settings.cpp and a field
// of TrainConfig.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "trainer/config/config.h"

namespace gradwire {

using Json = nlohmann::ordered_json;

enum class DeviceChoice : uint8_t { automatic, host, cuda };

// The process's place among the processes that a launcher started (trainer/cli/launcher.h).
struct Launch {
  std::string launcher;   // "torchrun", "Slurm", "mpirun (Open MPI)", ...
  std::string variables;  // "RANK=1 WORLD_SIZE=4"
  int rank = 0, world = 1;
  // The rank's number among the ranks on this machine, and the count of these ranks. -1 and 0 if the launcher
  // does not set the values.
  int local_rank = -1, local_world = 0;
  // The rendezvous tcp://host:port, the same on every rank. Empty if unknown, and in a world of 1.
  std::string rendezvous;
  // The reason for an empty rendezvous: an invalid variable. This is an error only if the ranks need a
  // rendezvous.
  std::string no_rendezvous = {};
  // The variable with the list of nodes, if rank 0 is assumed to run on the first node of this list.
  // Otherwise empty.
  std::string assumed_from = {};
};

// The command line. A number that was not given is outside of its flag's range until resolve() sets its
// default: 0, -1 or NaN. The fields below are texts that resolve() parses, and settings that the training
// loop does not read.
struct RunOptions : TrainConfig {
  RunOptions();

  std::string data_text = "fashion-mnist", augment_text = "none";
  std::string optimizer_text = "adamw";  // sgd, adamw, or a text of kMatrixOptimizers
  int rank_count = 0;
  std::optional<Launch> launch;             // set if a launcher started this process
  std::string rendezvous;                   // if empty, the launcher's rendezvous
  std::optional<std::string> elastic_text;  // MIN:MAX[,keep-local]
  std::string join;                         // the `members` file of the run that this process joins
  std::optional<std::string> link_text;     // RATE[,DELAY]; default: links are not emulated
  DeviceChoice device = DeviceChoice::automatic;
  std::vector<std::string> specs;         // train: at most one; compare: one run per spec
  std::vector<double> buckets_mb;         // train: at most one size; compare: one run per size
  std::optional<double> target_accuracy;  // compare: a percentage
  int seeds = 1;                          // compare: runs of each spec, with consecutive seeds from `seed`
  std::string gather_text = "fp32";
  std::string log, json, cluster;
  std::optional<std::string> trace_text;      // A:B
  std::optional<std::string> gradients_text;  // STEP:DIR
  int64_t log_every = 0;                      // steps; 0: a line every few seconds
  bool dry_run = false, environment = false;
};

// --optimizer dion:... and muon...: optimizers of the layers' matrices. AdamW updates the other tensors.
inline constexpr const char* kMatrixOptimizers =
    "dion:rank=R[,mu=X][,orth=on|off][,lr=X] or muon[:mu=X][,lr=X]";

// One row of the table.
struct Setting {
  // What follows from another value.
  enum class Effect : uint8_t {
    none,   // results do not depend on the setting: compare skips a run that finished with another value
    run,    // a resumed run may have another value
    bits,   // a resumed run with another value continues with other bits, and says so
    state,  // the state in a checkpoint is for this value only
  };
  // A text's type, as --help shows it; the words of a choice, separated by '|'; or the range of a number.
  struct Values {
    constexpr Values(const char* text = "") : words(text) {}
    constexpr Values(double from, double to) : least(from), most(to) {}
    const char* words = "";
    double least = 0, most = 0;
  };
  using Field = std::variant<std::monostate, bool TrainConfig::*, int TrainConfig::*, int64_t TrainConfig::*,
                             uint64_t TrainConfig::*, double TrainConfig::*, std::string TrainConfig::*,
                             Precision TrainConfig::*, std::string VitConfig::*, int32_t VitConfig::*,
                             Gelu VitConfig::*, bool RunOptions::*, int RunOptions::*, int64_t RunOptions::*,
                             std::optional<double> RunOptions::*, std::string RunOptions::*,
                             std::optional<std::string> RunOptions::*, DeviceChoice RunOptions::*,
                             std::vector<std::string> RunOptions::*, std::vector<double> RunOptions::*>;

  static constexpr int kTrain = 1, kCompare = 2, kDoctor = 4, kPlan = 8;
  int commands;  // that have the flag; 0: a setting that follows from others
  const char* flag;
  Field field;
  Values values;
  std::string about;  // the flag's text in --help
  // The key in records; "model.width" is the key "width" of the object "model". The value is the field's, or
  // that of computed_values().
  const char* key = nullptr;
  Effect effect = Effect::run;
  const char* group = "";  // the flag's heading in --help
};

inline constexpr Setting::Values kBucketMb(0.001, 1 << 20);

// Returns all settings, in the order of --help.
std::span<const Setting> settings();
// Returns the settings with a key and their values, as in a log's first record.
Json config_json(const TrainConfig& config);
// Returns the value of a setting's key in the settings of a log or a checkpoint; null if there is none.
Json value_of(const Setting& setting, const Json& json);
// Returns an integer for a whole number (25 instead of 25.0).
Json shortest(double value);

}  // namespace gradwire
