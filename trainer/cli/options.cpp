#include "trainer/cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "collectives/codec/dense.h"
#include "collectives/communicator/communicator.h"
#include "collectives/transport/nccl/nccl.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/gradients.h"
#include "trainer/model/flops.h"

namespace gradwire {
namespace {

// Measuring a peak takes a fifth of a second, too long for runs shorter than this.
constexpr double kPeakRunFlops = 1e12;

VitConfig resolve_model(const Options& o) {
  VitConfig model = named_model(o.model);
  auto override_with = [](int32_t& field, const std::optional<int32_t>& given) {
    if (given) field = *given;
  };
  override_with(model.image, o.image_size);
  override_with(model.patch, o.patch);
  override_with(model.width, o.width);
  override_with(model.depth, o.depth);
  override_with(model.heads, o.heads);
  override_with(model.mlp, o.mlp);
  model.gelu = o.gelu;
  return model;
}

// Returns the number of ranks. A process is one rank; --ranks threads in each of several processes are not
// supported. A world of 1 under a launcher of several processes is an error: every process would train alone.
int resolve_ranks(const Options& o, Resolved& out) {
  if (!o.launch || o.launch->world == 1) return o.ranks.value_or(1);
  const int world = o.launch->world;
  if (o.ranks.value_or(world) != world) {
    throw BadInput(
        fmt::format("--ranks {}, but {} started {} processes ({}), and each of them is one rank; leave "
                    "--ranks away, or start one process",
                    *o.ranks, o.launch->launcher, world, o.launch->variables));
  }
  out.config.processes = true;
  return world;
}

// Call after the ranks are known.
void resolve_nodes(const Options& o, Resolved& out) {
  TrainConfig& config = out.config;
  const int ranks = config.ranks();
  if (o.ranks_per_node) {
    if (ranks % *o.ranks_per_node != 0) {
      throw BadInput(fmt::format("--ranks-per-node {} does not divide the {} ranks into equal nodes",
                                 *o.ranks_per_node, ranks));
    }
    config.ranks_per_node = *o.ranks_per_node;
  } else if (config.processes) {
    config.ranks_here = o.launch->local_world;
  }
  for (const CompressionSpec& spec : out.compressions) {
    if (spec.schedule == ScheduleKind::hierarchical && config.ranks_per_node == 0 && config.ranks_here == 0) {
      throw BadInput("--compression " + spec.to_string() +
                     ": schedule=hierarchical needs to know the nodes; add --ranks-per-node N");
    }
  }
}

// Call after the devices are known.
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
    if (out.config.shard != Sharding::none) {
      throw BadInput(
          "--compression " + spec.to_string() +
          ": schedule=nccl is NCCL's allreduce, and --shard takes a reduce-scatter; use schedule=auto");
    }
  }
}

void resolve_devices(const Options& o, Resolved& out) {
  const int count = resolve_ranks(o, out);
  const bool processes = out.config.processes;
  int gpus = o.device == DeviceChoice::host ? 0 : cuda_device_count();
  // Ranks on this machine, if known.
  const int here = processes && o.launch->local_world > 0 ? o.launch->local_world : count;
  if (processes && gpus > 0) {
    std::string obstacle = nccl_unavailable_reason();
    if (obstacle.empty() && o.device == DeviceChoice::automatic && here > gpus) {
      obstacle = fmt::format("{} processes share {}{}, which NCCL does not do", here, gpus,
                             gpus == 1 ? " GPU" : " GPUs");
    }
    if (!obstacle.empty() && o.device == DeviceChoice::cuda) {
      throw BadInput(fmt::format(
          "--device cuda: {}; or start one process with --ranks {}, or use --device host", obstacle, count));
    }
    if (!obstacle.empty()) {
      out.notes.push_back("Note: training on the host, although there is a GPU: " + obstacle);
      gpus = 0;
    }
  }
  if (o.device == DeviceChoice::cuda && gpus == 0) {
    const std::string reason = cuda_unavailable_reason();  // empty if a second query succeeds
    throw BadInput("--device cuda: " + (reason.empty() ? "cudaGetDeviceCount failed" : reason) +
                   "; use --device host, or see gradwire doctor");
  }
  std::string ranks = fmt::format("{}{}", count, count == 1 ? " rank" : " ranks");
  if (processes) ranks += ", a process each";
  if (gpus == 0) {
    out.config.devices.assign(static_cast<size_t>(count), Device::host());
    int threads = host_threads();
    out.device_line =
        fmt::format("Device: host, {}{}{}", threads, threads == 1 ? " thread, " : " threads, ", ranks);
    if (o.device == DeviceChoice::automatic && out.notes.empty())
      out.device_line += " (no GPU: " + cuda_unavailable_reason() + ")";
    return;
  }
  // Launchers number ranks this way on other machines. join() requests this rank's own device.
  for (int r = 0; r < count; ++r) out.config.devices.push_back(Device::cuda(r % here % gpus));
  if (processes) {
    out.device_line =
        fmt::format("Device: cuda, {} through NCCL {}, {}{} on this machine", ranks, nccl_version(),
                    std::min(gpus, here), std::min(gpus, here) == 1 ? " GPU" : " GPUs");
    return;
  }
  out.device_line = fmt::format("Device: cuda, {} on {} of {}{}", ranks, std::min(gpus, count), gpus,
                                gpus == 1 ? " GPU" : " GPUs");
  if (count > gpus) out.device_line += ", several ranks share one";
}

