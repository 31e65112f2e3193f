// Resolves the options of a run: data, steps, checkpoints and traces. The settings of the machine come first
// (resolve_machine.cpp).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/cli/flags.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

// Least FLOPs of a run that measures the peak. The measurement takes 0.2 s, too long for a run with fewer
// FLOPs.
constexpr double kPeakRunFlops = 1e12;

// Returns the number of optimizer steps in an epoch. Throws BadInput if an epoch has no step.
int64_t steps_per_epoch(const TrainConfig& config, const Dataset& train) {
  int64_t per_rank = train.count() / config.ranks();
  int64_t wanted = config.batch_size * config.accumulate;
  if (wanted > per_rank) {
    std::string remedy = per_rank / config.accumulate < 1
                             ? "use fewer ranks or more images"
                             : fmt::format("use --batch-size {} or less", per_rank / config.accumulate);
    std::string accumulated =
        config.accumulate == 1 ? "" : fmt::format(" times --accumulate {}", config.accumulate);
    throw BadInput(fmt::format(
        "--batch-size {}{} is larger than a rank's part: the {} training images of {} are {} for each of {} "
        "ranks; {}",
        config.batch_size, accumulated, train.count(), train.name, per_rank, config.ranks(), remedy));
  }
  return train.count() / config.global_batch();
}

bool same_folder(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  return fs::weakly_canonical(a + "/", ignored) == fs::weakly_canonical(b + "/", ignored);
}

// Takes over the choice of --compression auto from a checkpoint. A choice for another number of ranks holds
// only until the run chooses. A spec with momentum holds to the end: other specs would add its state to a
// gradient.
void continue_choice(const RunOptions& o, const CheckpointHead& head, Resolved& out) {
  TrainConfig& config = out.config;
  config.compression = CompressionSpec::parse(head.compression);
  if (o.bucket_mb.empty()) config.bucket_mb = head.bucket_mb;
  using enum CompressionSpec::Method;
  const CompressionSpec& spec = config.compression;
  const bool replaceable =
      (spec.method == wire || spec.method == powersgd || spec.method == randk) && spec.policy.momentum == 0;
  out.chosen = head.world == config.ranks() || !replaceable;
  if (!out.chosen) return;
  out.compressions = {spec};
  check_schedules(out);
  check_policies(out);
  if (!replaceable) {
    out.automatic.reset();
    out.notes.push_back(fmt::format(
        "Note: --compression auto has no effect on a checkpoint of {}, whose state fits no other spec",
        head.compression));
  }
  out.notes.push_back(fmt::format("Continuing with the checkpoint's --compression {} --bucket-mb {}",
                                  head.compression, config.bucket_mb));
}

// Resolves --init, --checkpoint and --resume. Call after resolving all other options, because the checkpoint
// is compared with these options.
void resolve_checkpoints(const RunOptions& o, int64_t steps_per_epoch, Resolved& out) {
  TrainConfig& config = out.config;
  // A joiner gets its state from the other ranks, even if they started from a checkpoint.
  const bool joins = !o.join.empty();
  const bool continues =
      joins || (!o.resume.empty() && !o.checkpoint.empty() && same_folder(o.resume, o.checkpoint));
  if (!o.init.empty()) check_weights(o.init, config.model);
  config.init = o.init;
  if (!o.checkpoint.empty()) {
    check_output_directory("--checkpoint", o.checkpoint);
    if (!continues && holds_checkpoints(o.checkpoint)) {
      throw BadInput("--checkpoint " + o.checkpoint +
                     ": the folder already contains checkpoints; continue with --resume " + o.checkpoint +
                     ", or name another folder");
    }
    config.checkpoint_directory = o.checkpoint;
    if (config.elastic && config.members.empty()) config.members = o.checkpoint + "/members";
    config.checkpoint_every = o.checkpoint_every.value_or(steps_per_epoch);
    config.checkpoint_keep = o.checkpoint_keep.value_or(config.checkpoint_keep);
  }
  if (o.resume.empty() || joins) return;
  FoundCheckpoint found;
  // The same command starts a run and, after any interruption, continues it.
  if (std::error_code ignored; !continues || std::filesystem::exists(o.resume, ignored)) {
    found = find_checkpoint(o.resume);
  }
  out.notes.insert(out.notes.end(), found.ignored.begin(), found.ignored.end());
  if (!found.path) {
    if (!continues) {
      std::string why;
      for (const std::string& line : found.ignored) why += " (" + line + ")";
      throw BadInput("--resume " + o.resume + ": the folder contains no complete checkpoint" + why);
    }
    out.notes.push_back("Nothing to resume in " + o.resume + ": starting from the beginning");
    return;
  }
  const CheckpointHead head = read_head(*found.path);
  config.resume = *found.path;
  if (out.automatic) continue_choice(o, head, out);
  const std::vector<std::string> differences = compare_with_head(config, head);
  out.notes.push_back(
      fmt::format("Resuming from {}, after {} of {} steps", head.path, head.position.step, config.steps));
  out.notes.insert(out.notes.end(), differences.begin(), differences.end());
}

