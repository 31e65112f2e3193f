#include "trainer/cli/cli.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>

#include "collectives/communicator/communicator.h"
#include "runtime/environment.h"
#include "runtime/error.h"
#include "trainer/cli/doctor.h"
#include "trainer/cli/launcher.h"
#include "trainer/cli/options.h"
#include "trainer/config/run.h"
#include "trainer/log/console.h"
#include "trainer/log/run_log.h"
#include "trainer/log/summary.h"
#include "trainer/measure/products.h"
#include "trainer/train/memory.h"

namespace gradwire {
namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2;

// One line, whatever the text was made of.
int report(const char* text, int code) {
  std::string line = text;
  for (char& c : line) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  std::fflush(stdout);
  std::fprintf(stderr, "gradwire: %s\n", line.c_str());
  return code;
}

std::string shown(double value) {
  return fmt::format("{:g}", value);
}

// A number must be a number as a whole, and fit: CLI11 takes "" for 0 and wraps -1 into an unsigned.
template <typename T>
T parse_number(const std::string& flag, const std::string& text) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    const char* kind = std::is_floating_point_v<T> ? "a number"
                       : std::is_signed_v<T>       ? "a whole number"
                                                   : "a whole number from 0";
    throw BadInput(flag + " '" + text + "' is not " + kind +
                   (error == std::errc::result_out_of_range ? " in range" : ""));
  }
  return value;
}

template <typename T>
CLI::Option* add_number(CLI::App& command, const std::string& flag, T& target, const std::string& about) {
  auto set = [flag, &target](const std::string& text) { target = parse_number<T>(flag, text); };
  return command.add_option_function<std::string>(flag, set, about)
      ->type_name(std::is_floating_point_v<T> ? "NUMBER" : "N")
      ->default_str(shown(static_cast<double>(target)));
}

template <typename T>
CLI::Option* add_number(CLI::App& command, const std::string& flag, std::optional<T>& target,
                        const std::string& about) {
  auto set = [flag, &target](const std::string& text) { target = parse_number<T>(flag, text); };
  return command.add_option_function<std::string>(flag, set, about)
      ->type_name(std::is_floating_point_v<T> ? "NUMBER" : "N");
}

CLI::Option* add_word(CLI::App& command, const std::string& flag, std::string& target,
                      const std::string& about) {
  CLI::Option* option = command.add_option(flag, target, about)->type_name("WORD");
  return target.empty() ? option : option->default_str(target);
}

CLI::Option* add_path(CLI::App& command, const std::string& flag, std::string& target,
                      const std::string& type, const std::string& about) {
  return command.add_option(flag, target, about)->type_name(type);
}

void add_checkpoint_options(CLI::App& command, Options& o) {
  const char* group = "Checkpoints";
  add_path(command, "--checkpoint", o.checkpoint, "DIR",
           "Write checkpoints into this folder: weights, optimizer, residuals, factors, position")
      ->group(group);
  add_number(command, "--checkpoint-every", o.checkpoint_every,
             "Steps between checkpoints (default: an epoch); the last step always makes one")
      ->group(group);
  add_number(command, "--checkpoint-keep", o.checkpoint_keep, "How many of them stay (default: 3)")
      ->group(group);
  add_path(
      command, "--resume", o.resume, "DIR",
      "Go on from the newest complete checkpoint there; with the same folder as --checkpoint a run that has "
      "none yet starts from the beginning")
      ->group(group);
}

void add_model_options(CLI::App& command, Options& o) {
  add_word(command, "--model", o.model, "vit_tiny, vit_s_16, vit_b_16, vit_b_32, vit_l_16 or vit_l_32")
      ->group("Model");
  add_number(command, "--image-size", o.image_size, "Side of the square images")->group("Model");
  add_number(command, "--patch", o.patch, "Side of a patch; divides the image size")->group("Model");
  add_number(command, "--width", o.width, "Width of the encoder")->group("Model");
  add_number(command, "--depth", o.depth, "Encoder layers")->group("Model");
  add_number(command, "--heads", o.heads, "Attention heads; divide the width")->group("Model");
  add_number(command, "--mlp", o.mlp, "Width of the MLP's hidden layer")->group("Model");
  add_number(command, "--batch-size", o.batch_size, "Images per rank and batch")->group("Training");
}

