#include "trainer/train/weight_shards.h"

#include <algorithm>
#include <map>
#include <memory>

#include "collectives/communicator/communicator.h"
#include "collectives/plan/planner.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/format.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "trainer/log/console.h"
#include "trainer/model/vit.h"
#include "trainer/train/rank.h"
#include "trainer/train/snapshots.h"

namespace gradwire {

int64_t WeightShards::master_elements(const TrainConfig& config, const Reducer& reducer) {
  if (config.gather_weights->exact) return 0;
  int64_t elements = 0;
  for (const ElementRange& range : reducer.owned()) elements += range.count();
  return elements;
}

WeightShards::WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream,
                           const Reducer& reducer, Vit& model)
    : comm_(comm),
      stream_(stream),
      reducer_(reducer),
      model_(model),
      owned_(reducer.owned()),
      masters_(make_buffer<float>(comm.device(), master_elements(config, reducer))),
      gathers_(programs(config, config.gather_weights)),
      dense_(programs(config, kFp32)) {
  fill_zero(stream, masters_.data(), masters_.bytes());
  stream.synchronize();  // waits before an exception can free the memory
  size_t bytes = 0;
  for (const auto& gather : gathers_) bytes = std::max(bytes, gather->workspace_bytes());
  workspace_ = Buffer(comm.device(), bytes);
  for (const auto& gather : gathers_) gather->bind(workspace_.data());
}

WeightShards::Programs WeightShards::programs(const TrainConfig& config, const Wire& wire) const {
  const CompressionSpec& spec = config.compression;
  const SchedulePlanner planner(spec, Collective::all_gather, comm_.world(), comm_.ranks_per_node(),
                                comm_.link_costs(stream_, spec.schedule), 0);
  Programs made;
  int64_t packed = 0;
  for (size_t b = 0; b < reducer_.ranges().size(); ++b) {
    const BucketRange& bucket = reducer_.ranges()[b];
    const Shards shards = reducer_.shards(bucket);
    float* const to = model_.weights().as<float>() + bucket.begin;
    const float* from = masters_ ? masters_.as<float>() + packed : to + (owned_[b].begin - bucket.begin);
    made.push_back(std::make_unique<Program>(
        comm_.transport(), planner.choose(bucket.elements(), wire, shards).schedule,
        ProgramBuffers{.in = from, .out = to, .count = bucket.elements(), .shards = shards},
        Program::Options{.what = fmt::format("the weights, bucket {} of {}", b + 1, reducer_.ranges().size()),
                         .wire = wire,
                         .fp32_intra_node = config.compression.fp32_intra_node,
                         .spec = wire->name}));
    packed += owned_[b].count();
  }
  return made;
}

Parts<float> WeightShards::weights() const {
  const Buffer& buffer = masters_ ? masters_ : model_.weights();
  return {buffer.as<float>(), static_cast<bool>(masters_)};
}

void WeightShards::share_weights() {
  for (const auto& gather : gathers_) gather->run(stream_);
  model_.round_weights();
}

void WeightShards::take_weights(const float* flat) {
  const Parts<float> to = weights();
  int64_t packed = 0;
  for (const ElementRange& range : owned_) {
    copy(stream_, to.data + (to.packed ? packed : range.begin), flat + range.begin,
         static_cast<size_t>(range.count()) * sizeof(float));
    packed += range.count();
  }
  share_weights();
}

WeightShards::Sent WeightShards::sent() const {
  auto sum = [](const Programs& programs) {
    uint64_t bytes = 0;
    for (const auto& program : programs) bytes += static_cast<uint64_t>(program->info().bytes_sent);
    return bytes;
  };
  return {sum(gathers_), sum(dense_)};
}

namespace {

// Returns the bytes that the control group allows each rank of this process on the host, or 0.
int64_t host_limit(const TrainConfig& config) {
  return config.devices.front().is_host() ? memory_by_limit() / (config.processes ? 1 : config.ranks()) : 0;
}

}  // namespace

