// The resolved settings of a training run, with defaults, named models and the data applied. The command line
// (trainer/cli) fills it; the training loop (trainer/train) only reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/spec/spec.h"
#include "collectives/transport/emulated_link.h"
#include "kernels/gemm/gemm.h"
#include "kernels/math/gelu.h"
#include "runtime/device/device.h"

namespace gradwire {

// A vision transformer with torchvision's architecture: images (channels, image, image), square patches.
struct VitConfig {
  std::string name = "vit_tiny";
  int32_t image = 28, channels = 1, patch = 7;
  int32_t width = 64, depth = 4, heads = 4, mlp = 256;
  int32_t classes = 10;
  Gelu gelu = Gelu::exact;  // the MLPs' form of GELU; torchvision uses the exact form

  int32_t grid() const { return image / patch; }
  int32_t tokens() const { return grid() * grid() + 1; }  // patches and the class token
  int32_t head_dim() const { return width / heads; }
  bool operator==(const VitConfig&) const = default;
};

// Returns a model by name. Throws BadInput, which lists the known names, for an unknown name.
VitConfig named_model(const std::string& name);
std::vector<std::string> model_names();
// Throws BadInput unless image % patch == 0, width % heads == 0 and every size is within its limits.
void check_model(const VitConfig& model);

// The value of --data.
inline constexpr const char* kDataGrammar = "fashion-mnist[:DIR], cifar10:DIR, arrays:DIR or synthetic[:N]";
struct DataSpec {
  enum class Kind : uint8_t { fashion_mnist, cifar10, arrays, synthetic };
  Kind kind = Kind::fashion_mnist;
  std::string directory;  // if empty, the default folder of fashion-mnist
  int64_t count = 0;      // synthetic: training images; 0: chosen from the image size (load_data())

  static DataSpec parse(const std::string& text);  // throws BadInput
  std::string to_string() const;
  bool operator==(const DataSpec&) const = default;
};

// The augmentation of training images: none | flip | crop | flip,crop (trainer/data/loader.h).
struct Augmentation {
  bool flip = false, crop = false;

  bool any() const { return flip || crop; }
  static Augmentation parse(const std::string& text);  // throws BadInput
  std::string to_string() const;
  bool operator==(const Augmentation&) const = default;
};

// Steps [begin, end), counted from 0 as in the log.
struct StepRange {
  int64_t begin = 0, end = 0;

  // Parses "a:b". Throws BadInput, which names `flag`.
  static StepRange parse(const std::string& flag, const std::string& text);
  std::string to_string() const;
  bool empty() const { return begin >= end; }
  bool operator==(const StepRange&) const = default;
};

enum class OptimizerKind : uint8_t { sgd, adamw };

// The quantity that stays constant when ranks are lost: images per step over all ranks, or images per rank.
enum class ElasticBatch : uint8_t { keep_global, keep_local };

// The world sizes MIN:MAX with which a run continues.
struct ElasticRange {
  int least = 0, most = 0;  // if 0, the run ends when the first rank fails

  explicit operator bool() const { return least > 0; }
  static ElasticRange parse(const std::string& text);  // throws BadInput
  std::string to_string() const;
  bool operator==(const ElasticRange&) const = default;
};

// The text of --compression auto.
inline constexpr const char* kAutoGrammar = "auto[:error=E][,replan=off][,plan=FILE][,allow=SPEC+SPEC...]";

constexpr double kDefaultEpochs = 3;
constexpr int64_t kDefaultBucketMb = 25, kDefaultGradientGroup = 2, kMaxLayersInGroup = 8;
constexpr int kDefaultCheckpoints = 3;
constexpr int kComparedRanks = 4;  // the default of compare: a single rank sends nothing

struct TrainConfig {
  VitConfig model;
  DataSpec data;
  Augmentation augment;

  std::vector<Device> devices;  // each rank's device; several ranks may share a device
  bool processes = false;       // one process per rank; otherwise ranks are threads of this process
  int ranks_per_node = 0;       // for hierarchical schedules; 0: the launcher's value, if all ranks agree
  int ranks_here = 0;           // ranks on this machine, from the launcher; 0: unknown
  EmulatedLink link = {};       // if set, the ranks' messages pass through emulated links
  int ranks() const { return static_cast<int>(devices.size()); }
  ElasticRange elastic;  // if set, the run continues when ranks die (trainer/train/elastic.h)
  ElasticBatch elastic_batch = ElasticBatch::keep_global;
  // --elastic: the file through which joiners find the run (trainer/config/config.h). If empty, no rank can
  // join.
  std::string members;