void add_rank_options(CLI::App& command, Options& o) {
  add_number(
      command, "--ranks", o.ranks,
      "Ranks in this process, a thread each (default: 1; under torchrun, srun or mpirun each process is "
      "one rank)")
      ->group("Ranks");
  add_word(
      command, "--rendezvous", o.rendezvous,
      "Where processes meet: tcp://HOST:PORT, rank 0's, or file:///PATH, shared by all (default: what the "
      "launcher says, or MASTER_ADDR and MASTER_PORT)")
      ->group("Ranks");
  add_number(
      command, "--ranks-per-node", o.ranks_per_node,
      "Ranks of a node, for schedule=hierarchical: rank = node x N + local (default: what the launcher says)")
      ->group("Ranks");
  add_word(command, "--device", o.device, "auto, host or cuda")->group("Ranks");
  add_number(command, "--timeout-s", o.timeout_s, "How long a rank waits for a peer before all give up")
      ->group("Ranks");
}

void add_run_options(CLI::App& command, Options& o) {
  add_model_options(command, o);
  add_rank_options(command, o);
  add_word(command, "--data", o.data, "fashion-mnist[:DIR], cifar10:DIR or synthetic[:N]")->group("Data");
  add_word(
      command, "--augment", o.augment,
      "none, flip, crop (from a border of an eighth of the side) or flip,crop: of training images, drawn "
      "from the seed")
      ->group("Data");
  add_word(command, "--gradient-views", o.gradient_views,
           "on: backward writes gradients into the buckets; off: memory of their own, copied in and out")
      ->group("Ranks");
  add_number(command, "--accumulate", o.accumulate, "Batches per step, gradients averaged")
      ->group("Training");
  add_number(command, "--epochs", o.epochs,
             "Passes over the training set (default: " + shown(kDefaultEpochs) + ")")
      ->group("Training");
  add_number(command, "--steps", o.steps, "Optimizer steps, instead of --epochs")->group("Training");
  add_word(command, "--optimizer", o.optimizer, "sgd or adamw")->group("Training");
  add_number(command, "--lr", o.lr, "Peak learning rate (default: 1e-3 for adamw, 0.05 for sgd)")
      ->group("Training");
  add_number(command, "--warmup", o.warmup,
             "Steps of linear warm-up, before a cosine to 0 (default: a tenth of the run, at most an epoch)")
      ->group("Training");
  add_number(command, "--momentum", o.momentum, "Of sgd (default: 0.9)")->group("Training");
  add_number(command, "--weight-decay", o.weight_decay, "Default: 0.01 for adamw, 0 for sgd")
      ->group("Training");
  command
      .add_flag("--graph", o.graph,
                "Capture the step once, launch it as a graph from then on (a CUDA graph, or on the host a "
                "recorded program); the same bits")
      ->group("Training");
  add_word(command, "--precision", o.precision,
           "Of the model's products: fp32, tf32 (CUDA's tensor cores on FP32 operands), or bf16\n"
           "(operands stored as BF16; weights, gradients and the residual stream stay FP32)")
      ->group("Training");
  add_number(command, "--seed", o.seed, "Of weights, shuffling and rounding")->group("Training");
  add_number(command, "--eval-every", o.eval_every, "Epochs between evaluations; 0: never")
      ->group("Training");
  add_number(command, "--eval-batch-size", o.eval_batch_size, "Images per rank in evaluation")
      ->group("Training");
  add_path(command, "--init", o.init, "FILE",
           "Start from these weights: safetensors, with torchvision's names")
      ->group("Checkpoints");
  add_word(command, "--measure-peak", o.measure_peak,
           "on, off or auto: measure first what products and copies the device can do at best, which takes "
           "0.2 s; auto: unless the run is short")
      ->group("Output");
  add_number(command, "--log-every", o.log_every, "Off a terminal: steps between lines")->group("Output");
  add_path(command, "--trace", o.trace, "FILE",
           "Write what each rank's streams did, and when, for ui.perfetto.dev or bench/plots/plot.py")
      ->group("Output");
  auto add_range = [&](const std::string& flag, std::optional<std::string>& target,
                       const std::string& about) {
    command
        .add_option_function<std::string>(
            flag, [&target](const std::string& text) { target = text; }, about)
        ->type_name("A:B")
        ->group("Output");
  };
  add_range("--trace-steps", o.trace_steps,
            "Trace steps A up to, but without, B, counted from 0 (default: ten steps after the first five)");
  add_range("--profile-steps", o.profile_steps,
            "CUDA: let a profiler see steps A up to, but without, B (docs/profiling.md has nsys's flags)");
  command
      .add_flag("--dry-run", o.dry_run,
                "Check everything, print the resolved configuration and the memory it takes, do not train")
      ->group("Output");
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// Of ranks that are processes only rank 0 speaks, but for errors.
bool leads(const Options& o) {
  return !o.launch || o.launch->rank == 0;
}

void say_start(const Resolved& run, const Options& o) {
  say(run.device_line);
  if (run.config.devices.front().is_host()) say("Products: " + host_products_text());
  if (o.launch) {
    std::string meeting = o.rendezvous.empty() ? o.launch->rendezvous : o.rendezvous;
    say("Launcher: " + o.launch->launcher + (o.launch->world == 1 ? " with one process" : "") + " (" +
        o.launch->variables + ")" +
        (o.launch->world > 1 && !meeting.empty() ? ", meeting at " + meeting : ""));
  }
  for (const std::string& note : run.notes) say(note);
  const Dataset& train = run.data.train;
  say(fmt::format("Data: {}, {} training and {} test images of {}x{}x{}", run.config.data.to_string(),
                  human_count(static_cast<double>(train.count())),
                  human_count(static_cast<double>(run.data.test.count())), train.channels, train.height,
                  train.width));
}

void say_plan(const TrainConfig& config) {
  say(config_text(config));
  say(memory_text(config, plan_memory(config)));
}

// Hands each record to several observers, in order.
class Fan final : public RunObserver {
 public:
  explicit Fan(std::vector<RunObserver*> observers) : observers_(std::move(observers)) {}
  void on_run(const RunInfo& info) override {
    for (auto* observer : observers_) observer->on_run(info);
  }
  void on_step(const StepRecord& step) override {
    for (auto* observer : observers_) observer->on_step(step);
  }
  void on_eval(const EvalRecord& eval) override {
    for (auto* observer : observers_) observer->on_eval(eval);
  }
  void on_checkpoint(const CheckpointRecord& checkpoint) override {
    for (auto* observer : observers_) observer->on_checkpoint(checkpoint);
  }

 private:
  std::vector<RunObserver*> observers_;
};

// With a communicator each process is a rank.
void train_rank(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                Communicator* comm) {
  if (comm == nullptr) {
    run_training(config, data, observer);
  } else {
    run_training(config, data, observer, *comm);
  }
}

RunSummary run_once(const Resolved& run, const TrainConfig& config, const std::string& log_path,
                    int64_t log_every, Communicator* comm) {
  Summarizer summarizer;
  std::unique_ptr<RunLog> log;
  std::vector<RunObserver*> observers;
  if (!log_path.empty()) {
    log = std::make_unique<RunLog>(log_path, config, run.data);
    observers.push_back(log.get());  // first: what a person sees is already safe in the file
  }
  observers.push_back(&summarizer);
  auto start = std::chrono::steady_clock::now();
  {
    Console console(config, {stdout, isatty(STDOUT_FILENO) == 1, log_every});
    observers.push_back(&console);
    Fan fan(observers);
    train_rank(config, run.data, fan, comm);
  }
  RunSummary summary =
      summarizer.summary(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (log) log->write_summary(summary);
  say(summary_line(summary));
  say(shares_text(summary));
  if (!config.trace.empty()) {
    say(fmt::format("Trace of steps {} to {}: {}", config.trace_steps.begin, config.trace_steps.end - 1,
                    config.trace));
  }
  return summary;
}

int train(const Options& options) {
  if (leads(options) && !options.log.empty()) check_writable(options.log);
  if (leads(options) && !options.trace.empty()) check_writable(options.trace);
  Resolved run = resolve(options);
  if (leads(options)) say_start(run, options);
  if (options.dry_run) {
    if (leads(options)) say_plan(run.config);
    return kDone;
  }
  std::unique_ptr<Communicator> comm = join(options, run.config);
  if (leads(options)) {
    run_once(run, run.config, options.log, options.log_every, comm.get());
  } else {
    RunObserver nobody;
    train_rank(run.config, run.data, nobody, comm.get());
  }
  return kDone;
}

// demo/compare.json -> demo/compare.2.jsonl
std::string path_of_run(const std::string& path, size_t index, const std::string& extension) {
  std::filesystem::path named = path;
  named.replace_extension(fmt::format("{}{}", index, extension));
  return named.string();
}
std::string run_log_path(const std::string& json_path, size_t index) {
  return path_of_run(json_path, index, ".jsonl");
}

// Run `index` of a comparison: each compression with each bucket size.
TrainConfig compared_config(const Resolved& run, size_t index) {
  TrainConfig config = run.config;
  config.compression = run.compressions[index / run.buckets_mb.size()];
  config.bucket_mb = run.buckets_mb[index % run.buckets_mb.size()];
  if (!config.trace.empty()) config.trace = path_of_run(config.trace, index, ".json");
  return config;
}

int compare(const Options& options) {
  Resolved run = resolve(options);
  const size_t count = run.compressions.size() * run.buckets_mb.size();
  if (!leads(options)) {
    if (options.dry_run) return kDone;
    std::unique_ptr<Communicator> comm = join(options, run.config);
    RunObserver nobody;
    for (size_t i = 0; i < count; ++i) {
      train_rank(compared_config(run, i), run.data, nobody, comm.get());
    }
    return kDone;
  }
  if (!options.json.empty()) {
    check_writable(options.json);
    for (size_t i = 0; i < count; ++i) check_writable(run_log_path(options.json, i));
  }
  for (size_t i = 0; i < count && !options.trace.empty(); ++i) {
    check_writable(compared_config(run, i).trace);
  }
  say_start(run, options);
  if (options.dry_run) {
    for (size_t i = 0; i < count; ++i) say_plan(compared_config(run, i));
    return kDone;
  }
  std::unique_ptr<Communicator> comm = join(options, run.config);
  std::vector<ComparedRun> runs;
  for (size_t i = 0; i < count; ++i) {
    const TrainConfig config = compared_config(run, i);
    say(fmt::format("\n[{}/{}] {}{}", i + 1, count, config.compression.to_string(),
                    run.buckets_mb.size() > 1 ? ", buckets of " + shown(config.bucket_mb) + " MiB" : ""));
    std::string log_path = options.json.empty() ? "" : run_log_path(options.json, i);
    RunSummary summary = run_once(run, config, log_path, options.log_every, comm.get());
    runs.push_back({config.compression.to_string(), summary, config.ranks(),
                    config.devices[0].is_host() ? "host" : "cuda", config.bucket_mb});
  }
  if (!options.json.empty()) write_file_atomically(options.json, compare_document(runs));
  say(fmt::format("\n{} on {}, {}{}, {} steps; steps and bytes are medians, bytes per rank\n",
                  run.config.model.name, run.config.data.to_string(), run.config.ranks(),
                  run.config.ranks() == 1 ? " rank" : " ranks", run.config.steps));
  say(compare_table(runs));
  return kDone;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app{
      "Trains vision transformers with compressed gradients, and shows what the compression cost and saved.",
      "gradwire"};
  app.set_version_flag("--version", "gradwire " GRADWIRE_VERSION);
  app.require_subcommand(1);

  Options options;
  std::string compression, bucket_mb;
  CLI::App* train_command = app.add_subcommand("train", "Train a model");
  add_run_options(*train_command, options);
  CLI::Option* given_compression =
      train_command->add_option("--compression", compression, "Compression spec (default: fp32)")
          ->type_name("SPEC")
          ->group("Ranks");
  CLI::Option* given_bucket_mb =
      train_command
          ->add_option("--bucket-mb", bucket_mb,
                       "Size of a gradient bucket, in MiB; 0.5 is many, 100000 is one")
          ->type_name("NUMBER")
          ->default_str(shown(kDefaultBucketMb))
          ->group("Ranks");
  add_checkpoint_options(*train_command, options);
  train_command->add_option("--log", options.log, "Write records to this file, one JSON object per line")
      ->type_name("FILE")
      ->group("Output");

  CLI::App* compare_command = app.add_subcommand(
      "compare", "Train once per --compression, everything else the same, and print one table");
  add_run_options(*compare_command, options);
  compare_command->add_option("--compression", options.compression, "Compression spec; one run for each")
      ->required()
      ->type_name("SPEC")
      ->expected(1)
      ->take_all()
      ->group("Ranks");
  std::vector<std::string> buckets_mb;
  compare_command
      ->add_option("--bucket-mb", buckets_mb,
                   "Size of a gradient bucket, in MiB; given more than once: one run for each --compression "
                   "and size")
      ->type_name("NUMBER")
      ->default_str(shown(kDefaultBucketMb))
      ->expected(1)
      ->take_all()
      ->group("Ranks");
  compare_command
      ->add_option("--json", options.json,
                   "Write the table to FILE, and each run's records next to it (FILE's stem.N.jsonl)")
      ->type_name("FILE")
      ->group("Output");

  CLI::App* doctor_command = app.add_subcommand("doctor",
                                                "Show devices, versions, and what is off and why; with "
                                                "several ranks measure their links, and say which "
                                                "compression would pay for --model");
  Options doctor_options = doctor_defaults();
  add_model_options(*doctor_command, doctor_options);
  add_rank_options(*doctor_command, doctor_options);
  add_word(*doctor_command, "--precision", doctor_options.precision, "As in train")->group("Training");
  doctor_command->add_option("--json", doctor_options.json, "Write everything to FILE, too")
      ->type_name("FILE")
      ->group("Output");

  bool show_environment = false;
  doctor_command
      ->add_flag("--environment", show_environment,
                 "Show every environment variable that is read, its default and meaning, and nothing else")
      ->group("Output");

  std::string first = argc > 1 ? argv[1] : "";
  if (!first.empty() && first[0] != '-' && first != "train" && first != "compare" && first != "doctor") {
    throw BadInput("unknown command '" + first + "'; there are train, compare and doctor");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    return report((std::string(error.what()) + "; see gradwire --help").c_str(), kBadInput);
  }
  if (doctor_command->parsed()) {
    if (show_environment) {
      std::fputs(environment_text().c_str(), stdout);
      return kDone;
    }
    doctor(doctor_options);
    return kDone;
  }
  options.launch = detect_launcher();
  if (!options.rendezvous.empty() && (!options.launch || options.launch->world == 1)) {
    throw BadInput(
        "--rendezvous " + options.rendezvous +
        ": nothing says that there are several processes; start them with torchrun, srun or mpirun, "
        "or set RANK and WORLD_SIZE for each");
  }
  if (options.launch) share_cores(*options.launch);
  for (const std::string& mb : buckets_mb)
    options.bucket_mb.push_back(parse_number<double>("--bucket-mb", mb));
  if (compare_command->parsed()) return compare(options);
  if (given_bucket_mb->count() > 0) options.bucket_mb = {parse_number<double>("--bucket-mb", bucket_mb)};
  if (given_compression->count() > 0) options.compression = {compression};
  return train(options);
}

}  // namespace

int cli_main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const BadInput& error) {
    return report(error.what(), kBadInput);
  } catch (const std::bad_alloc&) {
    return report("out of host memory", kFailed);
  } catch (const std::exception& error) {
    return report(error.what(), kFailed);
  }
}

}  // namespace gradwire
