#include "trainer/cli/flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <limits>

#include "runtime/util/parse.h"
#include "trainer/cli/values.h"
#include "trainer/model/vit_passes.h"

namespace gradwire {
namespace {

template <typename T>
struct ValueOf {
  using Type = T;
};
template <typename T>
struct ValueOf<std::optional<T>> {
  using Type = T;
};

template <typename T>
struct Limits {
  T least = std::numeric_limits<T>::lowest(), most = std::numeric_limits<T>::max();
};

// CLI11 by itself reads "" as 0 and 010 as octal, and wraps -1 into an unsigned.
template <typename T>
CLI::Validator number_within(Limits<T> limits) {
  const std::string range =
      limits.least == Limits<T>{}.least ? "" : fmt::format(" from {} to {}", limits.least, limits.most);
  const char* kind = std::is_floating_point_v<T> ? "a number" : "a whole number";
  return CLI::Validator(
      [=](std::string& text) {
        return parse_number(text, limits.least, limits.most)
                   ? ""
                   : fmt::format("'{}' is not {}{}", text, kind, range);
      },
      range.empty() ? "" : range.substr(1));
}

// Adds a flag with a number. `target`: a number or an optional number.
template <typename Target>
CLI::Option* add_number(CLI::App& command, const std::string& flag, Target& target, const std::string& about,
                        Limits<typename ValueOf<Target>::Type> limits = {}) {
  using T = typename ValueOf<Target>::Type;
  auto set = [&target](const std::string& text) { target = *parse_number<T>(text); };
  CLI::Option* option = command.add_option_function<std::string>(flag, set, about)
                            ->type_name(std::is_floating_point_v<T> ? "NUMBER" : "N")
                            ->check(number_within<T>(limits));
  if constexpr (std::is_same_v<T, Target>) option->default_str(fmt::format("{}", target));
  return option;
}

template <typename T>
CLI::Option* add_choice(CLI::App& command, const std::string& flag, T& target,
                        const std::vector<std::pair<std::string, T>>& choices, const std::string& about) {
  std::vector<std::string> words;
  std::string preset;
  for (const auto& [word, value] : choices) {
    words.push_back(word);
    if (value == target) preset = word;
  }
  auto set = [&target, choices](const std::string& text) {
    for (const auto& [word, value] : choices) {
      if (text == word) target = value;
    }
  };
  return command.add_option_function<std::string>(flag, set, about)
      ->type_name("WORD")
      ->default_str(preset)
      ->check(CLI::IsMember(words));
}

template <typename Target>
CLI::Option* add_text(CLI::App& command, const std::string& flag, Target& target, const std::string& type,
                      const std::string& about) {
  auto set = [&target](const std::string& text) { target = text; };
  CLI::Option* option = command.add_option_function<std::string>(flag, set, about)->type_name(type);
  if constexpr (std::is_same_v<Target, std::string>) option->default_str(target);
  return option;
}

template <typename Target>
CLI::Option* add_path(CLI::App& command, const std::string& flag, Target& target, const std::string& type,
                      const std::string& about) {
  return add_text(command, flag, target, type, about)->check(path_value());
}

constexpr Limits<int64_t> kBatches{1, 1 << 20}, kSteps{1, 1'000'000'000};

void add_model_flags(CLI::App& command, Options& o) {
  const char* group = "Model";
  add_text(command, "--model", o.model, "WORD",
           "vit_tiny, vit_s_16, vit_b_16, vit_b_32, vit_l_16 or vit_l_32")
      ->group(group);
  add_number(command, "--image-size", o.image_size, "Side of the square images")->group(group);
  add_number(command, "--patch", o.patch, "Side of a patch; divides the image size")->group(group);
  add_number(command, "--width", o.width, "Width of the encoder")->group(group);
  add_number(command, "--depth", o.depth, "Encoder layers")->group(group);
  add_number(command, "--heads", o.heads, "Attention heads; divide the width")->group(group);
  add_number(command, "--mlp", o.mlp, "Width of the MLP's hidden layer")->group(group);
  add_choice<Gelu>(
      command, "--gelu", o.gelu, {{"exact", Gelu::exact}, {"tanh", Gelu::tanh}},
      "GELU by erf, as in torchvision, or its tanh approximation, which CUDA computes inside products")
      ->group(group);
  add_number(command, "--batch-size", o.batch_size, "Images per rank and batch", kBatches)->group("Training");
  add_choice<Precision>(
      command, "--precision", o.precision,
      {{"fp32", Precision::fp32}, {"tf32", Precision::tf32}, {"bf16", Precision::bf16}},
      "Of the model's products: fp32, tf32 (CUDA's tensor cores on FP32 operands), or bf16\n"
      "(operands stored as BF16; weights, gradients and the residual stream stay FP32)")
      ->group("Training");
}

void add_rank_flags(CLI::App& command, Options& o) {
  const char* group = "Ranks";
  add_number(command, "--ranks", o.ranks,
             "Ranks in this process, a thread each (default: 1; under torchrun, srun or mpirun each process "
             "is one rank)",
             {1, 1024})
      ->group(group);
  add_text(command, "--rendezvous", o.rendezvous, "URL",
           "Where processes meet: tcp://HOST:PORT, rank 0's, or file:///PATH, shared by all (default: what "
           "the launcher says, or MASTER_ADDR and MASTER_PORT)")
      ->check(path_value("file://"))
      ->group(group);
  add_number(
      command, "--ranks-per-node", o.ranks_per_node,
      "Ranks of a node, for schedule=hierarchical: rank = node x N + local (default: what the launcher "
      "says)",
      {1, 1024})
      ->group(group);
  add_choice<DeviceChoice>(
      command, "--device", o.device,
      {{"auto", DeviceChoice::automatic}, {"host", DeviceChoice::host}, {"cuda", DeviceChoice::cuda}},
      "What the ranks run on")
      ->group(group);
  add_number(command, "--timeout-s", o.timeout_s, "How long a rank waits for a peer before all give up",
             {0.001, 1e6})
      ->group(group);
}

void add_data_flags(CLI::App& command, Options& o) {
  const char* group = "Data";
  add_text(command, "--data", o.data, "DATA", "fashion-mnist[:DIR], cifar10:DIR or synthetic[:N]")
      ->check(path_value(":"))
      ->group(group);
  add_text(
      command, "--augment", o.augment, "WORDS",
      "none, flip, crop (from a border of an eighth of the side) or flip,crop: of training images, drawn "
      "from the seed")
      ->group(group);
}

void add_training_flags(CLI::App& command, Options& o) {
  const char* group = "Training";
  add_number(command, "--accumulate", o.accumulate, "Batches per step, gradients averaged", kBatches)
      ->group(group);
  CLI::Option* epochs =
      add_number(command, "--epochs", o.epochs,
                 fmt::format("Passes over the training set (default: {})", kDefaultEpochs), {1e-6, 1e6})
          ->group(group);
  add_number(command, "--steps", o.steps, "Optimizer steps, instead of --epochs", kSteps)
      ->excludes(epochs)
      ->group(group);
  add_choice<OptimizerKind>(command, "--optimizer", o.optimizer,
                            {{"sgd", OptimizerKind::sgd}, {"adamw", OptimizerKind::adamw}}, "The optimizer")
      ->group(group);
  add_number(command, "--lr", o.lr, "Peak learning rate (default: 1e-3 for adamw, 0.05 for sgd)", {0, 1e6})
      ->group(group);
  add_number(command, "--warmup", o.warmup,
             "Steps of linear warm-up, before a cosine to 0 (default: a tenth of the run, at most an epoch)",
             {0, kSteps.most})
      ->group(group);
  add_number(command, "--momentum", o.momentum, "Of sgd (default: 0.9)", {0, 1})->group(group);
  add_number(command, "--weight-decay", o.weight_decay, "Default: 0.01 for adamw, 0 for sgd", {0, 1e6})
      ->group(group);
  command
      .add_flag("--graph", o.graph,
                "Capture the step once, launch it as a graph from then on (a CUDA graph, or on the host a "
                "recorded program); the same bits")
      ->group(group);
  add_number(command, "--seed", o.seed, "Of weights, shuffling and rounding",
             {0, std::numeric_limits<uint64_t>::max()})
      ->group(group);
  add_number(command, "--eval-every", o.eval_every, "Epochs between evaluations; 0: never", {0, 1'000'000})
      ->group(group);
}

void add_output_flags(CLI::App& command, Options& o) {
  const char* group = "Output";
  add_number(command, "--log-every", o.log_every, "Off a terminal: steps between lines", kSteps)
      ->group(group);
  CLI::Option* trace =
      add_path(command, "--trace", o.trace, "FILE",
               "Write what each rank's streams did, and when, for ui.perfetto.dev or bench/plots/plot.py")
          ->group(group);
  add_text(command, "--trace-steps", o.trace_steps, "A:B",
           "Trace steps A up to, but without, B, counted from 0 (default: ten steps after the first five)")
      ->needs(trace)
      ->group(group);
  add_text(command, "--profile-steps", o.profile_steps, "A:B",
           "CUDA: let a profiler see steps A up to, but without, B (docs/training.md has nsys's flags)")
      ->group(group);
  command
      .add_flag("--dry-run", o.dry_run,
                "Check everything, print the resolved configuration and the memory it takes, do not train")
      ->group(group);
}

// Adds the flags that train and compare share. Returns --init.
CLI::Option* add_run_flags(CLI::App& command, Options& o) {
  add_model_flags(command, o);
  add_rank_flags(command, o);
  command
      .add_flag("--overlap-forward", o.overlap_forward,
                "Begin the next forward while gradients are still in transfer, and update each layer's "
                "weights just "
                "before it uses them; same results")
      ->group("Ranks");
  add_number(command, "--gradient-group", o.gradient_group,
             "Layers whose weight gradients GPUs compute, and send, together: fewer and larger launches, but "
             "an exchange begins later (default: 2)",
             {1, GradientGroups::kMost})
      ->group("Ranks");
  add_data_flags(command, o);
  add_training_flags(command, o);
  add_output_flags(command, o);
  return add_path(command, "--init", o.init, "FILE",
                  "Start from these weights: safetensors, with torchvision's names")
      ->group("Checkpoints");
}

void add_elastic_flags(CLI::App& command, Options& o) {
  CLI::Option* elastic = add_text(command, "--elastic", o.elastic, "MIN:MAX",
                                  "Go on without ranks (processes on the host) that die or stop answering, "
                                  "as long as MIN are left; the "
                                  "step that broke is done again. MAX: how many there may be")
                             ->group("Ranks");
  add_choice<ElasticBatch>(
      command, "--elastic-batch", o.elastic_batch,
      {{"keep-global", ElasticBatch::keep_global}, {"keep-local", ElasticBatch::keep_local}},
      "With fewer ranks: keep-global, as many images per step, divided among those left; keep-local, as many "
      "per rank, "
      "and a learning rate smaller by as much as the step")
      ->needs(elastic)
      ->group("Ranks");
  CLI::Option* members =
      add_path(command, "--members", o.members, "FILE",
               "Keep in this file where the run's ranks are, so that new ones can join (default: members, in "
               "the folder of --checkpoint)")
          ->needs(elastic)
          ->group("Ranks");
  add_path(
      command, "--join", o.join, "FILE",
      "Join a run that was started with --elastic and whose --members is FILE, between two of its steps; all "
      "other flags as in that run")
      ->needs(elastic)
      ->excludes(members)
      ->group("Ranks");
}

void add_checkpoint_flags(CLI::App& command, Options& o, CLI::Option* init) {
  const char* group = "Checkpoints";
  CLI::Option* checkpoint =
      add_path(command, "--checkpoint", o.checkpoint, "DIR",
               "Write checkpoints into this folder: weights, optimizer, residuals, factors, position")
          ->group(group);
  add_number(command, "--checkpoint-every", o.checkpoint_every,
             "Steps between checkpoints (default: an epoch); the last step always makes one", kSteps)
      ->needs(checkpoint)
      ->group(group);
  add_number(command, "--checkpoint-keep", o.checkpoint_keep, "How many of them stay (default: 3)",
             {1, 1'000'000})
      ->needs(checkpoint)
      ->group(group);
  add_path(command, "--resume", o.resume, "DIR",
           "Go on from the newest complete checkpoint there; with the same folder as --checkpoint a run that "
           "has none yet starts from the beginning")
      ->excludes(init)
      ->group(group);
}

void add_shard_flags(CLI::App& command, Options& o) {
  const char* group = "Ranks";
  add_choice<Sharding>(
      command, "--shard", o.shard,
      {{"none", Sharding::none},
       {"optimizer", Sharding::optimizer},
       {"gradients", Sharding::gradients},
       {"full", Sharding::full}},
      "What is divided among the ranks: optimizer (its moments; gradients are reduce-scattered, and "
      "each rank updates its part of the weights), gradients too (whole for three buckets only), or full "
      "(weights too, gathered as layers need them)")
      ->group(group);
  add_text(command, "--gather-weights", o.gather_weights, "FORMAT",
           "With --shard: the wire format in which ranks get each other's new weights (default: fp32)")
      ->group(group);
  command
      .add_option(
          "--memory-limit", o.memory_limit,
          "Refuse a run that needs more memory per rank: bytes, or 500M, 8G, 8GiB (default: no limit)")
      ->transform(size_value(true))
      ->type_name("SIZE")
      ->group(group);
}

// `several`: each flag may be given more than once.
void add_compression_flags(CLI::App& command, Options& o, bool several) {
  const char *spec = several ? "Compression spec; one run for each" : "Compression spec (default: fp32)",
             *size = several ? "Size of a gradient bucket, in MiB; one run for each size and --compression"
                             : "Size of a gradient bucket, in MiB; 0.5 is many, 100000 is one";
  const Limits<double> mb{0.001, 1 << 20};
  auto set = [&o](const std::vector<std::string>& texts) {
    o.bucket_mb.clear();
    for (const std::string& text : texts) o.bucket_mb.push_back(*parse_number<double>(text));
  };
  CLI::Option* compression =
      command.add_option("--compression", o.compression, spec)->type_name("SPEC")->group("Ranks");
  CLI::Option* bucket_mb = command.add_option_function<std::vector<std::string>>("--bucket-mb", set, size)
                               ->type_name("NUMBER")
                               ->default_str(fmt::format("{}", kDefaultBucketMb))
                               ->check(number_within<double>(mb))
                               ->group("Ranks");
  for (CLI::Option* option : {compression, bucket_mb}) {
    option->expected(1);
    if (several) option->take_all();
  }
}

}  // namespace

void add_train_flags(CLI::App& command, Options& o) {
  CLI::Option* init = add_run_flags(command, o);
  add_compression_flags(command, o, false);
  add_shard_flags(command, o);
  add_elastic_flags(command, o);
  add_checkpoint_flags(command, o, init);
  add_path(command, "--log", o.log, "FILE", "Write records to this file, one JSON object per line")
      ->group("Output");
  // The steps of a graph do not pass the host, which copies each gradient before it is sent.
  add_text(command, "--dump-gradients", o.dump_gradients, "STEP:DIR",
           "Write rank 0's own gradients of that step (counted from 0), before they are sent, to DIR: "
           "safetensors, for gradwire-bench formats --gradients DIR")
      ->check(path_value(":"))
      ->excludes(command.get_option("--graph"))
      ->group("Output");
}

void add_compare_flags(CLI::App& command, Options& o) {
  add_run_flags(command, o);
  add_compression_flags(command, o, true);
  command
      .add_option("--preset", o.preset,
                  "shelf: every wire format, nearest and stochastic, and PowerSGD; --compression adds to it")
      ->type_name("WORD")
      ->check(CLI::IsMember({"shelf"}))
      ->group("Ranks");
  add_number(command, "--seeds", o.seeds,
             "Run each so often, with --seed, --seed + 1, ...: the table has mean and standard deviation",
             {1, 1000})
      ->group("Training");
  add_path(
      command, "--json", o.json, "FILE",
      "Write the table to FILE, and each run's records next to it (FILE's stem.N.jsonl); skip runs whose "
      "records exist with the same settings")
      ->group("Output");
}

void add_top_flags(CLI::App& command, TopOptions& o) {
  command.add_option("RUN", o.log, "The run's log")->required()->check(path_value());
  command.add_flag(
      "--prometheus", o.prometheus,
      "Print the figures once as Prometheus's text format, for node_exporter's textfile collector");
}

void add_doctor_flags(CLI::App& command, Options& o, bool& show_environment) {
  add_model_flags(command, o);
  add_rank_flags(command, o);
  add_path(command, "--json", o.json, "FILE", "Write everything to FILE, too")->group("Output");
  command
      .add_flag("--environment", show_environment,
                "Show every environment variable that is read, its default and meaning, and nothing else")
      ->group("Output");
}

}  // namespace gradwire
