// The flags of each command: ranges, choices, conflicts. Parsing throws CLI::ParseError if a flag is invalid.
#pragma once

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/launcher.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/measure/recommend.h"

namespace gradwire {

// The options of the command line, and their conversion to a TrainConfig.

enum class DeviceChoice : uint8_t { automatic, host, cuda };

// Flags as given, each within its range (trainer/cli/flags.cpp). Flags that were not given are empty and get
// their defaults from resolve().
struct RunOptions {
  std::string model = "vit_tiny";
  std::optional<int32_t> image_size, patch, width, depth, heads, mlp;
  Gelu gelu = Gelu::exact;
  std::string data = "fashion-mnist", augment = "none";
  std::optional<int> ranks;
  std::optional<Launch> launch;        // set if a launcher started this process
  std::string rendezvous;              // if empty, the launcher's rendezvous
  std::optional<std::string> elastic;  // MIN:MAX[,keep-local]
  std::string members;                 // file for joiners; if empty, a file in the checkpoint folder
  std::string join;                    // the `members` file of the run that this process joins
  std::optional<int> ranks_per_node;   // default: from the launcher, for this machine
  std::optional<std::string> link;     // RATE[,DELAY]; default: links are not emulated
  DeviceChoice device = DeviceChoice::automatic;
  std::vector<std::string> compression;   // train: at most one spec; compare: one run per spec
  std::vector<double> bucket_mb;          // train: at most one size; compare: one run per size
  std::optional<double> target_accuracy;  // compare: a percentage
  int seeds = 1;                          // compare: runs of each spec, with consecutive seeds from `seed`
  bool overlap_forward = false;
  std::optional<int64_t> gradient_group;
  bool shard_optimizer = false;
  std::string gather_weights = "fp32";
  uint64_t memory_limit = 0;
  bool graph = false;
  int64_t batch_size = 64, accumulate = 1;
  std::optional<double> epochs;
  std::optional<int64_t> steps;
  OptimizerKind optimizer = OptimizerKind::adamw;
  std::string matrix_optimizer;  // the text of Dion or Muon with options; empty: another optimizer
  Precision precision = Precision::fp32;
  std::optional<double> lr, weight_decay, momentum;
  std::optional<int64_t> warmup;
  uint64_t seed = 0;
  double timeout_s = 60;
  double eval_every = 1;
  std::string log, json;
  std::string trace;
  std::optional<std::string> trace_steps;
  std::string init, checkpoint, resume;
  std::optional<std::string> dump_gradients;  // STEP:DIR
  std::optional<int64_t> checkpoint_every;    // steps between checkpoints; by default an epoch
  std::optional<int> checkpoint_keep;
  int64_t log_every = 1;
  bool dry_run = false;
};

constexpr double kDefaultEpochs = 3;
constexpr double kDefaultBucketMb = 25;

struct Resolved {
  TrainConfig config;                         // settings with the first compression and bucket size
  std::vector<CompressionSpec> compressions;  // with `automatic`, its candidates
  std::optional<AutoCompression> automatic;   // --compression auto; config.compression is FP32 until chosen
  bool chosen = false;                        // config.compression is the resumed checkpoint's choice
  std::vector<double> buckets_mb;
  DataSplits data;
  std::string device_line;         // names the device, the number of ranks, and the reason for the device
  std::vector<std::string> notes;  // further notes for the user
};

// Resolves the options that concern only the machine and the model: ranks, devices, model, compression,
// precision. Throws BadInput.
Resolved resolve_machine(const RunOptions& options);

// Checks that the ranks can use schedule=nccl if a spec requires this schedule. Call after resolving the
// devices.
void check_schedules(const Resolved& resolved);
// Checks that optimizer and sharding fit the specs' residual policies. Call after resolving the ranks.
void check_policies(const Resolved& resolved);
// Checks --compression auto, whose predictions do not cover all ways to train. Call after resolving the ranks
// and --elastic. Throws BadInput.
void check_automatic(const RunOptions& options, Resolved& resolved);
// Turns auto off for one rank. Call after resolve_checkpoints(), because a resumed run keeps its spec.
void drop_automatic_of_one_rank(Resolved& resolved);

// Connects to the other processes. Returns null if this process is the only process of the run.
JoinOptions join_options(const RunOptions& options);
std::unique_ptr<Communicator> join(const RunOptions& options, const TrainConfig& config);

// Checks everything that can be checked without running, and loads the data. Throws BadInput.
Resolved resolve(const RunOptions& options);

}  // namespace gradwire

