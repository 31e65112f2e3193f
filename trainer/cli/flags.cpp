#include "trainer/cli/flags.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <limits>
#include <optional>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/model/vit_passes.h"
#include "trainer/train/weight_shards.h"

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
  T least, most;
};

// Parses a number strictly. CLI11's parser reads "" as 0 and 010 as octal, and wraps -1 to an unsigned
// number.
template <typename T>
CLI::Validator number_within(Limits<T> limits) {
  const std::string range = fmt::format(" from {} to {}", limits.least, limits.most);
  const char* kind = std::is_floating_point_v<T> ? "a number" : "a whole number";
  return CLI::Validator(
      [=](std::string& text) {
        return parse_number(text, limits.least, limits.most)
                   ? ""
                   : fmt::format("'{}' is not {}{}", text, kind, range);
      },
      range.substr(1));
}

// Adds a flag with a number. `target`: a number or an optional number.
template <typename Target>
CLI::Option* add_number(CLI::App& command, const std::string& flag, Target& target, const std::string& about,
                        Limits<typename ValueOf<Target>::Type> limits) {
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

// Sets the group of the flags that are added afterwards.
void set_group(CLI::App& command, const char* group) {
  command.option_defaults()->group(group);
}

// Shown by --help, and by train without flags.
constexpr const char* kTrainExamples =
    "Examples:\n"
    "  gradwire train --model vit_tiny --data fashion-mnist --ranks 4 --compression powersgd:rank=4\n"
    "  gradwire train --data synthetic --steps 100 --ranks 2 --compression int8 --log run.jsonl\n"
    "  gradwire train --checkpoint run --resume run    # the same command continues after an interruption";

constexpr Limits<int64_t> kBatches{1, 1 << 20}, kSteps{1, 1'000'000'000};

constexpr const char* kModels = "vit_tiny, vit_s_16, vit_b_16, vit_b_32, vit_l_16 or vit_l_32";

void add_model_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Model");
  add_text(command, "--model", o.model, "MODEL", kModels);
  add_number(command, "--image-size", o.image_size, "Side of the square images", {1, VitLimits::image});
  add_number(command, "--patch", o.patch, "Side of a patch; divides the image size", {1, VitLimits::patch});
  add_number(command, "--width", o.width, "Width of the encoder", {1, VitLimits::width});
  add_number(command, "--depth", o.depth, "Encoder layers", {1, VitLimits::depth});
  add_number(command, "--heads", o.heads, "Attention heads; divide the width", {1, VitLimits::heads});
  add_number(command, "--mlp", o.mlp, "Width of the MLP's hidden layer", {1, VitLimits::mlp});
  add_choice<Gelu>(
      command, "--gelu", o.gelu, {{"exact", Gelu::exact}, {"tanh", Gelu::tanh}},
      "GELU by erf, as in torchvision, or its tanh approximation, which CUDA computes inside products");
  set_group(command, "Training");
  add_number(command, "--batch-size", o.batch_size, "Images per rank and batch", kBatches);
  add_choice<Precision>(
      command, "--precision", o.precision,
      {{"fp32", Precision::fp32}, {"tf32", Precision::tf32}, {"bf16", Precision::bf16}},
      "Precision of the model's products: fp32, tf32 (CUDA's tensor cores on FP32 operands), or bf16\n"
      "(operands stored as BF16; weights, gradients and the residual stream stay FP32)");
}

void add_rank_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Ranks");
  add_number(command, "--ranks", o.ranks,
             "Ranks in this process, a thread each (default: 1; under torchrun, srun or mpirun each process "
             "is one rank)",
             {1, 1024});
  add_text(command, "--rendezvous", o.rendezvous, "URL",
           "Rendezvous of processes: tcp://HOST:PORT of rank 0, or file:///PATH, shared by all (default: the "
           "launcher's, or MASTER_ADDR and MASTER_PORT)");
  add_number(command, "--ranks-per-node", o.ranks_per_node,
             "Ranks of a node, for schedule=hierarchical: rank = node x N + local (default: the launcher's)",
             {1, 1024});
  add_text(command, "--link", o.link, "RATE[,DELAY[,BURST]][,then=RATE@TIME]",
           "Emulate a slow link for each rank on the host, such as 100Mbit or 1Gbit,20ms. BURST: bytes that "
           "pass at once after a pause, such as 128KiB (default: none)");
  add_choice<DeviceChoice>(
      command, "--device", o.device,
      {{"auto", DeviceChoice::automatic}, {"host", DeviceChoice::host}, {"cuda", DeviceChoice::cuda}},
      "Device of the ranks");
  add_number(command, "--timeout-s", o.timeout_s,
             "Time for which a rank waits for a peer before all ranks stop", {0.001, 1e6});
}

