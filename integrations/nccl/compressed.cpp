#include "integrations/nccl/compressed.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "collectives/agreement/all_gather.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/transport.h"

namespace gradwire::interposer {

CompressedAllReduce::CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings)
    // Not watched: whoever owns the communicator has a watchdog, and alone may abort it.
    : settings_(settings),
      device_(device),
      comm_(Communicator::adopt_nccl(comm, device, std::chrono::milliseconds(0))),
      setup_(Stream::create(Device::cuda(device), "set-up")) {
  const int world = comm_->world();
  if (world == 1) return;
  const double mine = static_cast<double>(settings.fingerprint());
  bool agreed = true;
  for (const auto& theirs : all_gather(comm_->transport(), setup_, {mine}, "settings of the interposer")) {
    agreed = agreed && theirs[0] == mine;
  }
  if (!agreed) {
    description_ = "ranks differ in their GRADWIRE_NCCL_ settings, so nothing is changed";
    return;
  }
  if (!settings.on) {
    description_ = "off: " + settings.why_off;
    return;
  }
  if (settings.ranks_per_node > 0 && world % settings.ranks_per_node == 0)
    comm_->set_ranks_per_node(settings.ranks_per_node);
  std::string reason;
  try {
    schedule_ = make_schedule(settings.spec.schedule, world, settings.spec.wire, &reason,
                              {.nodes = 0, .per_node = comm_->ranks_per_node()});
  } catch (const BadInput& error) {  // the same on every rank
    description_ = std::string("off on this communicator: ") + error.what();
    return;
  }
  step_ = make_buffer<uint64_t>(comm_->device(), 1);
  fill_zero(setup_, step_.data(), step_.bytes());
  setup_.synchronize();
  last_ = Event::create(comm_->device());
  usable_ = true;
  description_ = "ncclAllReduce of float32 sum and avg from " + std::to_string(settings.min_bytes) +
                 " bytes on goes as " + settings.spec.to_string() + " over " + name(schedule_.kind) + ", " +
                 std::to_string(world) + " ranks; everything else is untouched";
}

CompressedAllReduce::Place& CompressedAllReduce::place_for(const float* send, float* receive, int64_t count,
                                                           ncclRedOp_t op) {
  auto at = std::find_if(places_.begin(), places_.end(),
                         [&](const Place& p) { return p.is(send, receive, count, op); });
  if (at != places_.end()) {
    places_.splice(places_.begin(), places_, at);
    return places_.front();
  }
  // From here on memory changes hands, which work in flight may use.
  last_.synchronize();
  if (places_.size() >= kPlaces) {
    state_bytes_ -= static_cast<int64_t>(places_.back().residual.bytes());
    places_.pop_back();
  }
  Place place;
  place.send = send;
  place.receive = receive;
  place.count = count;
  place.op = op;
  const auto bytes = count * static_cast<int64_t>(sizeof(float));
  if (settings_.spec.error_feedback && settings_.spec.wire != Wire::fp32 &&
      state_bytes_ + bytes <= settings_.max_state_bytes) {
    place.residual = make_buffer<float>(comm_->device(), count);
    fill_zero(setup_, place.residual.data(), place.residual.bytes());
    setup_.synchronize();
    state_bytes_ += bytes;
  }
  const auto world = static_cast<float>(comm_->world());
  place.program = std::make_unique<Allreduce>(
      comm_->transport(), schedule_, receive, place.residual.as<float>(), count,
      Allreduce::Options{.what = "ncclAllReduce",
                         .wire = settings_.spec.wire,
                         .exact_inside = settings_.spec.exact_inside,
                         .scale = op == ncclAvg ? 1.0f / world : 1.0f,
                         .rounding = {settings_.spec.rounding, static_cast<uint64_t>(comm_->rank()) + 1,
                                      step_.as<const uint64_t>(), 0}});
  if (place.program->workspace_bytes() > workspace_.bytes()) {
    workspace_ = Buffer(comm_->device(), place.program->workspace_bytes());
    for (Place& other : places_) other.program->bind(workspace_.data());
  }
  place.program->bind(workspace_.data());
  places_.push_front(std::move(place));
  return places_.front();
}

void CompressedAllReduce::run(const float* send, float* receive, int64_t count, ncclRedOp_t op,
                              cudaStream_t native) {
  const Stream stream = Stream::adopt_cuda(device_, native);
  Place& place = place_for(send, receive, count, op);
  stream.wait(last_);
  if (send != receive) copy(stream, receive, send, static_cast<size_t>(count) * sizeof(float));
  place.program->run(stream);
  increment(stream, step_.as<uint64_t>());
  last_.record(stream);
}

}  // namespace gradwire::interposer