// Returns the number of optimizer steps in an epoch. Throws if there is not even one.
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
        "--batch-size {}{} is larger than a rank's shard: the {} training images of {} are {} for each of {} "
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

// Call after all other options are known, because the checkpoint is compared with them.
void resolve_checkpoints(const Options& o, int64_t steps_per_epoch, Resolved& out) {
  TrainConfig& config = out.config;
  // A joiner gets its state from the other ranks, even if they started from a checkpoint.
  const bool joins = !o.join.empty();
  const bool goes_on =
      joins || (!o.resume.empty() && !o.checkpoint.empty() && same_folder(o.resume, o.checkpoint));
  if (!o.init.empty()) check_weights(o.init, config.model);
  config.init = o.init;
  if (!o.checkpoint.empty()) {
    check_output_directory("--checkpoint", o.checkpoint);
    if (!goes_on && holds_checkpoints(o.checkpoint)) {
      throw BadInput("--checkpoint " + o.checkpoint +
                     ": there are checkpoints already; go on from them with --resume " + o.checkpoint +
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
  if (std::error_code ignored; !goes_on || std::filesystem::exists(o.resume, ignored)) {
    found = find_checkpoint(o.resume);
  }
  out.notes.insert(out.notes.end(), found.ignored.begin(), found.ignored.end());
  if (!found.path) {
    if (!goes_on) {
      std::string why;
      for (const std::string& line : found.ignored) why += " (" + line + ")";
      throw BadInput("--resume " + o.resume + ": there is no complete checkpoint" + why);
    }
    out.notes.push_back("Nothing to resume in " + o.resume + ": starting from the beginning");
    return;
  }
  const CheckpointHead head = read_head(*found.path);
  config.resume = *found.path;
  const std::vector<std::string> differences = compare_with_head(config, head);
  out.notes.push_back(
      fmt::format("Resuming from {}, after {} of {} steps", head.path, head.position.step, config.steps));
  out.notes.insert(out.notes.end(), differences.begin(), differences.end());
}

// Returns the first step of this run. Call after resolve_checkpoints().
int64_t first_step(const TrainConfig& config) {
  return config.resume.empty() ? 0 : read_head(config.resume).position.step;
}

// Call after the steps and the first step of a resumed run are known. The default range is late enough for a
// run to have warmed up.
constexpr int64_t kTraceAfter = 5, kTraceSteps = 10;
void resolve_trace(const Options& o, Resolved& out) {
  TrainConfig& config = out.config;
  const int64_t first = first_step(config);
  auto check = [&](const char* flag, const std::string& text) {
    StepRange range = StepRange::parse(flag, text);
    if (range.begin >= config.steps || range.end <= first) {
      throw BadInput(fmt::format("{} {}: this run does steps {} to {}", flag, text, first, config.steps - 1));
    }
    return StepRange{std::max(range.begin, first), std::min(range.end, config.steps)};
  };
  if (!o.trace.empty() && first < config.steps) {
    config.trace = o.trace;
    const int64_t begin = std::max(first, std::min(first + kTraceAfter, config.steps - kTraceSteps));
    config.trace_steps = o.trace_steps ? check("--trace-steps", *o.trace_steps)
                                       : StepRange{begin, std::min(begin + kTraceSteps, config.steps)};
  }
  if (!o.profile_steps) return;
  if (config.devices[0].is_host()) {
    throw BadInput(
        "--profile-steps " + *o.profile_steps +
        ": it starts and stops a profiler of CUDA, and this run is on the host; use --trace FILE, or "
        "--device cuda");
  }
  config.profile_steps = check("--profile-steps", *o.profile_steps);
}

// Parses STEP:DIR. The file name contains the step, so that one folder can hold several dumps.
void resolve_gradients(const Options& o, Resolved& out) {
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
    throw BadInput(fmt::format("{}: {} exists already; remove it, or name another folder", flag, path));
  }
}

Wire gather_format(const Options& o) {
  const CompressionSpec spec = CompressionSpec::parse(o.gather_weights);
  CompressionSpec format;
  format.wire = spec.wire;
  format.dense = spec.dense;  // on by default below 8 bits
  if (spec.method != CompressionSpec::Method::wire || !(spec == format)) {
    throw BadInput(
        fmt::format("--gather-weights {}: a wire format with its own options is needed, such as fp32, bf16 "
                    "or int8:block=64",
                    o.gather_weights));
  }
  if (o.shard == Sharding::none && !spec.wire->exact) {
    throw BadInput("--gather-weights is for --shard; otherwise every rank updates all weights");
  }
  return spec.wire;
}

// Divided gradients leave their memory bucket by bucket, once per step.
void check_shard(const Options& o) {
  if (o.shard < Sharding::gradients) return;
  const std::string flag = fmt::format("--shard {}", name(o.shard));
  if (o.accumulate > 1) {
    throw BadInput(
        fmt::format("--accumulate {} needs all gradients until the last micro-batch, and {} keeps a few "
                    "buckets only; use --shard optimizer, or a larger --batch-size",
                    o.accumulate, flag));
  }
  if (o.graph) {
    throw BadInput(fmt::format("--graph and {} do not go together; use --shard optimizer", flag));
  }
}

// Call after the ranks and devices are known.
void resolve_gradient_group(const Options& o, Resolved& out) {
  if (!o.gradient_group) return;
  if (o.shard >= Sharding::gradients) {
    throw BadInput(fmt::format(
        "--gradient-group and --shard {} do not go together: divided gradients are reduced layer by "
        "layer, for want of memory; use --shard optimizer",
        name(o.shard)));
  }
  out.config.gradient_group = *o.gradient_group;
  if (out.config.devices.front().is_host())
    out.notes.emplace_back(
        "Note: --gradient-group has no effect on the host, where each layer is on its own");
  else if (out.config.ranks() == 1)
    out.notes.emplace_back("Note: --gradient-group has no effect on a single rank, for which nobody waits");
}

// Checks --overlap-forward: a step then ends inside the next step.
void check_overlap(const Options& o) {
  if (!o.overlap_forward) return;
  if (o.graph)
    throw BadInput("--overlap-forward and --graph do not go together: a graph holds one whole step");
  if (o.shard != Sharding::none) {
    throw BadInput(
        fmt::format("--overlap-forward and --shard {} do not go together; --shard full gathers weights "
                    "during forward as it is",
                    name(o.shard)));
  }
}

// Call after the ranks and devices are known.
void resolve_elastic(const Options& o, Resolved& out) {
  if (!o.elastic) return;
  TrainConfig& config = out.config;
  config.elastic = ElasticRange::parse(*o.elastic);
  config.elastic_batch = o.elastic_batch;
  config.members = o.join.empty() ? o.members : o.join;
  const std::string flag = "--elastic " + *o.elastic;
  if (!config.processes) {
    throw BadInput(
        flag +
        ": threads of one process end together; start a process for each rank, with RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT set (docs/running.md)");
  }
  if (config.devices[0].is_cuda()) {
    throw BadInput(flag +
                   ": between GPUs a run ends with the first rank that fails; use --device host, or "
                   "--checkpoint and --resume instead");
  }
  if (config.ranks() < config.elastic.least || config.ranks() > config.elastic.most) {
    throw BadInput(fmt::format("{}: {} processes were started", flag, config.ranks()));
  }
  if (config.elastic_batch == ElasticBatch::keep_global && config.micro_batch() < config.elastic.most) {
    throw BadInput(fmt::format("{}: the {} images of a batch over all ranks cannot be divided among {} ranks",
                               flag, config.micro_batch(), config.elastic.most));
  }
  if (o.shard != Sharding::none && o.checkpoint.empty()) {
    throw BadInput(fmt::format(
        "{} and --shard {}: what a lost rank held of the optimizer's state is nowhere but in "
        "the newest checkpoint, to which the run goes back; use --checkpoint DIR, or --shard none",
        flag, name(o.shard)));
  }
  if (o.overlap_forward) {
    throw BadInput(flag +
                   " and --overlap-forward do not go together: a step that breaks would have begun the next");
  }
  if (config.compression.schedule == ScheduleKind::hierarchical) {
    throw BadInput(
        fmt::format("{} and --compression {}: a lost rank leaves nodes of unequal size; use schedule=auto",
                    flag, config.compression.to_string()));
  }
}

}  // namespace

Resolved resolve_machine(const Options& o) {
  Resolved out;
  TrainConfig& config = out.config;
  config.model = resolve_model(o);
  config.data = DataSpec::parse(o.data);
  config.augment = Augmentation::parse(o.augment);
  for (const std::string& spec : o.compression) out.compressions.push_back(CompressionSpec::parse(spec));
  if (out.compressions.empty()) out.compressions.emplace_back();
  std::vector<std::string> tensors;
  for (const VitParameter& p : vit_parameters(config.model)) tensors.push_back(p.name);
  for (const CompressionSpec& spec : out.compressions) check_dense_names(spec, tensors);
  config.compression = out.compressions[0];
  config.optimizer = o.optimizer;
  config.precision = o.precision;
  bool adamw = config.optimizer == OptimizerKind::adamw;
  if (adamw && o.momentum) throw BadInput("--momentum is for --optimizer sgd; adamw has its betas");
  config.lr = o.lr.value_or(adamw ? 1e-3 : 0.05);
  config.momentum = o.momentum.value_or(0.9);
  config.weight_decay = o.weight_decay.value_or(adamw ? 0.01 : 0.0);
  out.buckets_mb = o.bucket_mb.empty() ? std::vector{kDefaultBucketMb} : o.bucket_mb;
  config.bucket_mb = out.buckets_mb[0];
  config.overlap_forward = o.overlap_forward;
  check_overlap(o);
  config.shard = o.shard;
  config.gather_weights = gather_format(o);
  check_shard(o);
  config.memory_limit = static_cast<int64_t>(std::min<uint64_t>(o.memory_limit, int64_t{1} << 60));
  config.graph = o.graph;
  config.batch_size = o.batch_size;
  config.accumulate = o.accumulate;
  config.seed = o.seed;
  config.timeout_s = o.timeout_s;
  config.eval_every = o.eval_every;
  resolve_devices(o, out);
  resolve_nodes(o, out);
  resolve_elastic(o, out);
  check_schedules(out);
  resolve_gradient_group(o, out);
  if (config.graph && config.devices[0].is_cuda() && config.ranks() > 1 && !config.processes) {
    throw BadInput(
        "--graph: ranks of one process on GPUs meet on the host in each step, which no graph can "
        "hold; start a process for each rank (torchrun, srun or mpirun)");
  }
  if (config.precision == Precision::tf32 && config.devices[0].is_host()) {
    out.notes.emplace_back("Note: --precision tf32 concerns CUDA's tensor cores; the host computes in fp32");
  }

  check_model(config.model);
  return out;
}

Resolved resolve(const Options& o) {
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
  resolve_trace(o, out);
  resolve_gradients(o, out);
  return out;
}

JoinOptions join_options(const Options& o) {
  return {.rendezvous = o.rendezvous, .timeout_s = o.timeout_s};
}

std::unique_ptr<Communicator> join(const Options& o, const TrainConfig& config) {
  if (!o.launch || o.launch->world == 1) return nullptr;
  Device device = config.devices[static_cast<size_t>(o.launch->rank)];
  if (device.is_cuda() && o.launch->local_rank >= 0) {
    device = Device::cuda(o.launch->local_rank % cuda_device_count());
  }
  JoinOptions how = join_options(o);
  how.shrinkable = static_cast<bool>(config.elastic);
  return join(*o.launch, how, device);
}

}  // namespace gradwire
