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
  const bool in_place = config.gather_weights->exact && !config.divides(Sharding::full);
  return in_place ? 0 : total(reducer.owned());
}

WeightShards::WeightShards(const TrainConfig& config, Communicator& comm, const Stream& stream,
                           const Reducer& reducer, Vit& model)
    : comm_(comm), stream_(stream), reducer_(reducer), model_(model), owned_(reducer.owned()) {
  if (const int64_t elements = master_elements(config, reducer); elements > 0) {
    masters_ = make_buffer<float>(comm.device(), elements);
    fill_zero(stream, masters_.data(), masters_.bytes());
  }
  const bool full = config.divides(Sharding::full);
  auto* const weights = model.weights().as<float>();
  weights_programs_ = programs(
      config, {.wire = config.gather_weights,
               .what = "the weights",
               .to =
                   [&, full](size_t b) {
                     return weights + (full ? WeightWindow::offset(reducer, b) : reducer.ranges()[b].begin);
                   },
               .transfers = full ? comm.transfers() : Stream()});
  state_programs_ = programs(config, {.wire = kFp32, .what = "the state for a checkpoint"});
  weights_workspace_ = bind(weights_programs_);
  state_workspace_ = bind(state_programs_);
  if (full) window_.emplace(comm, stream, reducer, model, weights_programs_, state_programs_);
}

WeightShards::Programs WeightShards::programs(const TrainConfig& config, const Gather& gather) const {
  ScheduleRequest request = schedule_request(config.compression);
  request.collective = Collective::all_gather;
  const bool choice = request.kind == ScheduleKind::automatic && comm_.world() > 2;
  const SchedulePlanner planner(request, comm_.world(), comm_.ranks_per_node(),
                                choice ? comm_.link_costs(stream_) : LinkCosts{}, 0);
  Programs made;
  int64_t packed = 0;
  for (size_t b = 0; b < reducer_.ranges().size(); ++b) {
    const BucketRange& bucket = reducer_.ranges()[b];
    const Shards shards = reducer_.shards(bucket);
    float* const to = gather.to ? gather.to(b) : nullptr;
    const float* from = masters_ ? masters_.as<float>() + packed : nullptr;
    if (to != nullptr && !masters_) from = to + (owned_[b].begin - bucket.begin);
    made.push_back(std::make_unique<Program>(
        comm_.transport(), planner.choose(bucket.elements(), gather.wire, shards).schedule,
        ProgramBuffers{.in = from, .out = to, .count = bucket.elements(), .shards = shards},
        Program::Options{
            .what = fmt::format("{}, bucket {} of {}", gather.what, b + 1, reducer_.ranges().size()),
            .wire = gather.wire,
            .fp32_intra_node = config.compression.fp32_intra_node,
            .spec = gather.wire->name,
            .transfers = gather.transfers,
            .beside_others = static_cast<bool>(gather.transfers)}));
    packed += owned_[b].count();
  }
  return made;
}

Buffer WeightShards::bind(Programs& programs) const {
  size_t bytes = 0;
  for (const auto& program : programs) bytes = std::max(bytes, program->workspace_bytes());
  Buffer workspace(comm_.device(), bytes);
  for (auto& program : programs) program->bind(workspace.data());
  return workspace;
}

void WeightShards::take_weights(const float* flat) {
  if (masters_) scatter(flat, masters_.as<float>());
  if (window_) return window_->changed();
  if (masters_) gather_weights();
  model_.round_weights();
}

void WeightShards::step(Optimizer& optimizer, Parts<const float> gradients) {
  const Parts<float> own =
      masters_ ? Parts<float>{masters_.as<float>(), true} : Parts<float>{model_.weights().as<float>()};
  optimizer.step(stream_, own, gradients);
  if (window_) return window_->changed();
  gather_weights();
  model_.round_weights();
}

void WeightShards::gather_weights() {
  for (auto& program : weights_programs_) program->run(stream_);
}

void WeightShards::begin_step() {
  if (window_) before_ = {window_->bytes_sent(), window_->dense_bytes()};
}

WeightShards::Sent WeightShards::sent() const {
  if (window_) return {window_->bytes_sent() - before_.wire, window_->dense_bytes() - before_.dense};
  auto sum = [](const Programs& programs) {
    uint64_t bytes = 0;
    for (const auto& program : programs) bytes += static_cast<uint64_t>(program->info().bytes_sent);
    return bytes;
  };
  return {sum(weights_programs_), sum(state_programs_)};
}

void WeightShards::visit(const std::function<void(const float* weights, int64_t count)>& each) {
  if (window_) return window_->visit(each);
  each(model_.weights().as<const float>(), reducer_.elements());
}

void WeightShards::gather(const float* packed, float* scratch, float* flat) {
  if (window_) window_->synchronize();  // the exchanges of one, then of the other, on every rank
  for (size_t b = 0; b < state_programs_.size(); ++b) {
    const BucketRange& bucket = reducer_.ranges()[b];
    state_programs_[b]->rebind(packed, scratch);
    state_programs_[b]->run(stream_);
    if (flat != nullptr) {
      copy(stream_, flat + bucket.begin, scratch, static_cast<size_t>(bucket.elements()) * sizeof(float));
    }
    stream_.synchronize();  // before the next rebind
    packed += owned_[b].count();
  }
}

void WeightShards::scatter(const float* flat, float* packed) const {
  for (const ElementRange& range : owned_) {
    copy(stream_, packed, flat + range.begin, static_cast<size_t>(range.count()) * sizeof(float));
    packed += range.count();
  }
}

}  // namespace gradwire