void add_data_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Data");
  add_text(command, "--data", o.data, "DATA", "fashion-mnist[:DIR], cifar10:DIR or synthetic[:N]");
  add_text(command, "--augment", o.augment, "WORDS",
           "Augmentation of training images, drawn from the seed: none, flip, crop (with padding of an "
           "eighth of the side) or flip,crop");
}

void add_optimizer(CLI::App& command, RunOptions& o) {
  const auto check = [](const std::string& text) -> std::string {
    if (text == "sgd" || text == "adamw" || is_matrix_optimizer(text)) return {};
    return fmt::format("'{}' is not one of sgd, adamw, {}", text, kMatrixOptimizers);
  };
  const auto set = [&o](const std::string& text) {
    o.optimizer = text == "sgd" ? OptimizerKind::sgd : OptimizerKind::adamw;
    o.matrix_optimizer = is_matrix_optimizer(text) ? text : "";
  };
  command
      .add_option_function<std::string>(
          "--optimizer", set,
          fmt::format(
              "sgd, adamw, {}: Dion, whose factors travel in the format of --compression, or Muon for "
              "the layers' matrices, and adamw for the rest (default: mu=0.95,lr=0.01)",
              kMatrixOptimizers))
      ->type_name("WORD")
      ->default_str("adamw")
      ->check(CLI::Validator(check, "{sgd,adamw,dion:rank=64,muon}"));
}

void add_training_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Training");
  add_number(command, "--accumulate", o.accumulate, "Batches per step, gradients averaged", kBatches);
  CLI::Option* epochs =
      add_number(command, "--epochs", o.epochs,
                 fmt::format("Passes over the training set (default: {})", kDefaultEpochs), {1e-6, 1e6});
  add_number(command, "--steps", o.steps, "Optimizer steps, instead of --epochs", kSteps)->excludes(epochs);
  add_optimizer(command, o);
  add_number(command, "--lr", o.lr, "Peak learning rate (default: 1e-3 for adamw, 0.05 for sgd)", {0, 1e6});
  add_number(command, "--warmup", o.warmup,
             "Steps of linear warm-up, before a cosine to 0 (default: a tenth of the run, at most an epoch)",
             {0, kSteps.most});
  add_number(command, "--momentum", o.momentum, "Momentum of sgd, beta1 of adamw (default: 0.9)", {0, 1});
  add_number(command, "--weight-decay", o.weight_decay, "Weight decay (default: 0.01 for adamw, 0 for sgd)",
             {0, 1e6});
  command.add_flag(
      "--graph", o.graph,
      "Capture the step once and launch it as a graph afterwards (a CUDA graph, or on the host a recorded "
      "program); same results");
  add_number(command, "--seed", o.seed, "Seed of weights, shuffling and rounding",
             {0, std::numeric_limits<uint64_t>::max()});
  add_number(command, "--eval-every", o.eval_every, "Epochs between evaluations, such as 0.25; 0: never",
             {0, 1e6});
}

void add_output_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Output");
  add_number(command, "--log-every", o.log_every, "Steps between log lines when output is not a terminal",
             kSteps);
  add_text(command, "--trace", o.trace, "FILE",
           "Write a timeline of each rank's streams, for ui.perfetto.dev or bench/plots/plot.py");
  add_text(
      command, "--trace-steps", o.trace_steps, "A:B",
      "Steps A to B - 1, counted from 0, for --trace and, on CUDA, a profiler (docs/training.md has nsys's "
      "flags; default: ten steps after the first five)");
  command.add_flag("--dry-run", o.dry_run,
                   "Check all settings, print the resolved configuration and the required memory, and exit");
}

