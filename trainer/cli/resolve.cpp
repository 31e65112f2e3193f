// Resolves the command line: first the settings that concern only the machine and the model, then data,
// steps, checkpoints and traces.

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "collectives/codec/codec.h"
#include "collectives/transport/nccl/nccl.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/cli/flags.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

// Returns "1 rank" or "2 ranks".
std::string counted(int count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

// Returns the settings of the command line, with defaults for those that were not given.
TrainConfig training_settings(const RunOptions& o) {
  const bool adamw = o.optimizer_text != "sgd";
  if (adamw && static_cast<float>(o.momentum) >= 1)
    throw BadInput("--momentum {}: adamw's beta1 must be below 1", o.momentum);
  TrainConfig config = o;
  config.data = DataSpec::parse(o.data_text);
  config.augment = Augmentation::parse(o.augment_text);
  config.optimizer = adamw ? OptimizerKind::adamw : OptimizerKind::sgd;
  if (std::isnan(o.lr)) config.lr = adamw ? 1e-3 : 0.05;
  config.momentum = TrainConfig().momentum;
  if (!std::isnan(o.momentum)) (adamw ? config.beta1 : config.momentum) = o.momentum;
  if (std::isnan(o.weight_decay)) config.weight_decay = adamw ? 0.01 : 0.0;
  if (o.gradient_group == 0) config.gradient_group = kDefaultGradientGroup;
  if (o.checkpoint_keep == 0) config.checkpoint_keep = kDefaultCheckpoints;
  if (o.link_text) config.link = EmulatedLink::parse(*o.link_text);
  return config;
}

// Resolves the number of ranks per node. Call after resolving the ranks.
void resolve_nodes(const RunOptions& o, Resolved& out) {
  TrainConfig& config = out.config;
  const int ranks = config.ranks();
  if (o.ranks_per_node > 0 && ranks % o.ranks_per_node != 0) {
    throw BadInput("--ranks-per-node {} does not divide the {} ranks into equal nodes", o.ranks_per_node,
                   ranks);
  }
  if (o.ranks_per_node == 0 && config.processes) config.ranks_here = o.launch->local_world;
  config.link.ranks_per_node = config.ranks_per_node;
  for (const CompressionSpec& spec : out.compressions) {
    if (spec.schedule == ScheduleKind::hierarchical && config.ranks_per_node == 0 && config.ranks_here == 0) {
      throw BadInput("--compression " + spec.to_string() +
                     ": schedule=hierarchical needs the number of ranks per node; add --ranks-per-node N");
    }
  }
}

// Returns the number of GPUs for `count` ranks, of which `here` are on this machine. 0 means training on the
// host.
int usable_gpus(const RunOptions& o, int count, int here, Resolved& out) {
  if (o.device == DeviceChoice::host) return 0;
  if (out.config.link) {
    if (o.device == DeviceChoice::cuda) {
      throw BadInput("--link {}: links between GPUs (--device cuda) cannot be emulated; use --device host",
                     *o.link_text);
    }
    if (cuda_device_count() > 0) {
      out.notes.emplace_back(
          "Note: training on the host, although the machine has a GPU: --link emulates the host's links");
    }
    return 0;
  }
  const bool required = o.device == DeviceChoice::cuda;
  const int gpus = cuda_device_count();
  if (gpus == 0 && required) {
    const std::string reason = cuda_unavailable_reason();  // empty if a second query succeeds
    throw BadInput("--device cuda: " + (reason.empty() ? "cudaGetDeviceCount failed" : reason) +
                   "; use --device host, or see gradwire doctor");
  }
  if (gpus == 0 || !out.config.processes) return gpus;
  std::string obstacle = nccl_unavailable_reason();
  if (obstacle.empty() && !required && here > gpus) {
    obstacle = fmt::format("{} processes share {}, which NCCL does not support", here, counted(gpus, "GPU"));
  }
  if (obstacle.empty()) return gpus;
  if (required) {
    throw BadInput("--device cuda: {}; or start one process with --ranks {}, or use --device host", obstacle,
                   count);
  }
  out.notes.push_back("Note: training on the host, although the machine has a GPU: " + obstacle);
  return 0;
}

// Resolves the ranks, one per process or --ranks threads of a single process, and their devices. Several
// processes with several ranks each are not supported.
void resolve_devices(const RunOptions& o, Resolved& out) {
  const bool processes = out.config.processes = o.launch && o.launch->world > 1;
  const int count = processes ? o.launch->world : std::max(o.rank_count, 1);
  if (processes && o.rank_count > 0 && o.rank_count != count) {
    throw BadInput(
        "--ranks {}, but {} started {} processes ({}), and each process is one rank; omit "
        "--ranks, or start one process",
        o.rank_count, o.launch->launcher, count, o.launch->variables);
  }
  // The number of ranks on this machine, or `count` if unknown.
  const int here = processes && o.launch->local_world > 0 ? o.launch->local_world : count;
  const int gpus = usable_gpus(o, count, here, out);
  const std::string ranks = counted(count, "rank") + (processes ? ", a process each" : "");
  if (gpus == 0) {
    out.config.devices.assign(static_cast<size_t>(count), Device::host());
    out.device_line = fmt::format("Device: host, {}, {}", counted(host_threads(), "thread"), ranks);
    if (o.device == DeviceChoice::automatic && out.notes.empty())
      out.device_line += " (no GPU: " + cuda_unavailable_reason() + ")";
    return;
  }
  // Other machines are assumed to number their ranks and GPUs in the same way. join() determines this rank's
  // device exactly.
  for (int r = 0; r < count; ++r) out.config.devices.push_back(Device::cuda(r % here % gpus));
  if (processes) {
    out.device_line = fmt::format("Device: cuda, {} through NCCL {}, {} on this machine", ranks,
                                  nccl_version(), counted(std::min(gpus, here), "GPU"));
    return;
  }
  out.device_line =
      fmt::format("Device: cuda, {} on {} of {}", ranks, std::min(gpus, count), counted(gpus, "GPU"));
  if (count > gpus) out.device_line += ", several ranks share one";
}

Wire gather_format(const RunOptions& o) {
  const CompressionSpec spec = CompressionSpec::parse(o.gather_text);
  CompressionSpec format;
  format.wire = spec.wire;
  format.dense = spec.dense;  // `dense` is on by default below 8 bits
  if (spec.method != CompressionSpec::Method::wire || !(spec == format)) {
    throw BadInput(
        "--gather-weights {} must be a wire format, optionally with its options, such as fp32, "
        "bf16 or int8:block=64",
        o.gather_text);
  }
  if (!o.shard_optimizer && !spec.wire->exact) {
    throw BadInput("--gather-weights needs --shard; otherwise every rank updates all weights");
  }
  return spec.wire;
}

// Resolves --elastic. Call after resolving the ranks and devices.
void resolve_elastic(const RunOptions& o, Resolved& out) {
  if (!o.elastic_text) return;
  const std::string& text = *o.elastic_text;
  TrainConfig& config = out.config;
  constexpr std::string_view kKeepLocal = ",keep-local";
  const bool keeps_local = text.ends_with(kKeepLocal);
  config.elastic_batch = keeps_local ? ElasticBatch::keep_local : ElasticBatch::keep_global;
  config.elastic = ElasticRange::parse(text.substr(0, text.size() - (keeps_local ? kKeepLocal.size() : 0)));
  if (!o.join.empty()) config.members = o.join;
  config.link.ranks_per_node = 0;  // after losses, nodes have different numbers of ranks
  const std::string flag = "--elastic " + text;
  if (!config.processes) {
    throw BadInput(flag +
                   ": the ranks must be processes; start a process for each rank, with RANK, WORLD_SIZE, "
                   "MASTER_ADDR and MASTER_PORT set (docs/running.md)");
  }
  if (config.devices[0].is_cuda()) {
    throw BadInput(
        flag +
        ": a run on GPUs cannot continue after a rank fails; use --device host, or --checkpoint and "
        "--resume");
  }
  if (config.ranks() < config.elastic.least || config.ranks() > config.elastic.most) {
    throw BadInput("{}: {} processes were started, which is outside the range", flag, config.ranks());
  }
  if (config.elastic_batch == ElasticBatch::keep_global && config.micro_batch() < config.elastic.most) {
    throw BadInput("{}: the {} images of a batch over all ranks cannot be divided among {} ranks", flag,
                   config.micro_batch(), config.elastic.most);
  }
  if (o.shard_optimizer && o.checkpoint_directory.empty()) {
    throw BadInput(
        "{} and --shard optimizer: only a checkpoint holds the optimizer's state of a lost rank; "
        "add --checkpoint DIR, or use --shard none",
        flag);
  }
  if (o.overlap_forward) {
    throw BadInput(
        flag +
        " and --overlap-forward cannot be combined: the next step would begin before a step is complete");
  }
  if (config.compression.schedule == ScheduleKind::hierarchical) {
    throw BadInput("{} and --compression {}: a lost rank leaves nodes of unequal size; use schedule=auto",
                   flag, config.compression.to_string());
  }
}

// Resolves --compression together with --optimizer.
void resolve_compression(const RunOptions& o, Resolved& out) {
  for (const std::string& text : o.specs) {
    if (AutoCompression::is_request(text)) {
      out.automatic = AutoCompression::parse(text);
      const std::vector<CompressionSpec> candidates = out.automatic->candidates();
      out.compressions.insert(out.compressions.end(), candidates.begin(), candidates.end());
      continue;
    }
    out.compressions.push_back(CompressionSpec::parse(text));
    if (out.compressions.back().method == CompressionSpec::Method::dion)
      throw BadInput("--compression " + text + ": Dion is an optimizer; use --optimizer dion:rank=R");
  }
  if (out.compressions.empty()) out.compressions.emplace_back();
  if (is_matrix_optimizer(o.optimizer_text))
    resolve_matrix_optimizer(o.optimizer_text, out.automatic.has_value(), out.config, out.compressions);
  std::vector<std::string> tensors;
  for (const VitParameter& p : vit_parameters(out.config.model)) tensors.push_back(p.name);
  for (const CompressionSpec& spec : out.compressions) check_dense_names(spec, tensors);
  out.config.compression = out.compressions[0];
}

// Checks that the ranks can use schedule=nccl if a spec requires this schedule. Call after resolving the
// devices.
void check_schedules(const Resolved& out) {
  const bool nccl = out.config.processes && out.config.devices.front().is_cuda();
  for (const CompressionSpec& spec : out.compressions) {
    if (spec.schedule != ScheduleKind::nccl) continue;
    if (!nccl && out.config.ranks() > 1) {
      throw BadInput(
          "--compression " + spec.to_string() +
          ": schedule=nccl needs a process with a GPU for each rank (start it with torchrun, srun or "
          "mpirun); or use schedule=auto");
    }
    if (out.config.shard_optimizer) {
      throw BadInput(
          "--compression " + spec.to_string() +
          ": schedule=nccl is NCCL's allreduce, and --shard needs a reduce-scatter; use schedule=auto");
    }
  }
}

// Checks that optimizer and sharding fit the specs' residual policies. Call after resolving the ranks.
void check_policies(const Resolved& out) {
  const TrainConfig& config = out.config;
  for (const CompressionSpec& spec : out.compressions) {
    const ResidualPolicy& policy = spec.policy;
    if (policy.momentum > 0 && (config.optimizer != OptimizerKind::sgd || config.momentum != 0)) {
      throw BadInput(
          "--compression {}: momentum={} replaces the optimizer's; add --optimizer sgd --momentum 0",
          spec.to_string(), policy.momentum);
    }
    const char* const option = policy.momentum > 0 ? "momentum" : policy.max_norm > 0 ? "max_norm" : nullptr;
    if (option != nullptr && (config.ranks() == 1 || config.elastic.least == 1)) {
      throw BadInput(
          "--compression {}: a single rank does not compress, and so has no {}; use at least 2 "
          "ranks, also with --elastic, or drop {}",
          spec.to_string(), option, option);
    }
    const bool whole_mean = policy.momentum > 0 || policy.feedback == ResidualPolicy::Feedback::ef21;
    if (whole_mean && config.shard_optimizer) {
      throw BadInput(
          "--compression {}: {} needs the whole mean on every rank; use ef=on without momentum, or "
          "--shard none",
          spec.to_string(), policy.momentum > 0 ? "momentum" : "ef=ef21");
    }
  }
}

// Notes that a residual of values that wait for many steps is a momentum already.
void note_second_momentum(const RunOptions& o, Resolved& out) {
  const bool sgd = out.config.optimizer == OptimizerKind::sgd;
  if (!std::isnan(o.momentum) || out.config.muon || out.config.ranks() == 1) return;
  for (const CompressionSpec& spec : out.compressions) {
    if (!spec.sums_gradients()) continue;
    out.notes.push_back(
        fmt::format("Note: {} with error feedback is more accurate without the optimizer's momentum; try "
                    "--momentum 0{} (docs/formats.md)",
                    spec.to_string(), sgd ? " and 10 times the --lr" : ""));
  }
}

// Checks --compression auto, whose predictions do not cover all ways to train. Call after resolving the ranks
// and --elastic.
void check_automatic(const RunOptions& o, Resolved& out) {
  if (!out.automatic) return;
  auto refuse = [&](const std::string& flag, const std::string& why) {
    throw BadInput("--compression auto and {} cannot be combined: {}; name a spec, such as int8", flag, why);
  };
  if (o.shard_optimizer) refuse("--shard optimizer", "it predicts allreduces, not reduce-scatters");
  if (o.overlap_forward)
    refuse("--overlap-forward", "it predicts steps whose communication ends before the next forward");
  if (o.elastic_text) refuse("--elastic", "it predicts a fixed number of ranks");
  if (out.config.bucket_mb != std::floor(out.config.bucket_mb)) {
    throw BadInput("--bucket-mb {}: --compression auto needs a whole number of MiB", out.config.bucket_mb);
  }
  if (o.dry_run && out.config.ranks() > 1) {
    out.notes.emplace_back(
        "Note: --compression auto chooses when the run starts; the plan below is for --compression fp32");
  }
}

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
    throw BadInput(
        "--batch-size {}{} is larger than a rank's part: the {} training images of {} are {} for each of {} "
        "ranks; {}",
        config.batch_size, accumulated, train.count(), train.name, per_rank, config.ranks(), remedy);
  }
  return train.count() / config.global_batch();
}

