#include "trainer/train/weight_shards.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/plan/planner.h"
#include "kernels/wire/format.h"

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
  ScheduleRequest request = schedule_request(config.compression);
  request.collective = Collective::all_gather;
  const SchedulePlanner planner(request, comm_.world(), comm_.ranks_per_node(),
                                comm_.link_costs(stream_, request), 0);
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

}  // namespace gradwire
