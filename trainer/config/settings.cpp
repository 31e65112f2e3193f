#include "trainer/config/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <type_traits>

namespace gradwire {
namespace {

using Config = TrainConfig;
using Options = RunOptions;
using Range = Setting::Values;
using enum Setting::Effect;

constexpr int kTrain = Setting::kTrain, kCompare = Setting::kCompare, kDoctor = Setting::kDoctor,
              kPlan = Setting::kPlan;
constexpr int kAll = kTrain | kCompare | kDoctor, kRuns = kTrain | kCompare;
constexpr double kNoLimit = std::numeric_limits<double>::infinity();
constexpr double kNotGiven = std::numeric_limits<double>::quiet_NaN();
constexpr double kMaxBatches = 1 << 20, kMaxSteps = 1e9;

// Returns a setting that follows from others.
Setting derived(const char* key, Setting::Effect effect) {
  return {0, "", {}, "", "", key, effect};
}

const Setting kCompression[] = {
    {kTrain, "--compression", &Options::specs, "SPEC",
     fmt::format(
         "What travels instead of FP32: a spec such as int8, int4:block=64 or powersgd:rank=4 (gradwire "
         "formats lists every spec; default: fp32), or {}: measure links, kernels and errors before the "
         "first step, and choose the spec and bucket size of the shortest step whose error of one "
         "encode is at most E (default: 0.1)",
         kAutoGrammar),
     "compression", bits},
    {kCompare, "--compression", &Options::specs, "SPEC",
     "Compression spec; repeat the flag: one run for each (gradwire formats lists every spec). shelf: every "
     "wire "
     "format, and PowerSGD and random-k with a few options"},
    {kPlan, "--compression", &Options::specs, "SPEC",
     "Compression spec; repeat the flag: one prediction for each (gradwire formats lists every spec)"},
    {kTrain, "--bucket-mb", &Options::buckets_mb, kBucketMb,
     "Size of a gradient bucket, in MiB; 0.5 is many, 100000 is one", "bucket_mb", bits},
    {kCompare | kPlan, "--bucket-mb", &Options::buckets_mb, kBucketMb,
     "Size of a gradient bucket, in MiB; one run for each size and --compression"},
    {kTrain, "--gather-weights", &Options::gather_text, "FORMAT",
     "With --shard: wire format in which ranks exchange new weights (default: fp32)", "gather_weights", bits},
};

const Setting kModel[] = {
    {kAll | kPlan, "--model", &VitConfig::name, "MODEL",
     "vit_tiny, vit_s_16, vit_b_16, vit_b_32, vit_l_16 or vit_l_32", "model.name", state},
    {kPlan, "--batch-size", &Config::batch_size, Range(1, kMaxBatches), "Images per rank"},
    {kAll, "--image-size", &VitConfig::image, Range(1, 4096), "Side of the square images", "model.image_size",
     state},
    {kAll, "--patch", &VitConfig::patch, Range(1, 4096), "Side of a patch; divides the image size",
     "model.patch", state},
    {kAll, "--width", &VitConfig::width, Range(1, 1 << 16), "Width of the encoder", "model.width", state},
    {kAll, "--depth", &VitConfig::depth, Range(1, 1024), "Encoder layers", "model.depth", state},
    {kAll, "--heads", &VitConfig::heads, Range(1, 1024), "Attention heads; divide the width", "model.heads",
     state},
    {kAll, "--mlp", &VitConfig::mlp, Range(1, 1 << 18), "Width of the MLP's hidden layer", "model.mlp",
     state},
    {kAll, "--gelu", &VitConfig::gelu, "exact|tanh",
     "GELU by erf, as in torchvision, or its tanh approximation, which CUDA computes inside products",
     "model.gelu", state},
    {0, "channels", &VitConfig::channels, Range(1, 1024), "", "model.channels", state},
    {0, "classes", &VitConfig::classes, Range(1, 1 << 24), "", "model.classes", state},
};

const Setting kTraining[] = {
    {kAll, "--batch-size", &Config::batch_size, Range(1, kMaxBatches), "Images per rank and batch",
     "batch_size", bits},
    derived("shared_batch", run),
    {kAll, "--precision", &Config::precision, "fp32|tf32|bf16",
     "Precision of the model's products: fp32, tf32 (CUDA's tensor cores on FP32 operands), or bf16 "
     "(operands stored as BF16; weights, gradients and the residual stream stay FP32)",
     "precision", bits},
    {kRuns, "--accumulate", &Config::accumulate, Range(1, kMaxBatches),
     "Batches per step, gradients averaged", "accumulate", bits},
    {kRuns, "--epochs", &Config::epochs, Range(1e-6, 1e6),
     fmt::format("Passes over the training set (default: {})", kDefaultEpochs), "epochs"},
    {kRuns, "--steps", &Config::steps, Range(1, kMaxSteps), "Optimizer steps, instead of --epochs", "steps",
     bits},
    {kRuns, "--optimizer", &Options::optimizer_text, "WORD",
     fmt::format("sgd, adamw, {}: Dion, whose factors travel in the format of --compression, or Muon for "
                 "the layers' matrices, and adamw for the rest (default: mu=0.95,lr=0.01)",
                 kMatrixOptimizers),
     "optimizer", state},
    {kRuns, "--lr", &Config::lr, Range(0, 1e6), "Peak learning rate (default: 1e-3 for adamw, 0.05 for sgd)",
     "lr", bits},
    derived("dion_lr", bits),
    derived("muon_lr", bits),
    derived("mu", bits),
    {kRuns, "--warmup", &Config::warmup_steps, Range(0, kMaxSteps),
     "Steps of linear warm-up, before a cosine to 0 (default: a tenth of the run, at most an epoch)",
     "warmup_steps", bits},
    // compare_with_head() also checks whether a momentum buffer exists.
    {kRuns, "--momentum", &Config::momentum, Range(0, 1), "Momentum of sgd, beta1 of adamw (default: 0.9)",
     "momentum", bits},
    derived("beta1", bits),
    derived("beta2", bits),
    derived("eps", bits),
    {kRuns, "--weight-decay", &Config::weight_decay, Range(0, 1e6),
     "Weight decay (default: 0.01 for adamw, 0 for sgd)", "weight_decay", bits},
    {kRuns, "--graph", &Config::graph, "",
     "Capture the step once and launch it as a graph afterwards (a CUDA graph, or on the host a recorded "
     "program); same results",
     "graph"},
    {kRuns, "--seed", &Config::seed, Range(0, kNoLimit), "Seed of weights, shuffling and rounding", "seed",
     bits},
    {kRuns, "--eval-every", &Config::eval_every, Range(0, 1e6),
     "Epochs between evaluations, such as 0.25; 0: never", "eval_every", run},
    {0, "", &Config::eval_batch_size, "", "", "eval_batch_size"},
    {kCompare, "--seeds", &Options::seeds, Range(1, 1000),
     "Repeat each run with --seed, --seed + 1, ...: the table has mean and standard deviation"},
};

const Setting kRanks[] = {
    {kPlan, "--cluster", &Options::cluster, "FILE",
     "The cluster: a JSON file (docs/plan.md), or a name such as h100-ib; an unknown name's error lists all"},
    {kPlan, "--ranks", &Options::rank_count, Range(1, 1 << 16), "Ranks, a GPU each, which fill whole nodes"},
    {kAll, "--ranks", &Options::rank_count, Range(1, 1024),
     "Ranks in this process, a thread each (default: 1; under torchrun, srun or mpirun each process is one "
     "rank)",
     "ranks", run},
    derived("ranks_are", run),
    {kAll, "--rendezvous", &Options::rendezvous, "URL",
     "Rendezvous of processes: tcp://HOST:PORT of rank 0, or file:///PATH, shared by all (default: the "
     "launcher's, or MASTER_ADDR and MASTER_PORT)"},
    {kAll, "--ranks-per-node", &Config::ranks_per_node, Range(1, 1024),
     "Ranks of a node, for schedule=hierarchical: rank = node x N + local (default: the launcher's)",
     "ranks_per_node"},
    {kAll, "--link", &Options::link_text, "RATE[,DELAY[,BURST]][,then=RATE@TIME]",
     "Emulate a slow link for each rank on the host, such as 100Mbit or 1Gbit,20ms. BURST: bytes that pass "
     "at once after a pause, such as 128KiB (default: none)",
     "link", run},
    {kAll, "--device", &Options::device, "auto|host|cuda", "Device of the ranks", "device", bits},
    derived("devices", run),
    {kAll, "--timeout-s", &Config::timeout_s, Range(0.001, 1e6),
     "Time for which a rank waits for a peer before all ranks stop", "timeout_s", none},
    {kRuns, "--overlap-forward", &Config::overlap_forward, "",
     "Begin the next forward while gradients are still in transfer, and update each layer's weights just "
     "before it uses them; same results",
     "overlap_forward"},
    {kRuns, "--gradient-group", &Config::gradient_group, Range(1, kMaxLayersInGroup),
     fmt::format("Layers whose weight gradients GPUs compute and send together: fewer and larger launches, "
                 "but exchanges begin later (default: {})",
                 kDefaultGradientGroup),
     "gradient_group"},
    // The effect depends on the compression: compare_with_head().
    {kTrain, "--shard", &Config::shard_optimizer, "none|optimizer",
     "State to divide among the ranks: optimizer (its moments; gradients are reduce-scattered, and each rank "
     "updates its part of the weights)",
     "shard"},
    {kTrain, "--memory-limit", &Config::memory_limit, "SIZE",
     "Reject a run that needs more memory per rank: bytes, or 500M, 8G, 8GiB (default: no limit)",
     "memory_limit", run},
    {kTrain, "--elastic", &Options::elastic_text, "MIN:MAX[,keep-local]",
     "Continue when ranks (processes on the host) die or hang, down to MIN ranks; the interrupted step is "
     "repeated. MAX: maximum number of ranks. With fewer ranks, the images per step stay; with keep-local, "
     "the images per rank, and the learning rate is scaled with the images per step",
     "elastic", run},
    derived("elastic_batch", run),
    {kTrain, "--members", &Config::members, "FILE",
     "Write the addresses of the run's ranks to this file, so that new ranks can join (default: members, in "
     "the folder of --checkpoint)"},
    {kTrain, "--join", &Options::join, "FILE",
     "Join a run that was started with --elastic and whose --members is FILE, between two of its steps; all "
     "other flags as in that run"},
};

const Setting kData[] = {
    {kRuns, "--data", &Options::data_text, "DATA", "fashion-mnist[:DIR], cifar10:DIR or synthetic[:N]",
     "data", bits},
    {kRuns, "--augment", &Options::augment_text, "WORDS",
     "Augmentation of training images, drawn from the seed: none, flip, crop (with padding of an eighth of "
     "the side) or flip,crop",
     "augment", bits},
};

const Setting kOutput[] = {
    {kRuns, "--log-every", &Options::log_every, Range(1, kMaxSteps),
     "Steps between log lines when output is not a terminal (default: a line every 5 s)"},
    {kRuns, "--trace", &Config::trace, "FILE",
     "Write a timeline of each rank's streams, for ui.perfetto.dev or bench/plots/plot.py", "trace", none},
    {kRuns, "--trace-steps", &Options::trace_text, "A:B",
     "Steps A to B - 1, counted from 0, for --trace and, on CUDA, a profiler (docs/training.md has nsys's "
     "flags; default: ten steps after the first five)",
     "trace_steps", none},
    {kRuns, "--dry-run", &Options::dry_run, "",
     "Check all settings, print the resolved configuration and the required memory, and exit"},
    {kTrain, "--log", &Options::log, "FILE", "Write records to this file, one JSON object per line"},
    {kTrain, "--dump-gradients", &Options::gradients_text, "STEP:DIR",
     "Write rank 0's gradients of that step (counted from 0), before they are sent, to DIR: safetensors, for "
     "gradwire-bench formats --gradients DIR",
     "dump_gradients", none},
    {kCompare, "--target-accuracy", &Options::target_accuracy, Range(0, 100),
     "Percentage: the table has the training time of each run until an evaluation reached it"},
    {kCompare, "--json", &Options::json, "FILE",
     "Write the table to FILE, and each run's records next to it (FILE's stem.N.jsonl); skip runs whose "
     "records exist with the same settings"},
    {kDoctor, "--json", &Options::json, "FILE", "Also write the report to FILE"},
    {kPlan, "--json", &Options::json, "FILE", "Also write the plan to FILE"},
    {kDoctor, "--environment", &Options::environment, "",
     "Show every environment variable that Gradwire reads, with default and meaning, and exit"},
};

const Setting kCheckpoints[] = {
    {kRuns, "--init", &Config::init, "FILE",
     "Start from these weights: safetensors, with torchvision's names", "init"},
    {kTrain, "--checkpoint", &Config::checkpoint_directory, "DIR",
     "Write checkpoints into this folder: weights, optimizer, residuals, factors, position", "checkpoint"},
    {kTrain, "--checkpoint-every", &Config::checkpoint_every, Range(1, kMaxSteps),
     "Steps between checkpoints (default: an epoch); the last step always makes one", "checkpoint_every"},
    {kTrain, "--checkpoint-keep", &Config::checkpoint_keep, Range(1, 1e6),
     fmt::format("Checkpoints to keep (default: {})", kDefaultCheckpoints), "checkpoint_keep"},
    {kTrain, "--resume", &Config::resume, "DIR",
     "Continue from the newest complete checkpoint in DIR; if DIR is also --checkpoint and contains no "
     "checkpoint, start from the beginning",
     "resume"},
};

// The keys of schema 1 in the order of the records. Other keys follow, in the order of the table.
constexpr std::string_view kOrder =
    " model.name model.image_size model.channels model.patch model.width model.depth model.heads "
    "model.mlp model.classes model.gelu data augment ranks ranks_per_node device devices ranks_are "
    "link elastic elastic_batch compression bucket_mb shard gather_weights memory_limit "
    "overlap_forward gradient_group batch_size shared_batch accumulate steps epochs optimizer lr "
    "dion_lr muon_lr mu warmup_steps momentum beta1 beta2 eps weight_decay precision graph seed "
    "eval_every eval_batch_size timeout_s init resume checkpoint checkpoint_every checkpoint_keep "
    "dump_gradients trace trace_steps ";

// Returns the values of keys that are not the value of a field. A discarded value leaves the key out.
Json computed_values(const Config& c) {
  const bool adamw = c.optimizer == OptimizerKind::adamw, dion = c.uses_dion();
  const auto only_if = [](bool condition, const Json& value) {
    return condition ? value : Json(Json::value_t::discarded);
  };
  Json json, devices = Json::array();
  for (Device device : c.devices) devices.push_back(device.name());
  // Readers take the exact form of GELU if the key is absent.
  json["model.gelu"] = only_if(c.model.gelu != Gelu::exact, name(c.model.gelu));
  json["data"] = c.data.to_string();
  json["augment"] = c.augment.to_string();
  json["ranks"] = c.ranks();
  json["ranks_are"] = c.processes ? "processes" : "threads";
  json["device"] = c.devices.empty() || c.devices[0].is_host() ? "host" : "cuda";
  json["devices"] = std::move(devices);
  json["link"] = only_if(static_cast<bool>(c.link), c.link.to_string());
  json["elastic"] = only_if(static_cast<bool>(c.elastic), c.elastic.to_string());
  json["elastic_batch"] = only_if(static_cast<bool>(c.elastic), name(c.elastic_batch));
  json["compression"] = c.compression.to_string();
  json["bucket_mb"] = shortest(c.bucket_mb);
  json["gather_weights"] = c.gather_weights->name;
  json["memory_limit"] = c.memory_limit == 0 ? Json(nullptr) : Json(c.memory_limit);
  json["shared_batch"] = only_if(c.shared_batch > 0, c.shared_batch);
  json["optimizer"] = dion ? "dion" : c.muon ? "muon" : name(c.optimizer);
  json["dion_lr"] = only_if(dion, c.dion_lr);
  json["muon_lr"] = only_if(c.muon, c.dion_lr);
  json["mu"] = only_if(c.muon, c.muon_mu);
  json["momentum"] = only_if(!adamw, c.momentum);
  json["beta1"] = only_if(adamw, c.beta1);
  json["beta2"] = only_if(adamw, c.beta2);
  json["eps"] = only_if(adamw, c.eps);
  json["eval_every"] = shortest(c.eval_every);
  json["dump_gradients"] = nullptr;
  if (!c.gradients_directory.empty())
    json["dump_gradients"] = fmt::format("{}:{}", c.gradients_step, c.gradients_directory);
  json["trace_steps"] = c.trace_steps.empty() ? Json(nullptr) : Json(c.trace_steps.to_string());
  return json;
}

// Returns word `index` of "none|optimizer".
std::string word(std::string_view words, size_t index) {
  for (; index > 0; --index) words.remove_prefix(words.find('|') + 1);
  return std::string(words.substr(0, words.find('|')));
}

}  // namespace

RunOptions::RunOptions() {
  for (const Setting& setting : kModel) {
    if (const auto* size = std::get_if<int32_t VitConfig::*>(&setting.field)) model.*(*size) = 0;
  }
  lr = weight_decay = momentum = kNotGiven;
  warmup_steps = -1;
  gradient_group = checkpoint_keep = 0;
}

std::span<const Setting> settings() {
  static const std::vector<Setting> kSettings = [] {
    std::vector<Setting> all;
    const auto add = [&](const char* group, std::span<const Setting> rows) {
      for (const Setting& row : rows) all.emplace_back(row).group = group;
    };
    add("Compression", kCompression);
    add("Model", kModel);
    add("Training", kTraining);
    add("Ranks", kRanks);
    add("Data", kData);
    add("Output", kOutput);
    add("Checkpoints", kCheckpoints);
    return all;
  }();
  return kSettings;
}

Json config_json(const TrainConfig& config) {
  static const std::vector<const Setting*> kKeys = [] {
    std::vector<const Setting*> all;
    for (const Setting& s : settings()) {
      if (s.key != nullptr) all.push_back(&s);
    }
    std::ranges::stable_sort(all, {},
                             [](const Setting* s) { return kOrder.find(fmt::format(" {} ", s->key)); });
    return all;
  }();
  Json json = Json::object(), computed = computed_values(config);
  for (const Setting* s : kKeys) {
    const auto json_of = [&](const auto& value) -> Json {
      using T = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::is_same_v<T, std::string>) {
        return value.empty() ? Json(nullptr) : Json(value);
      } else {
        const bool choice = std::is_enum_v<T> || (std::is_same_v<T, bool> && *s->values.words != '\0');
        return choice ? Json(word(s->values.words, static_cast<size_t>(value))) : Json(value);
      }
    };
    const auto json_at = [&](auto field) -> Json {
      if constexpr (std::is_invocable_v<decltype(field), VitConfig>) return json_of(config.model.*field);
      if constexpr (std::is_invocable_v<decltype(field), TrainConfig>) return json_of(config.*field);
      return Json::value_t::discarded;
    };
    const std::string key = s->key;
    Json value = computed.contains(key) ? computed[key] : std::visit(json_at, s->field);
    if (value.is_discarded()) continue;
    const size_t dot = key.find('.');
    (dot == std::string::npos ? json[key] : json[key.substr(0, dot)][key.substr(dot + 1)]) = std::move(value);
  }
  return json;
}

Json value_of(const Setting& setting, const Json& json) {
  const std::string key = setting.key;
  const size_t dot = key.find('.');
  const Json whole = json.value(key.substr(0, dot), Json());
  return dot == std::string::npos || !whole.is_object() ? whole : whole.value(key.substr(dot + 1), Json());
}

Json shortest(double value) {
  return value == std::floor(value) ? Json(static_cast<int64_t>(value)) : Json(value);
}

}  // namespace gradwire