// Returns the first step of this run. Call after resolve_checkpoints().
int64_t first_step(const TrainConfig& config) {
  return config.resume.empty() ? 0 : read_head(config.resume).position.step;
}

// The default range begins after the warm-up of caches and clocks.
constexpr int64_t kTraceAfter = 5, kTraceSteps = 10;

// Resolves --trace and --trace-steps. Call after resolving the steps and the first step of a resumed run.
void resolve_trace(const RunOptions& o, Resolved& out) {
  TrainConfig& config = out.config;
  const int64_t first = first_step(config);
  if (o.trace_steps && o.trace.empty() && config.devices[0].is_host()) {
    throw BadInput(fmt::format(
        "--trace-steps {}: without --trace the steps are for CUDA's profiler, and this run is on the host; "
        "add --trace FILE or --device cuda",
        *o.trace_steps));
  }
  const StepRange range = o.trace_steps ? StepRange::parse("--trace-steps", *o.trace_steps) : StepRange();
  if (first >= config.steps) return;
  config.trace = o.trace;
  config.profiles = o.trace_steps && config.devices[0].is_cuda();
  if (o.trace_steps) {
    if (range.begin >= config.steps || range.end <= first) {
      throw BadInput(fmt::format("--trace-steps {}: this run does steps {} to {}", *o.trace_steps, first,
                                 config.steps - 1));
    }
    config.trace_steps = {std::max(range.begin, first), std::min(range.end, config.steps)};
  } else if (!o.trace.empty()) {
    const int64_t begin = std::max(first, std::min(first + kTraceAfter, config.steps - kTraceSteps));
    config.trace_steps = {begin, std::min(begin + kTraceSteps, config.steps)};
  }
}

// Parses STEP:DIR. The file name contains the step, so that one folder can hold several dumps.
void resolve_gradients(const RunOptions& o, Resolved& out) {
  if (!o.dump_gradients) return;
  TrainConfig& config = out.config;
  const std::string& text = *o.dump_gradients;
  const std::string flag = "--dump-gradients " + text;
  const size_t colon = std::min(text.find(':'), text.size());
  const auto step = parse_number<int64_t>(text.substr(0, colon), 0);
  if (!step || colon + 1 >= text.size()) {
    throw BadInput(flag + ": write STEP:DIR, a step counted from 0 and a folder, such as 100:gradients");
  }
  config.gradients_step = *step;
  if (const int64_t first = first_step(config);
      config.gradients_step < first || config.gradients_step >= config.steps) {
    throw BadInput(fmt::format("{}: this run does steps {} to {}", flag, first, config.steps - 1));
  }
  config.gradients_directory = text.substr(colon + 1);
  check_output_directory("--dump-gradients", config.gradients_directory);
  const std::string path = gradients_path(config.gradients_directory, config.gradients_step);
  if (std::error_code ignored; std::filesystem::exists(path, ignored)) {
    throw BadInput(fmt::format("{}: {} already exists; remove it, or name another folder", flag, path));
  }
}

}  // namespace

Resolved resolve(const RunOptions& o) {
  Resolved out = resolve_machine(o);
  TrainConfig& config = out.config;
  out.data = load_data(config.data, config.model, config.seed, config.global_batch());
  out.notes.insert(out.notes.end(), out.data.notes.begin(), out.data.notes.end());
  const int64_t test_share = (out.data.test.count() + config.ranks() - 1) / config.ranks();
  config.eval_batch_size = std::min(config.eval_batch_size, std::max<int64_t>(test_share, 1));
  // The images determine the channels and classes. The user must choose a model of matching image size.
  config.model.channels = out.data.train.channels;
  config.model.classes = out.data.train.classes;
  check_model(config.model);
  check_model_fits(config.model, out.data.train);

  int64_t per_epoch = steps_per_epoch(config, out.data.train);
  config.steps = o.steps ? *o.steps
                         : std::max<int64_t>(1, std::llround(o.epochs.value_or(kDefaultEpochs) *
                                                             static_cast<double>(per_epoch)));
  config.epochs = static_cast<double>(config.steps) / static_cast<double>(per_epoch);
  config.warmup_steps = o.warmup.value_or(std::min<int64_t>(config.steps / 10, per_epoch));
  if (config.warmup_steps > config.steps) {
    throw BadInput(
        fmt::format("--warmup {} is longer than the run of {} steps", config.warmup_steps, config.steps));
  }
  const double run_flops = training_flops_per_image(config.model) *
                           static_cast<double>(config.global_batch()) * static_cast<double>(config.steps);
  config.measure_peak = run_flops >= kPeakRunFlops;
  resolve_checkpoints(o, per_epoch, out);
  drop_automatic_of_one_rank(out);
  resolve_trace(o, out);
  resolve_gradients(o, out);
  return out;
}

}  // namespace gradwire