namespace CLI {
class App;
}

namespace gradwire {

void add_train_flags(CLI::App& command, RunOptions& options);
void add_compare_flags(CLI::App& command, RunOptions& options);
void add_top_flags(CLI::App& command, TopOptions& options);
void add_report_flags(CLI::App& command, ReportOptions& options);
void add_plan_flags(CLI::App& command, PlanOptions& options);
void add_export_flags(CLI::App& command, ExportOptions& options);
void add_doctor_flags(CLI::App& command, RunOptions& options, bool& show_environment);

}  // namespace gradwire

namespace gradwire {

// Validators of flag values, for all commands.

// Makes every flag and argument that holds a path reject texts that name no file (path_problem()). The type
// of a flag says where its path begins; every positional argument is a path. '-' is standard output for the
// flags that write a result. No result may be another of a command's files. Call after adding all commands.
inline void check_paths(CLI::App& app) {
  constexpr std::array<std::string_view, 6> kResults{"--json", "--csv",   "--markdown",
                                                     "--log",  "--trace", "--output"};
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    command->parse_complete_callback([=] {
      std::vector<NamedFile> files;
      for (const CLI::Option* option : command->get_options([](const CLI::Option*) { return true; })) {
        const std::string type = option->get_type_name(), name = option->get_name();
        const bool after_colon = type == "DATA" || type == "STEP:DIR", url = type == "URL";
        if (!after_colon && !url && type != "FILE" && type != "DIR" && option->nonpositional()) continue;
        const bool result = std::ranges::find(kResults, name) != kResults.end();
        const std::vector<std::string>& given = option->results();
        for (const std::string& text : given.empty() ? std::vector{option->get_default_str()} : given) {
          const std::string path = text.substr(url           ? 7 * text.starts_with("file://")
                                               : after_colon ? text.find(':') + 1
                                                             : 0);
          const std::string problem =
              (result && path == "-") || (url && path == text) ? "" : path_problem(path);
          if (!problem.empty()) throw BadInput(name + ": " + problem);
          if (!after_colon) files.push_back({name, path, result || name == "--members"});
        }
      }
      check_all_different(files);
    });
  }
}

// Checks a size in bytes: a number, with or without a unit. kb_is_1000: K is 1000 and KiB is 1024. Otherwise
// K and KiB are 1024. CLI11's validator accepts -1 as 2^64 - 1.
inline CLI::Validator size_value(bool kb_is_1000) {
  const CLI::AsSizeValue units(kb_is_1000);
  return CLI::Validator(
      [units](std::string& text) {
        const std::string given = text;
        const bool number = !text.empty() && text[0] >= '0' && text[0] <= '9';
        if (number && units(text).empty()) return std::string();
        return "'" + given + "' is not a size: write bytes, or a number with a unit, such as 500M or 8GiB";
      },
      "");
}

// --optimizer dion:... and muon...: optimizers of the layers' matrices. AdamW updates the other tensors.

// Returns whether --optimizer's text names one of these optimizers.
bool is_matrix_optimizer(const std::string& text);
// The forms of the texts, for messages: "dion:rank=R[,...] or muon[:...]".
inline constexpr const char* kMatrixOptimizers =
    "dion:rank=R[,mu=X][,orth=on|off][,lr=X] or muon[:mu=X][,lr=X]";

// Applies --optimizer's text to the run's settings and to the compressions. `automatic`: --compression is
// auto. Throws BadInput for an unknown option or a compression that does not fit.
void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions);

// Throws BadInput if Muon and a flag that divides or defers the update are combined.
void check_muon(const TrainConfig& config);

}  // namespace gradwire
