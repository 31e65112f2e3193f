// Everything that decides a training run, after defaults, named models and the data have been taken into
// account. The command line (trainer/cli) fills it; the training loop (trainer/train) only reads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/spec/spec.h"
#include "kernels/gemm/gemm.h"
#include "runtime/device.h"

namespace gradwire {

// A vision transformer with torchvision's architecture: images (channels, image, image), square patches.
struct VitConfig {
  std::string name = "vit_tiny";
  int32_t image = 28, channels = 1, patch = 7;
  int32_t width = 64, depth = 4, heads = 4, mlp = 256;
  int32_t classes = 10;

  int32_t grid() const { return image / patch; }
  int32_t tokens() const { return grid() * grid() + 1; }  // patches and the class token
  int32_t head_dim() const { return width / heads; }
  bool operator==(const VitConfig&) const = default;
};

// Throws BadInput that lists the known names.
VitConfig named_model(const std::string& name);
std::vector<std::string> model_names();
// Throws BadInput unless image % patch == 0, width % heads == 0 and everything is positive and of sane size.
void check_model(const VitConfig& model);
// Number of parameters, from the formula (the model counts its own; a test holds the two together).
int64_t parameter_count(const VitConfig& model);

// fashion-mnist[:DIR] | cifar10:DIR | synthetic[:N]
struct DataSpec {
  enum class Kind : uint8_t { fashion_mnist, cifar10, synthetic };
  Kind kind = Kind::fashion_mnist;
  std::string directory;  // empty: the default place of fashion-mnist
  int64_t count = 0;      // synthetic: training images; 0 means as many as make sense

  static DataSpec parse(const std::string& text);  // throws BadInput
  std::string to_string() const;
  bool operator==(const DataSpec&) const = default;
};

// none | flip | crop | flip,crop: what happens to training images on their way in (trainer/data/augment.h).
struct Augmentation {
  bool flip = false, crop = false;

  bool any() const { return flip || crop; }
  static Augmentation parse(const std::string& text);  // throws BadInput
  std::string to_string() const;
  bool operator==(const Augmentation&) const = default;
};

// Steps [begin, end), counted from 0 as the log does. Empty: none.
struct StepRange {
  int64_t begin = 0, end = 0;

  // "a:b". Throws BadInput that names `flag`.
  static StepRange parse(const std::string& flag, const std::string& text);
  std::string to_string() const;
  bool empty() const { return begin >= end; }
  bool operator==(const StepRange&) const = default;
};

enum class OptimizerKind : uint8_t { sgd, adamw };

struct TrainConfig {
  VitConfig model;
  DataSpec data;
  Augmentation augment;

  std::vector<Device> devices;  // of each rank; several ranks may share one
  bool processes = false;       // each rank is a process of its own; otherwise a thread of this one
  int ranks_per_node = 0;       // for hierarchical schedules; 0: what the launcher says, if all ranks agree
  int ranks_here = 0;           // of this machine, as the launcher says; 0: it does not
  int ranks() const { return static_cast<int>(devices.size()); }

  CompressionSpec compression;
  double bucket_mb = 25;       // MiB
  bool gradient_views = true;  // gradients are written into the buckets; otherwise copied in and out
  int64_t bucket_bytes() const { return static_cast<int64_t>(bucket_mb * (1 << 20)); }

  int64_t batch_size = 64;  // images per rank and micro-batch
  int64_t accumulate = 1;   // micro-batches per optimizer step; gradients are averaged over them
  int64_t steps = 0;        // optimizer steps of the whole run; always > 0 once resolved
  double epochs = 0;        // the same in passes over the training set, for display

  OptimizerKind optimizer = OptimizerKind::adamw;
  double lr = 1e-3;  // peak: linear warm-up from 0 over warmup_steps, then half a cosine down to 0 at `steps`
  int64_t warmup_steps = 0;
  double momentum = 0.9;                          // sgd
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // adamw
  double weight_decay = 0.0;
  Precision precision = Precision::fp32;
  bool graph = false;  // the step is captured once and launched as a graph from then on; the same bits
  uint64_t seed = 0;   // of weights, shuffling, augmentation and stochastic rounding

  int64_t eval_every =
      1;  // epochs between evaluations on the whole test set; the last step always evaluates. 0: never
  int64_t eval_batch_size = 250;  // images per rank; does not change the result beyond summation order

  std::string init;                  // a file of weights to start from; empty: drawn from the seed
  std::string checkpoint_directory;  // empty: no checkpoints
  int64_t checkpoint_every = 0;      // optimizer steps; the last step always makes one
  int checkpoint_keep = 3;           // how many stay
  std::string resume;                // the checkpoint to go on from; empty: from the beginning

  bool measure_peak = false;  // of product and copy, before the first step (measure/peaks.h)

  std::string trace;        // the file for a trace; empty: none
  StepRange trace_steps;    // which steps it shows
  StepRange profile_steps;  // between cudaProfilerStart and cudaProfilerStop

  double timeout_s = 60;  // how long a rank waits for a peer in one operation

  // Images that one optimizer step takes, over all ranks.
  int64_t global_batch() const { return batch_size * accumulate * ranks(); }
};

const char* name(OptimizerKind kind);
const char* name(Precision precision);

}  // namespace gradwire