// Adds the flags that train and compare share. Returns --init.
CLI::Option* add_run_flags(CLI::App& command, RunOptions& o) {
  add_model_flags(command, o);
  add_rank_flags(command, o);
  set_group(command, "Ranks");
  command.add_flag("--overlap-forward", o.overlap_forward,
                   "Begin the next forward while gradients are still in transfer, and update each layer's "
                   "weights just before it uses them; same results");
  add_number(command, "--gradient-group", o.gradient_group,
             "Layers whose weight gradients GPUs compute and send together: fewer and larger launches, but "
             "exchanges begin later (default: 2)",
             {1, GradientGroups::kMost});
  add_data_flags(command, o);
  add_training_flags(command, o);
  add_output_flags(command, o);
  set_group(command, "Checkpoints");
  return add_text(command, "--init", o.init, "FILE",
                  "Start from these weights: safetensors, with torchvision's names");
}

void add_elastic_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Ranks");
  CLI::Option* elastic =
      add_text(command, "--elastic", o.elastic, "MIN:MAX[,keep-local]",
               "Continue when ranks (processes on the host) die or hang, down to MIN ranks; the interrupted "
               "step is repeated. MAX: maximum number of ranks. With fewer ranks, the images per step stay; "
               "with keep-local, the images per rank, and the learning rate is scaled with the images per "
               "step");
  CLI::Option* members =
      add_text(command, "--members", o.members, "FILE",
               "Write the addresses of the run's ranks to this file, so that new ranks can join (default: "
               "members, in the folder of --checkpoint)")
          ->needs(elastic);
  add_text(
      command, "--join", o.join, "FILE",
      "Join a run that was started with --elastic and whose --members is FILE, between two of its steps; all "
      "other flags as in that run")
      ->needs(elastic)
      ->excludes(members);
}

void add_checkpoint_flags(CLI::App& command, RunOptions& o, CLI::Option* init) {
  set_group(command, "Checkpoints");
  CLI::Option* checkpoint =
      add_text(command, "--checkpoint", o.checkpoint, "DIR",
               "Write checkpoints into this folder: weights, optimizer, residuals, factors, position");
  add_number(command, "--checkpoint-every", o.checkpoint_every,
             "Steps between checkpoints (default: an epoch); the last step always makes one", kSteps)
      ->needs(checkpoint);
  add_number(command, "--checkpoint-keep", o.checkpoint_keep, "Checkpoints to keep (default: 3)",
             {1, 1'000'000})
      ->needs(checkpoint);
  add_text(command, "--resume", o.resume, "DIR",
           "Continue from the newest complete checkpoint in DIR; if DIR is also --checkpoint and contains no "
           "checkpoint, start from the beginning")
      ->excludes(init);
}

void add_shard_flags(CLI::App& command, RunOptions& o) {
  set_group(command, "Ranks");
  add_choice<bool>(
      command, "--shard", o.shard_optimizer, {{"none", false}, {"optimizer", true}},
      "State to divide among the ranks: optimizer (its moments; gradients are reduce-scattered, and each "
      "rank updates its part of the weights)");
  add_text(command, "--gather-weights", o.gather_weights, "FORMAT",
           "With --shard: wire format in which ranks exchange new weights (default: fp32)");
  command
      .add_option(
          "--memory-limit", o.memory_limit,
          "Reject a run that needs more memory per rank: bytes, or 500M, 8G, 8GiB (default: no limit)")
      ->transform(size_value(true))
      ->type_name("SIZE");
}