RunMemory plan_memory(const TrainConfig& config) {
  const int64_t moments = config.optimizer == OptimizerKind::adamw ? 2 : config.momentum != 0 ? 1 : 0;
  const int64_t least = (2 + moments) * count_elements(vit_parameters(config.model)) * int64_t{sizeof(float)};
  const int64_t limit = config.memory_limit > 0 || config.shard_optimizer ? 0 : host_limit(config);
  if (limit > 0 && least > limit) {  // planning would end like the run
    throw BadInput("the control group allows each rank {}; weights, gradients and optimizer take {}",
                   human_bytes(static_cast<double>(limit)), human_bytes(static_cast<double>(least)));
  }
  Communicator comm(std::make_unique<PlannedTransport>(0, config.ranks(), Device::host()));
  comm.set_link_costs({});  // the planned run has no peers to measure
  const Stream stream = Stream::immediate_host();
  const Reducer reducer(comm, config.compression, gradient_tensors(config.model), reducer_options(config));
  const Vit model(config.model, stream, reducer_layout(reducer),
                  {.max_batch = config.batch_size,
                   .precision = config.precision,
                   .fused_attention = fuses_attention(config.devices.front(), config.model, config.precision),
                   .groups = gradient_groups(config, config.devices.front(), config.ranks())});
  const int64_t muon = config.muon ? 2 * reducer.elements() : 0;
  int64_t owned = 0;
  for (const ElementRange& range : reducer.owned()) owned += range.count();
  const int64_t masters = config.divides_optimizer() ? WeightShards::master_elements(config, reducer) : 0;
  int64_t codecs = 0;
  for (const TensorState& state : reducer.tensor_state()) codecs += state.bytes();
  const int64_t loaded_batches = config.graph ? 2 * config.accumulate : 2;  // as in RankTrainer's loader
  const int64_t image = int64_t{config.model.channels} * config.model.image * config.model.image;
  const int64_t images =
      loaded_batches * config.batch_size * (image + 1) * static_cast<int64_t>(sizeof(float));
  int64_t evaluation = 0;
  if (config.eval_every > 0) evaluation = Evaluator::bytes(config, stream, model);
  return {.model = model.bytes() + images,
          .gradients = static_cast<int64_t>(reducer.gradients().bytes()),
          .optimizer = (moments * owned + masters + muon) * static_cast<int64_t>(sizeof(float)),
          .compression = reducer.memory(),
          .kept = config.elastic && !config.divides_optimizer()
                      ? Snapshots::bytes(reducer.elements(), moments, codecs)
                      : 0,
          .evaluation = evaluation};
}

std::string memory_text(const TrainConfig& config, const RunMemory& memory) {
  auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const ReducerMemory& extra = memory.compression;
  // The control group's limit, or the GPU of this process's ranks with the least free memory for each rank.
  // Processes do not know each other's GPUs.
  std::map<int, int64_t> ranks;  // by device index
  for (Device device : config.devices) {
    if (device.is_cuda() && !config.processes) ++ranks[device.index];
  }
  std::string room = "Allowed by the control group";
  int64_t least = host_limit(config);
  for (const auto& [index, count] : ranks) {
    const Device device = Device::cuda(index);
    const auto free = static_cast<int64_t>(device_memory(device).free);
    if (least > 0 && free / count >= least) continue;
    least = free / count;
    room = "Free on " + device.name();
  }
  const bool enough = memory.total() <= least;
  return fmt::format(
      "Memory per rank: {} model and activations, {} gradients, {} optimizer, {} evaluation\n"
      "Extra memory for {}: {} ({} residual, {} factors, {} staging){}{}",
      text(memory.model), text(memory.gradients), text(memory.optimizer), text(memory.evaluation),
      config.compression.to_string(), text(extra.total()), text(extra.residual), text(extra.factors),
      text(extra.staging),
      memory.kept > 0
          ? fmt::format("\nFor --elastic: {}, the state after the last two steps", text(memory.kept))
          : "",
      least == 0 ? ""
                 : fmt::format("\n{}: {} per rank{}", room, text(least),
                               enough ? "" : ", which is not enough: use --shard or a smaller --batch-size"));
}

void check_memory_limit(const TrainConfig& config) {
  const int64_t limit = config.memory_limit > 0 ? config.memory_limit : host_limit(config);
  if (limit == 0) return;
  auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const RunMemory memory = plan_memory(config);
  if (memory.total() <= limit) return;
  std::string remedy = "; give it more ranks, a smaller --batch-size or model, or --eval-every 0";
  const bool only_whole = config.elastic && config.checkpoint_directory.empty();
  if (!config.shard_optimizer && config.ranks() > 1 && !only_whole) {
    TrainConfig sharded = config;
    sharded.shard_optimizer = true;
    const int64_t less = plan_memory(sharded).total();
    remedy = fmt::format("; --shard optimizer would need {}{}", text(less),
                         less <= limit ? "" : ", which is too much as well");
  }
  throw BadInput(
      "{}{}: each rank needs {} ({} model and activations, {} gradients, {} "
      "optimizer, {} evaluation, {} for {}{}){}",
      config.memory_limit > 0 ? "--memory-limit " : "the control group allows each rank ", text(limit),
      text(memory.total()), text(memory.model), text(memory.gradients), text(memory.optimizer),
      text(memory.evaluation), text(memory.compression.total()), config.compression.to_string(),
      memory.kept > 0 ? fmt::format(", {} for --elastic", text(memory.kept)) : "", remedy);
}

}  // namespace gradwire
