// The options of the command line, and their conversion to a TrainConfig.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/cli/launcher.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"
#include "trainer/measure/auto_compression.h"

namespace gradwire {

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
  std::string matrix_optimizer;  // a text of matrix_optimizer.h; empty: another optimizer
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