// Adds the flags that select compressions. `several`: the user may give each flag more than once; describes
// what --compression takes. `Options`: RunOptions or PlanOptions.
template <typename Options>
void add_compression_flags(CLI::App& command, Options& o, const char* several) {
  const std::string spec = several != nullptr
                               ? several
                               : "Compression spec (default: fp32), or " + AutoCompression::grammar() +
                                     ": measure links, kernels and errors before the first step, and "
                                     "choose the spec and bucket size of the shortest step whose error of "
                                     "one encode is at most E (default: 0.1)";
  const char* size = several != nullptr
                         ? "Size of a gradient bucket, in MiB; one run for each size and --compression"
                         : "Size of a gradient bucket, in MiB; 0.5 is many, 100000 is one";
  const Limits<double> mb{0.001, 1 << 20};
  auto set = [&o](const std::vector<std::string>& texts) {
    o.bucket_mb.clear();
    for (const std::string& text : texts) o.bucket_mb.push_back(*parse_number<double>(text));
  };
  set_group(command, "Ranks");
  CLI::Option* compression = command.add_option("--compression", o.compression, spec)->type_name("SPEC");
  CLI::Option* bucket_mb = command.add_option_function<std::vector<std::string>>("--bucket-mb", set, size)
                               ->type_name("NUMBER")
                               ->default_str(fmt::format("{}", kDefaultBucketMb))
                               ->check(number_within<double>(mb));
  for (CLI::Option* option : {compression, bucket_mb}) {
    option->expected(1);
    if (several != nullptr) option->take_all();
  }
}

}  // namespace

void add_train_flags(CLI::App& command, RunOptions& o) {
  command.footer(kTrainExamples);
  CLI::Option* init = add_run_flags(command, o);
  add_compression_flags(command, o, nullptr);
  add_shard_flags(command, o);
  add_elastic_flags(command, o);
  add_checkpoint_flags(command, o, init);
  set_group(command, "Output");
  add_text(command, "--log", o.log, "FILE", "Write records to this file, one JSON object per line");
  // A graph's steps run without the host, so the host cannot copy each gradient before communication.
  add_text(command, "--dump-gradients", o.dump_gradients, "STEP:DIR",
           "Write rank 0's gradients of that step (counted from 0), before they are sent, to DIR: "
           "safetensors, for gradwire-bench formats --gradients DIR")
      ->excludes(command.get_option("--graph"));
}

void add_compare_flags(CLI::App& command, RunOptions& o) {
  add_run_flags(command, o);
  add_compression_flags(
      command, o,
      "Compression spec; one run for each. shelf: every wire format, and PowerSGD and random-k "
      "with a few options");
  set_group(command, "Training");
  add_number(command, "--seeds", o.seeds,
             "Repeat each run with --seed, --seed + 1, ...: the table has mean and standard deviation",
             {1, 1000});
  set_group(command, "Output");
  add_number(command, "--target-accuracy", o.target_accuracy,
             "Percentage: the table has the training time of each run until an evaluation reached it",
             {0, 100});
  add_text(
      command, "--json", o.json, "FILE",
      "Write the table to FILE, and each run's records next to it (FILE's stem.N.jsonl); skip runs whose "
      "records exist with the same settings");
}

void add_top_flags(CLI::App& command, TopOptions& o) {
  command.add_option("RUN", o.log, "The run's log")->required();
  command.add_flag(
      "--prometheus", o.prometheus,
      "Print the figures once in Prometheus's text format, for node_exporter's textfile collector");
}

void add_report_flags(CLI::App& command, ReportOptions& o) {
  command
      .add_option("FILE", o.files,
                  "Results of compare --json, whose logs are next to them; logs of train --log; results of "
                  "gradwire-bench --json")
      ->type_name("")
      ->required();
  add_text(command, "-o,--output", o.output, "FILE", "The page, one file that needs no network");
}

void add_export_flags(CLI::App& command, ExportOptions& o) {
  command.add_option("LOG", o.logs, "Logs of train --log")->type_name("")->required();
  add_text(command, "--tensorboard", o.tensorboard, "DIR",
           "Write TensorBoard's event files into DIR, a folder for each log")
      ->required();
}

void add_doctor_flags(CLI::App& command, RunOptions& o, bool& show_environment) {
  add_model_flags(command, o);
  add_rank_flags(command, o);
  set_group(command, "Output");
  add_text(command, "--json", o.json, "FILE", "Also write the report to FILE");
  command.add_flag("--environment", show_environment,
                   "Show every environment variable that Gradwire reads, with default and meaning, and exit");
}

