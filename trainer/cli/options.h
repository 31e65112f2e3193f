// What the command line says, and how it becomes a TrainConfig.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/cli/launcher.h"
#include "trainer/config/config.h"
#include "trainer/data/dataset.h"

namespace gradwire {

enum class DeviceChoice : uint8_t { automatic, host, cuda };
enum class PeakMeasurement : uint8_t { automatic, on, off };

// Flags as given, each within its range (trainer/cli/flags.cpp); what was not given is empty and gets its
// default in resolve().
struct Options {
  std::string model = "vit_tiny";
  std::optional<int32_t> image_size, patch, width, depth, heads, mlp;
  Gelu gelu = Gelu::exact;
  std::string data = "fashion-mnist", augment = "none";
  std::optional<int> ranks;
  std::optional<Launch> launch;  // how this process was started, if by a launcher
  std::string rendezvous;        // empty: the launcher's
  bool insecure = false, verify_payload = false;
  std::string interface;  // to listen on; empty: GRADWIRE_INTERFACE
  PortRange ports;        // to listen at; {}: GRADWIRE_PORTS
  std::optional<std::string> elastic;  // MIN:MAX
  ElasticBatch elastic_batch = ElasticBatch::keep_global;
  std::string members;  // for ranks that join later; empty: in the folder of checkpoints, if there is one
  std::string join;     // this process joins a run whose `members` this is
  std::optional<int> ranks_per_node;  // default: what the launcher says of this machine
  DeviceChoice device = DeviceChoice::automatic;
  std::vector<std::string> compression;  // train: one at most; compare: one run each
  std::vector<double> bucket_mb;         // train: one at most; compare: one run each
  std::string preset;                    // compare: a list of specs, before those of `compression`
  int seeds = 1;                         // compare: runs of each, with seeds from `seed` up
  bool again = false;                    // compare: repeats runs that are there already
  bool gradient_views = true;
  bool overlap_forward = false;
  std::optional<int64_t> gradient_group;
  Sharding shard = Sharding::none;
  std::string gather_weights = "fp32";
  uint64_t memory_limit = 0;
  bool graph = false;
  int64_t batch_size = 64, accumulate = 1;
  std::optional<double> epochs;
  std::optional<int64_t> steps;
  OptimizerKind optimizer = OptimizerKind::adamw;
  Precision precision = Precision::fp32;
  std::optional<double> lr, weight_decay, momentum;
  std::optional<int64_t> warmup;
  uint64_t seed = 0;
  double timeout_s = 60;
  int64_t eval_every = 1, eval_batch_size = 250;
  std::string log, json;
  std::string trace;
  std::optional<std::string> trace_steps, profile_steps;
  std::string init, checkpoint, resume;
  std::optional<std::string> dump_gradients;  // STEP:DIR
  std::optional<int64_t> checkpoint_every;    // default: an epoch
  std::optional<int> checkpoint_keep;
  PeakMeasurement measure_peak = PeakMeasurement::automatic;
  int64_t log_every = 1;
  bool dry_run = false;
};

constexpr double kDefaultEpochs = 3;
constexpr double kDefaultBucketMb = 25;

struct Resolved {
  TrainConfig config;  // compression and bucket_mb are the first
  std::vector<CompressionSpec> compressions;
  std::vector<double> buckets_mb;
  DataSplits data;
  std::string device_line;         // which device, how many ranks, and why
  std::vector<std::string> notes;  // what else the user should know
};

// What concerns the machine and the model alone: ranks, devices, model, compression, precision. Throws
// BadInput.
Resolved resolve_machine(const Options& options);

// Joins the other processes, if this is one of several; null otherwise.
JoinOptions join_options(const Options& options);
std::unique_ptr<Communicator> join(const Options& options, const TrainConfig& config);

// Checks everything that can be checked without running, and loads the data. Throws BadInput.
Resolved resolve(const Options& options);

}  // namespace gradwire