// Takes over the choice of --compression auto from a checkpoint. A choice for another number of ranks holds
// only until the run chooses. A spec with momentum holds to the end: other specs would add its state to a
// gradient.
void continue_choice(const RunOptions& o, const CheckpointHead& head, Resolved& out) {
  TrainConfig& config = out.config;
  config.compression = CompressionSpec::parse(head.compression);
  if (o.buckets_mb.empty()) config.bucket_mb = head.bucket_mb;
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
  const std::string& folder = o.checkpoint_directory;
  std::error_code ignored;
  const auto canonical = [&](const std::string& path) {
    return std::filesystem::weakly_canonical(path + "/", ignored);
  };
  const bool same = !o.resume.empty() && !folder.empty() && canonical(o.resume) == canonical(folder);
  const bool continues = joins || same;
  if (!o.init.empty()) check_weights(o.init, config.model);
  config.resume.clear();
  if (!folder.empty()) {
    check_output_directory("--checkpoint", folder);
    if (!continues && holds_checkpoints(folder)) {
      throw BadInput("--checkpoint " + folder +
                     ": the folder already contains checkpoints; continue with --resume " + folder +
                     ", or name another folder");
    }
    if (config.elastic && config.members.empty()) config.members = folder + "/members";
    if (o.checkpoint_every == 0) config.checkpoint_every = steps_per_epoch;
  }
  if (o.resume.empty() || joins) return;
  FoundCheckpoint found;
  // The same command starts a run and, after any interruption, continues it.
  if (!continues || std::filesystem::exists(o.resume, ignored)) found = find_checkpoint(o.resume);
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
  config.trace.clear();
  if (o.trace_text && o.trace.empty() && config.devices[0].is_host()) {
    throw BadInput(
        "--trace-steps {}: without --trace the steps are for CUDA's profiler, and this run is on the host; "
        "add --trace FILE or --device cuda",
        *o.trace_text);
  }
  const StepRange range = o.trace_text ? StepRange::parse("--trace-steps", *o.trace_text) : StepRange();
  if (first >= config.steps) return;
  config.trace = o.trace;
  config.profiles = o.trace_text && config.devices[0].is_cuda();
  if (o.trace_text) {
    if (range.begin >= config.steps || range.end <= first) {
      throw BadInput("--trace-steps {}: this run does steps {} to {}", *o.trace_text, first,
                     config.steps - 1);
    }
    config.trace_steps = {std::max(range.begin, first), std::min(range.end, config.steps)};
  } else if (!o.trace.empty()) {
    const int64_t begin = std::max(first, std::min(first + kTraceAfter, config.steps - kTraceSteps));
    config.trace_steps = {begin, std::min(begin + kTraceSteps, config.steps)};
  }
}

