#include "trainer/train/memory_plan.h"

#include <fmt/format.h>

#include <map>
#include <memory>

#include "collectives/communicator/communicator.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "trainer/log/console.h"
#include "trainer/model/vit.h"
#include "trainer/train/evaluator.h"
#include "trainer/train/layout.h"
#include "trainer/train/snapshots.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

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
    throw BadInput(
        fmt::format("the control group allows each rank {}; weights, gradients and optimizer take {}",
                    human_bytes(static_cast<double>(limit)), human_bytes(static_cast<double>(least))));
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

namespace {

// Returns a line about the control group's limit, or the GPU of this process's ranks with the least free
// memory for each rank; "" without either. Processes do not know each other's GPUs.
std::string room_text(const TrainConfig& config, int64_t needed) {
  std::map<int, int64_t> ranks;  // by device index
  for (Device device : config.devices) {
    if (device.is_cuda() && !config.processes) ++ranks[device.index];
  }
  std::string of = "Allowed by the control group";
  int64_t least = host_limit(config);
  for (const auto& [index, count] : ranks) {
    const Device device = Device::cuda(index);
    const auto free = static_cast<int64_t>(device_memory(device).free);
    if (least > 0 && free / count >= least) continue;
    least = free / count;
    of = "Free on " + device.name();
  }
  if (least == 0) return "";
  return fmt::format("\n{}: {} per rank{}", of, human_bytes(static_cast<double>(least)),
                     needed <= least ? "" : ", which is not enough: use --shard or a smaller --batch-size");
}

}  // namespace

std::string memory_text(const TrainConfig& config, const RunMemory& memory) {
  auto text = [](int64_t bytes) { return human_bytes(static_cast<double>(bytes)); };
  const ReducerMemory& extra = memory.compression;
  return fmt::format(
      "Memory per rank: {} model and activations, {} gradients, {} optimizer, {} evaluation\n"
      "Extra memory for {}: {} ({} residual, {} factors, {} staging){}{}",
      text(memory.model), text(memory.gradients), text(memory.optimizer), text(memory.evaluation),
      config.compression.to_string(), text(extra.total()), text(extra.residual), text(extra.factors),
      text(extra.staging),
      memory.kept > 0
          ? fmt::format("\nFor --elastic: {}, the state after the last two steps", text(memory.kept))
          : "",
      room_text(config, memory.total()));
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
  throw BadInput(fmt::format(
      "{}{}: each rank needs {} ({} model and activations, {} gradients, {} "
      "optimizer, {} evaluation, {} for {}{}){}",
      config.memory_limit > 0 ? "--memory-limit " : "the control group allows each rank ", text(limit),
      text(memory.total()), text(memory.model), text(memory.gradients), text(memory.optimizer),
      text(memory.evaluation), text(memory.compression.total()), config.compression.to_string(),
      memory.kept > 0 ? fmt::format(", {} for --elastic", text(memory.kept)) : "", remedy));
}

}  // namespace gradwire
