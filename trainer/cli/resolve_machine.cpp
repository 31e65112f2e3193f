// Resolves the options that concern the machine and the model.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collectives/codec/policy_codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/transport/nccl/nccl.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/cli/flags.h"
#include "trainer/model/parameters.h"

namespace gradwire {
namespace {

// Returns "1 rank" or "2 ranks".
std::string counted(int count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

VitConfig resolve_model(const RunOptions& o) {
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

// Returns the settings that follow from options of the same name, or from their defaults.
TrainConfig training_settings(const RunOptions& o) {
  const bool adamw = o.optimizer == OptimizerKind::adamw;
  if (adamw && static_cast<float>(o.momentum.value_or(0)) >= 1)
    throw BadInput(fmt::format("--momentum {}: adamw's beta1 must be below 1", *o.momentum));
  TrainConfig config;
  config.data = DataSpec::parse(o.data);
  config.augment = Augmentation::parse(o.augment);
  config.optimizer = o.optimizer;
  config.precision = o.precision;
  config.lr = o.lr.value_or(adamw ? 1e-3 : 0.05);
  if (o.momentum) (adamw ? config.beta1 : config.momentum) = *o.momentum;
  config.weight_decay = o.weight_decay.value_or(adamw ? 0.01 : 0.0);
  config.overlap_forward = o.overlap_forward;
  config.shard_optimizer = o.shard_optimizer;
  config.memory_limit = static_cast<int64_t>(std::min<uint64_t>(o.memory_limit, int64_t{1} << 60));
  config.graph = o.graph;
  config.batch_size = o.batch_size;
  config.accumulate = o.accumulate;
  config.seed = o.seed;
  config.timeout_s = o.timeout_s;
  if (o.link) config.link = EmulatedLink::parse(*o.link);
  config.eval_every = o.eval_every;
  return config;
}

// Returns the number of ranks: one per process, or --ranks threads of a single process. Several processes
// with several ranks each are not supported.
int resolve_ranks(const RunOptions& o, Resolved& out) {
  if (!o.launch || o.launch->world == 1) return o.ranks.value_or(1);
  const int world = o.launch->world;
  if (o.ranks.value_or(world) != world) {
    throw BadInput(
        fmt::format("--ranks {}, but {} started {} processes ({}), and each process is one rank; omit "
                    "--ranks, or start one process",
                    *o.ranks, o.launch->launcher, world, o.launch->variables));
  }
  out.config.processes = true;
  return world;
}

// Resolves the number of ranks per node. Call after resolving the ranks.
void resolve_nodes(const RunOptions& o, Resolved& out) {
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
      throw BadInput(fmt::format(
          "--link {}: links between GPUs (--device cuda) cannot be emulated; use --device host", *o.link));
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
    throw BadInput(fmt::format(
        "--device cuda: {}; or start one process with --ranks {}, or use --device host", obstacle, count));
  }
  out.notes.push_back("Note: training on the host, although the machine has a GPU: " + obstacle);
  return 0;
}

void resolve_devices(const RunOptions& o, Resolved& out) {
  const int count = resolve_ranks(o, out);
  const bool processes = out.config.processes;
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
  const CompressionSpec spec = CompressionSpec::parse(o.gather_weights);
  CompressionSpec format;
  format.wire = spec.wire;
  format.dense = spec.dense;  // `dense` is on by default below 8 bits
  if (spec.method != CompressionSpec::Method::wire || !(spec == format)) {
    throw BadInput(
        fmt::format("--gather-weights {} must be a wire format, optionally with its options, such as fp32, "
                    "bf16 or int8:block=64",
                    o.gather_weights));
  }
  if (!o.shard_optimizer && !spec.wire->exact) {
    throw BadInput("--gather-weights needs --shard; otherwise every rank updates all weights");
  }
  return spec.wire;
}

// Resolves --gradient-group. Call after resolving the ranks and devices.
void resolve_gradient_group(const RunOptions& o, Resolved& out) {
  if (!o.gradient_group) return;
  out.config.gradient_group = *o.gradient_group;
  if (out.config.devices.front().is_host())
    out.notes.emplace_back(
        "Note: --gradient-group has no effect on the host, which computes each layer's gradients separately");
  else if (out.config.ranks() == 1)
    out.notes.emplace_back("Note: --gradient-group has no effect on a single rank, which sends no gradients");
}

// Checks --overlap-forward, with which a step ends inside the next step.
void check_overlap(const RunOptions& o) {
  if (!o.overlap_forward) return;
  if (o.graph)
    throw BadInput("--overlap-forward and --graph cannot be combined: a graph contains one whole step");
  if (o.shard_optimizer)
    throw BadInput(
        "--overlap-forward and --shard optimizer cannot be combined: with --shard optimizer a step ends when "
        "the weights are gathered; use --shard none");
}

// Resolves --elastic. Call after resolving the ranks and devices.
void resolve_elastic(const RunOptions& o, Resolved& out) {
  if (!o.elastic) return;
  TrainConfig& config = out.config;
  constexpr std::string_view kKeepLocal = ",keep-local";
  const bool keeps_local = o.elastic->ends_with(kKeepLocal);
  config.elastic_batch = keeps_local ? ElasticBatch::keep_local : ElasticBatch::keep_global;
  config.elastic =
      ElasticRange::parse(o.elastic->substr(0, o.elastic->size() - (keeps_local ? kKeepLocal.size() : 0)));
  config.members = o.join.empty() ? o.members : o.join;
  config.link.ranks_per_node = 0;  // after losses, nodes have different numbers of ranks
  const std::string flag = "--elastic " + *o.elastic;
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
    throw BadInput(
        fmt::format("{}: {} processes were started, which is outside the range", flag, config.ranks()));
  }
  if (config.elastic_batch == ElasticBatch::keep_global && config.micro_batch() < config.elastic.most) {
    throw BadInput(fmt::format("{}: the {} images of a batch over all ranks cannot be divided among {} ranks",
                               flag, config.micro_batch(), config.elastic.most));
  }
  if (o.shard_optimizer && o.checkpoint.empty()) {
    throw BadInput(
        fmt::format("{} and --shard optimizer: only a checkpoint holds the optimizer's state of a lost rank; "
                    "add --checkpoint DIR, or use --shard none",
                    flag));
  }
  if (o.overlap_forward) {
    throw BadInput(
        flag +
        " and --overlap-forward cannot be combined: the next step would begin before a step is complete");
  }
  if (config.compression.schedule == ScheduleKind::hierarchical) {
    throw BadInput(
        fmt::format("{} and --compression {}: a lost rank leaves nodes of unequal size; use schedule=auto",
                    flag, config.compression.to_string()));
  }
}

// Resolves --compression together with --optimizer.
void resolve_compression(const RunOptions& o, Resolved& out) {
  for (const std::string& text : o.compression) {
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
  if (!o.matrix_optimizer.empty())
    resolve_matrix_optimizer(o.matrix_optimizer, out.automatic.has_value(), out.config, out.compressions);
  std::vector<std::string> tensors;
  for (const VitParameter& p : vit_parameters(out.config.model)) tensors.push_back(p.name);
  for (const CompressionSpec& spec : out.compressions) check_dense_names(spec, tensors);
  out.config.compression = out.compressions[0];
}

}  // namespace

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

void check_policies(const Resolved& out) {
  const TrainConfig& config = out.config;
  for (const CompressionSpec& spec : out.compressions) {
    const ResidualPolicy& policy = spec.policy;
    if (policy.momentum > 0 && (config.optimizer != OptimizerKind::sgd || config.momentum != 0)) {
      throw BadInput(fmt::format(
          "--compression {}: momentum={} replaces the optimizer's; add --optimizer sgd --momentum 0",
          spec.to_string(), policy.momentum));
    }
    const char* const option = policy.momentum > 0 ? "momentum" : policy.max_norm > 0 ? "max_norm" : nullptr;
    if (option != nullptr && (config.ranks() == 1 || config.elastic.least == 1)) {
      throw BadInput(
          fmt::format("--compression {}: a single rank does not compress, and so has no {}; use at least 2 "
                      "ranks, also with --elastic, or drop {}",
                      spec.to_string(), option, option));
    }
    const bool whole_mean = policy.momentum > 0 || policy.feedback == ResidualPolicy::Feedback::ef21;
    if (whole_mean && config.shard_optimizer) {
      throw BadInput(fmt::format(
          "--compression {}: {} needs the whole mean on every rank; use ef=on without momentum, or "
          "--shard none",
          spec.to_string(), policy.momentum > 0 ? "momentum" : "ef=ef21"));
    }
  }
}

// Notes that a residual of values that wait for many steps is a momentum already.
void note_second_momentum(const RunOptions& o, Resolved& out) {
  const bool sgd = out.config.optimizer == OptimizerKind::sgd;
  if (o.momentum || out.config.muon || out.config.ranks() == 1) return;
  for (const CompressionSpec& spec : out.compressions) {
    if (!spec.sums_gradients()) continue;
    out.notes.push_back(
        fmt::format("Note: {} with error feedback is more accurate without the optimizer's momentum; try "
                    "--momentum 0{} (docs/formats.md)",
                    spec.to_string(), sgd ? " and 10 times the --lr" : ""));
  }
}

Resolved resolve_machine(const RunOptions& o) {
  Resolved out;
  TrainConfig& config = out.config;
  config = training_settings(o);
  config.model = resolve_model(o);
  resolve_compression(o, out);
  out.buckets_mb = o.bucket_mb.empty() ? std::vector{kDefaultBucketMb} : o.bucket_mb;
  config.bucket_mb = out.buckets_mb[0];
  check_overlap(o);
  config.gather_weights = gather_format(o);
  resolve_devices(o, out);
  resolve_nodes(o, out);
  resolve_elastic(o, out);
  check_schedules(out);
  check_policies(out);
  check_muon(config);
  check_automatic(o, out);
  note_second_momentum(o, out);
  resolve_gradient_group(o, out);
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

JoinOptions join_options(const RunOptions& o) {
  JoinOptions how{.rendezvous = o.rendezvous, .timeout_s = o.timeout_s};
  if (o.link) how.link = EmulatedLink::parse(*o.link);
  return how;
}

std::unique_ptr<Communicator> join(const RunOptions& o, const TrainConfig& config) {
  if (!o.launch || o.launch->world == 1) return nullptr;
  Device device = config.devices[static_cast<size_t>(o.launch->rank)];
  if (device.is_cuda() && o.launch->local_rank >= 0) {
    device = Device::cuda(o.launch->local_rank % cuda_device_count());
  }
  JoinOptions how = join_options(o);
  how.shrinkable = static_cast<bool>(config.elastic);
  how.link = config.link;
  return join(*o.launch, how, device);
}

// Checks the options of a run with --compression auto.

void check_automatic(const RunOptions& o, Resolved& out) {
  if (!out.automatic) return;
  auto refuse = [&](const std::string& flag, const std::string& why) {
    throw BadInput(fmt::format("--compression auto and {} cannot be combined: {}; name a spec, such as int8",
                               flag, why));
  };
  if (o.shard_optimizer) refuse("--shard optimizer", "it predicts allreduces, not reduce-scatters");
  if (o.overlap_forward)
    refuse("--overlap-forward", "it predicts steps whose communication ends before the next forward");
  if (o.elastic) refuse("--elastic", "it predicts a fixed number of ranks");
  if (out.config.bucket_mb != std::floor(out.config.bucket_mb)) {
    throw BadInput(
        fmt::format("--bucket-mb {}: --compression auto needs a whole number of MiB", out.config.bucket_mb));
  }
  if (o.dry_run && out.config.ranks() > 1) {
    out.notes.emplace_back(
        "Note: --compression auto chooses when the run starts; the plan below is for --compression fp32");
  }
}

void drop_automatic_of_one_rank(Resolved& out) {
  if (!out.automatic || out.config.ranks() > 1) return;
  out.automatic.reset();
  out.notes.emplace_back("Note: --compression auto has no effect on a single rank, which sends nothing");
}

}  // namespace gradwire