// Parses STEP:DIR. The file name contains the step, so that one folder can hold several dumps.
void resolve_gradients(const RunOptions& o, Resolved& out) {
  if (!o.gradients_text) return;
  TrainConfig& config = out.config;
  const std::string& text = *o.gradients_text;
  const std::string flag = "--dump-gradients " + text;
  const size_t colon = std::min(text.find(':'), text.size());
  const auto step = parse_number<int64_t>(text.substr(0, colon), 0);
  if (!step || colon + 1 >= text.size()) {
    throw BadInput(flag + ": write STEP:DIR, a step counted from 0 and a folder, such as 100:gradients");
  }
  config.gradients_step = *step;
  if (const int64_t first = first_step(config);
      config.gradients_step < first || config.gradients_step >= config.steps) {
    throw BadInput("{}: this run does steps {} to {}", flag, first, config.steps - 1);
  }
  config.gradients_directory = text.substr(colon + 1);
  check_output_directory("--dump-gradients", config.gradients_directory);
  const std::string path = gradients_path(config.gradients_directory, config.gradients_step);
  if (std::error_code ignored; std::filesystem::exists(path, ignored)) {
    throw BadInput("{}: {} already exists; remove it, or name another folder", flag, path);
  }
}

}  // namespace

Resolved resolve_machine(const RunOptions& o) {
  Resolved out;
  TrainConfig& config = out.config;
  config = training_settings(o);
  config.model = named_model(o.model.name);
  for (const Setting& setting : settings()) {
    const auto* size = std::get_if<int32_t VitConfig::*>(&setting.field);
    if (size != nullptr && o.model.**size > 0) config.model.** size = o.model.**size;
  }
  config.model.gelu = o.model.gelu;
  resolve_compression(o, out);
  out.buckets_mb = o.buckets_mb.empty() ? std::vector<double>{kDefaultBucketMb} : o.buckets_mb;
  config.bucket_mb = out.buckets_mb[0];
  if (o.overlap_forward && o.graph)
    throw BadInput("--overlap-forward and --graph cannot be combined: a graph contains one whole step");
  if (o.overlap_forward && o.shard_optimizer)
    throw BadInput(
        "--overlap-forward and --shard optimizer cannot be combined: with --shard optimizer a step ends when "
        "the weights are gathered; use --shard none");
  config.gather_weights = gather_format(o);
  resolve_devices(o, out);
  resolve_nodes(o, out);
  resolve_elastic(o, out);
  check_schedules(out);
  check_policies(out);
  check_muon(config);
  check_automatic(o, out);
  note_second_momentum(o, out);
  if (o.gradient_group != 0 && config.devices.front().is_host())
    out.notes.emplace_back(
        "Note: --gradient-group has no effect on the host, which computes each layer's gradients separately");
  else if (o.gradient_group != 0 && config.ranks() == 1)
    out.notes.emplace_back("Note: --gradient-group has no effect on a single rank, which sends no gradients");
  if (config.graph && config.devices[0].is_cuda() && config.ranks() > 1 && !config.processes) {
    throw BadInput(
        "--graph: GPU ranks of one process synchronize on the host in each step, which a graph cannot "
        "contain; start a process for each rank (torchrun, srun or mpirun)");
  }
  if (config.precision == Precision::tf32 && config.devices[0].is_host()) {
    out.notes.emplace_back("Note: --precision tf32 has no effect on the host, which computes in fp32");
  }
  if (config.link && config.ranks() == 1)
    out.notes.emplace_back("Note: --link has no effect on a single rank, which sends no messages");
  check_model(config.model);
  return out;
}

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
  const double epochs = o.epochs > 0 ? o.epochs : kDefaultEpochs;
  if (o.steps == 0)
    config.steps = std::max<int64_t>(1, std::llround(epochs * static_cast<double>(per_epoch)));
  config.epochs = static_cast<double>(config.steps) / static_cast<double>(per_epoch);
  if (o.warmup_steps < 0) config.warmup_steps = std::min<int64_t>(config.steps / 10, per_epoch);
  if (config.warmup_steps > config.steps) {
    throw BadInput("--warmup {} is longer than the run of {} steps", config.warmup_steps, config.steps);
  }
  const double run_flops = training_flops_per_image(config.model) *
                           static_cast<double>(config.global_batch()) * static_cast<double>(config.steps);
  config.measure_peak = run_flops >= kPeakRunFlops;
  resolve_checkpoints(o, per_epoch, out);
  if (out.automatic && config.ranks() == 1) {  // a resumed run keeps its spec, so this follows
    out.automatic.reset();
    out.notes.emplace_back("Note: --compression auto has no effect on a single rank, which sends nothing");
  }
  resolve_trace(o, out);
  resolve_gradients(o, out);
  return out;
}

}  // namespace gradwire