  CompressionSpec compression;
  double bucket_mb = kDefaultBucketMb;  // MiB
  bool shard_optimizer = false;         // --shard optimizer: each rank updates a part of the weights
  Wire gather_weights = kFp32;          // --shard: the format in which ranks exchange updated weights
  // Returns whether the ranks divide the optimizer's state. A single rank divides nothing.
  bool divides_optimizer() const { return shard_optimizer && ranks() > 1; }
  int64_t memory_limit = 0;  // bytes per rank; a run that needs more memory is rejected. 0: no limit
  // The next forward begins while gradients are in transfer; the bits do not change.
  bool overlap_forward = false;
  int64_t gradient_group =
      kDefaultGradientGroup;  // layers whose gradients CUDA ranks compute and send together
  int64_t bucket_bytes() const { return static_cast<int64_t>(bucket_mb * (1 << 20)); }

  int64_t batch_size = 64;  // images per rank and micro-batch; the maximum over ranks if they differ
  // Images per micro-batch over all ranks after losses (ElasticBatch::keep_global). 0: batch_size per rank.
  int64_t shared_batch = 0;
  int64_t accumulate = 1;  // micro-batches per optimizer step; gradients are averaged over them
  int64_t steps = 0;       // optimizer steps of the whole run; > 0 once resolved
  double epochs = 0;       // steps as passes over the training set, for display

  OptimizerKind optimizer = OptimizerKind::adamw;
  double lr = 1e-3;  // peak (trainer/train/optimizer_state.h)
  // Dion, if that is the compression's method, updates the matrices at this peak rate; AdamW updates the
  // rest.
  double dion_lr = 0.01;
  // Muon updates the matrices from the mean gradient, at the peak rate dion_lr; AdamW updates the rest.
  bool muon = false;
  double muon_mu = 0.95;
  bool uses_dion() const { return compression.method == CompressionSpec::Method::dion; }
  int64_t warmup_steps = 0;
  double momentum = 0.9;                          // sgd
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adamw
  double weight_decay = 0.0;
  Precision precision = Precision::fp32;
  bool graph = false;  // capture the step once, then launch the graph; the bits do not change
  uint64_t seed = 0;   // seed of weights, shuffling, augmentation and stochastic rounding

  double eval_every = 1;          // epochs between evaluations; also after the last step. 0: never
  int64_t eval_batch_size = 250;  // images per rank; affects only the order of summation

  std::string init;                           // file of initial weights; empty: drawn from the seed
  std::string checkpoint_directory;           // empty: no checkpoints
  int64_t checkpoint_every = 0;               // optimizer steps between checkpoints; also after the last step
  int checkpoint_keep = kDefaultCheckpoints;  // older checkpoints are removed
  bool ends_diverged = false;                 // compare: the run ends soon after its loss is not finite
  std::string resume;                         // checkpoint to resume from; empty: start from scratch

  bool measure_peak = false;  // measure product and copy speed before the first step (measure/peaks.h)

  std::string gradients_directory;  // folder for rank 0's gradients of one step; empty: none
  int64_t gradients_step = -1;      // the step whose gradients are written

  std::string trace;               // trace file; empty: none
  StepRange trace_steps;           // steps in the trace
  std::vector<std::string> flags;  // of the command line, with which train --like repeats the run
  bool profiles = false;           // CUDA's profiler covers the same steps

  double timeout_s = 60;  // maximum wait for a peer in one operation

  // Return the images over all ranks: per micro-batch, and per optimizer step.
  int64_t micro_batch() const { return shared_batch > 0 ? shared_batch : batch_size * ranks(); }
  int64_t global_batch() const { return micro_batch() * accumulate; }
};

const char* name(OptimizerKind kind);
const char* name(ElasticBatch batch);
const char* name(Precision precision);
const char* name(Gelu gelu);

// The file of --members, which rank 0 writes. Processes that join a running job (--join) read the ranks'
// addresses from this file.

// Returns the text of a members file. `launched`: the world size at launch. `invitation`: the text of
// Transport::invitation().
std::string members_text(int launched, const std::string& invitation);

struct Members {
  int launched = 0;
  std::string invitation = {};
};
// Reads a members file. Throws BadInput if the file cannot be read or is not a members file.
Members read_members(const std::string& path);

}  // namespace gradwire