void add_plan_flags(CLI::App& command, PlanOptions& o) {
  set_group(command, "Model");
  add_text(command, "--model", o.model, "MODEL", kModels);
  add_number(command, "--batch-size", o.batch_size, "Images per rank", kBatches);
  set_group(command, "Ranks");
  add_text(command, "--cluster", o.cluster, "FILE", "The cluster: a JSON file, see docs/plan.md")->required();
  add_number(command, "--ranks", o.ranks, "Ranks, a GPU each, which fill whole nodes", {1, 1 << 16})
      ->required();
  add_compression_flags(command, o, "Compression spec; one prediction for each");
  set_group(command, "Output");
  add_text(command, "--json", o.json, "FILE", "Also write the plan to FILE");
}

namespace {

// Removes the option `key` from a text such as "dion:rank=8,lr=0.1". Returns its value, if the text has it.
std::optional<double> take_number(std::string& text, const std::string& key, double most) {
  size_t at = text.find("," + key + "=");
  if (at == std::string::npos) at = text.find(":" + key + "=");
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + key.size() + 2, end = std::min(text.find(',', begin), text.size());
  const auto value = parse_number(std::string_view(text).substr(begin, end - begin), 0.0, most);
  if (!value)
    throw BadInput(fmt::format("--optimizer {}: {}= is not a number from 0 to {:g}", text, key, most));
  const bool others = end < text.size();
  text = text.substr(0, at) + (others ? text[at] + text.substr(end + 1) : "");
  return value;
}

// Returns the spec of Dion's codec, whose factors travel in the format of `wire`. The embedding of patches
// and the classifier are dense, because Dion is for the matrices between them.
CompressionSpec with_dion(const CompressionSpec& codec, CompressionSpec wire) {
  if (wire.method != CompressionSpec::Method::wire || wire.policy != ResidualPolicy()) {
    throw BadInput(
        fmt::format("--optimizer dion: its factors need a wire format with plain error feedback, not "
                    "--compression {}; use a format such as int8",
                    wire.to_string()));
  }
  wire.method = codec.method, wire.rank = codec.rank, wire.mu = codec.mu, wire.orth = codec.orth;
  for (const char* name : kOuterMatrices) wire.dense.emplace_back(name);
  std::sort(wire.dense.begin(), wire.dense.end());
  wire.dense.erase(std::unique(wire.dense.begin(), wire.dense.end()), wire.dense.end());
  return wire;
}

void resolve_dion(const std::string& text, const std::string& rest, bool automatic,
                  std::vector<CompressionSpec>& compressions) {
  if (automatic) {
    throw BadInput(
        "--compression auto and --optimizer dion cannot be combined: the factors' format is not predicted; "
        "name a spec, such as int8");
  }
  const CompressionSpec codec = CompressionSpec::parse(rest);
  CompressionSpec known;
  known.method = codec.method, known.rank = codec.rank, known.mu = codec.mu, known.orth = codec.orth;
  if (!(codec == known))
    throw BadInput("--optimizer " + text +
                   ": dion takes rank=, mu=, orth= and lr=; give the other options to --compression");
  for (CompressionSpec& spec : compressions) spec = with_dion(codec, spec);
}

}  // namespace

bool is_matrix_optimizer(const std::string& text) {
  return text.starts_with("dion:") || text == "muon" || text.starts_with("muon:");
}

void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions) {
  std::string rest = text;
  const bool muon = text.starts_with("muon");
  config.dion_lr = take_number(rest, "lr", 1e6).value_or(config.dion_lr);
  if (config.lr == 0) throw BadInput("--lr 0: with --optimizer " + text + " it must be more than 0");
  if (!muon) return resolve_dion(text, rest, automatic, compressions);
  config.muon = true;
  config.muon_mu = take_number(rest, "mu", 1).value_or(config.muon_mu);
  if (rest != "muon") throw BadInput("--optimizer " + text + ": muon takes mu= and lr=; drop the rest");
}

void check_muon(const TrainConfig& config) {
  const char* flag = config.shard_optimizer   ? "--shard"
                     : config.overlap_forward ? "--overlap-forward"
                                              : nullptr;
  if (!config.muon || flag == nullptr) return;
  throw BadInput(fmt::format(
      "--optimizer muon needs whole matrices on every rank at the end of the step; drop {}, or use dion",
      flag));
}

}  // namespace gradwire
