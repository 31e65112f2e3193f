#include "trainer/train/weight_shards.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/plan/planner.h"
#include "kernels/wire/formats.h"

namespace gradwire {
namespace {

int64_t total(const std::vector<ElementRange>& ranges) {
  int64_t elements = 0;
  for (const ElementRange& range : ranges) elements += range.count();
  return elements;
}

}  // namespace

int64_t WeightShards::master_elements(const TrainConfig& config, const Reducer& reducer) {
  return config.gather_weights->exact ? 0 : total(reducer.owned());
}

WeightShards::WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream,
                           const Reducer& reducer, float* weights)
    : comm_(comm), reducer_(reducer), weights_(weights), owned_(reducer.owned()) {
  if (const int64_t elements = master_elements(config, reducer); elements > 0) {
    masters_ = make_buffer<float>(comm.device(), elements);
    fill_zero(stream, masters_.data(), masters_.bytes());
  }
  weights_programs_ = programs(config, stream, config.gather_weights, "gathering the weights", weights);
  state_programs_ = programs(config, stream, kFp32, "gathering state for a checkpoint", nullptr);
  size_t bytes = 0;
  for (const auto* list : {&weights_programs_, &state_programs_}) {
    for (const auto& program : *list) bytes = std::max(bytes, program->workspace_bytes());
  }
  workspace_ = Buffer(comm.device(), bytes);
  for (auto* list : {&weights_programs_, &state_programs_}) {
    for (auto& program : *list) program->bind(workspace_.data());
  }
}

std::vector<std::unique_ptr<Program>> WeightShards::programs(const TrainConfig& config, const Stream& stream,
                                                             Wire wire, const char* what, float* to) const {
  ScheduleRequest request = schedule_request(config.compression);
  request.collective = Collective::all_gather;
  const bool choice = request.kind == ScheduleKind::automatic && comm_.world() > 2;
  const SchedulePlanner planner(request, comm_.world(), comm_.ranks_per_node(),
                                choice ? comm_.link_costs(stream) : LinkCosts{}, 0);
  std::vector<std::unique_ptr<Program>> made;
  int64_t packed = 0;
  for (size_t b = 0; b < reducer_.ranges().size(); ++b) {
    const BucketRange& bucket = reducer_.ranges()[b];
    const Shards shards = reducer_.shards(bucket);
    const bool in_place = to != nullptr && !masters_;
    made.push_back(std::make_unique<Program>(
        comm_.transport(), planner.choose(bucket.elements(), wire, shards).schedule,
        ProgramBuffers{.in = in_place   ? to + owned_[b].begin
                             : masters_ ? masters_.as<float>() + packed
                                        : to,
                       .out = to == nullptr ? nullptr : to + bucket.begin,
                       .count = bucket.elements(),
                       .shards = shards},
        Program::Options{.what = fmt::format("{}, bucket {} of {}", what, b + 1, reducer_.ranges().size()),
                         .wire = wire,
                         .fp32_intra_node = config.compression.fp32_intra_node,
                         .spec = wire->name}));
    packed += owned_[b].count();
  }
  return made;
}

uint64_t WeightShards::sum_of_bytes(const std::vector<std::unique_ptr<Program>>& programs) {
  uint64_t bytes = 0;
  for (const auto& program : programs) bytes += static_cast<uint64_t>(program->info().bytes_sent);
  return bytes;
}

void WeightShards::take_weights(const Stream& stream) {
  if (!masters_) return;
  scatter(stream, weights_, masters_.as<float>());
  for (auto& program : weights_programs_) program->run(stream);
}

void WeightShards::step(const Stream& stream, Optimizer& optimizer, const float* gradients) {
  if (masters_) {
    optimizer.step_packed(stream, masters_.as<float>(), gradients);
  } else {
    optimizer.step(stream, weights_, gradients);
  }
  for (auto& program : weights_programs_) program->run(stream);
}

void WeightShards::gather(const Stream& stream, const float* packed, float* flat) {
  for (size_t b = 0; b < state_programs_.size(); ++b) {
    state_programs_[b]->rebind(packed, flat + reducer_.ranges()[b].begin);
    state_programs_[b]->run(stream);
    packed += owned_[b].count();
  }
  stream.synchronize();  // before the next rebind
}

void WeightShards::scatter(const Stream& stream, const float* flat, float* packed) const {
  for (const ElementRange& range : owned_) {
    copy(stream, packed, flat + range.begin, static_cast<size_t>(range.count()) * sizeof(float));
    packed += range.count();
  }
}

}  // namespace gradwire
