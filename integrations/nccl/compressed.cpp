#include "integrations/nccl/compressed.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "collectives/agreement/statements.h"
#include "collectives/codec/codec.h"
#include "collectives/codec/residual.h"
#include "collectives/transport/transport.h"

namespace gradwire::interposer {

CompressedAllReduce::CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings)
    // The transport has no timeout: only the communicator's owner, which has a watchdog, may abort the
    // communicator.
    : settings_(settings),
      device_(device),
      comm_(Communicator::adopt_nccl(comm, device, std::chrono::milliseconds(0))),
      setup_(Stream::create(Device::cuda(device), "set-up")),
      programs_(kMaxPrograms, [this](size_t bytes) { return Buffer::in_order(setup_, bytes); }) {
  const int world = comm_->world();
  if (world == 1) return;
  const double mine = static_cast<double>(settings.fingerprint());
  bool agreed = true;
  for (const auto& theirs : all_gather(comm_->transport(), setup_, {mine}, "settings of the interposer")) {
    agreed = agreed && theirs[0] == mine;
  }
  if (!agreed) {
    description_ = "off: ranks have different GRADWIRE_NCCL_ settings; set the same on all";
    return;
  }
  if (!settings.on) {
    description_ = fmt::format("off: {}", settings.why_off);
    return;
  }
  if (settings.ranks_per_node > 0 && world % settings.ranks_per_node == 0)
    comm_->set_ranks_per_node(settings.ranks_per_node);
  try {
    const ScheduleRequest request = schedule_request(settings.spec);
    planner_.emplace(request, world, comm_->ranks_per_node(), comm_->link_costs(setup_, request),
                     kAutomaticSlices);
  } catch (const BadInput& error) {  // every rank gets the same error
    description_ = fmt::format("off on this communicator: {}", error.what());
    return;
  }
  step_ = make_buffer<uint64_t>(comm_->device(), 1);
  fill_zero(setup_, step_.data(), step_.bytes());
  setup_.synchronize();
  last_ = Event::create(comm_->device());
  ready_ = Event::create(comm_->device());
  usable_ = true;
  description_ = fmt::format(
      "ncclAllReduce of at least {} bytes of float32, sum or avg, is sent as {} over {} ranks; other calls "
      "are unchanged",
      settings.min_bytes, settings.spec.to_string(), world);
}

CompressedAllReduce::~CompressedAllReduce() {
  try {
    if (last_) setup_.wait(last_);  // work in flight uses memory that is freed on this stream
  } catch (...) {                   // the GPU has failed; ignore the error
  }
}

// Returns the program for `key`. Does not block: memory is allocated and freed in the order of setup_, which
// waits for the calls that use the memory.
Program& CompressedAllReduce::program_for(const Key& key, const Stream& stream) {
  if (auto* entry = programs_.find(key)) return *entry->program;
  const auto& [send, receive, count, op] = key;
  setup_.wait(last_);  // work in flight may use memory that an evicted entry frees
  int64_t state_bytes = count * static_cast<int64_t>(sizeof(float));
  for (const auto& entry : programs_.entries()) state_bytes += static_cast<int64_t>(entry.residual.bytes());
  Buffer residual;
  if (settings_.spec.policy.keeps_errors() && !settings_.spec.wire->exact &&
      state_bytes <= settings_.max_state_bytes) {
    residual = Buffer::in_order(setup_, static_cast<size_t>(count) * sizeof(float));
    fill_zero(setup_, residual.data(), residual.bytes());
  }
  const SchedulePlanner::Choice choice = planner_->choose(count, settings_.spec.wire);
  auto program = std::make_unique<Program>(
      comm_->transport(), choice.schedule, ProgramBuffers{send, receive, residual.as<float>(), count},
      Program::Options{.what = "ncclAllReduce",
                       .wire = settings_.spec.wire,
                       .fp32_intra_node = settings_.spec.fp32_intra_node,
                       .scale = op == ncclAvg ? 1.0f / static_cast<float>(comm_->world()) : 1.0f,
                       .rounding = {settings_.spec.rounding, static_cast<uint64_t>(comm_->rank()) + 1,
                                    step_.as<const uint64_t>(), 0},
                       .transfers = comm_->transfers(),
                       .slice_bytes = choice.slice_bytes});
  Program& added = *programs_.add({key, std::move(residual), std::move(program)}).program;
  ready_.record(setup_);
  stream.wait(ready_);
  return added;
}

void CompressedAllReduce::run(const float* send, float* receive, int64_t count, ncclRedOp_t op,
                              cudaStream_t native) {
  const Stream stream = Stream::adopt_cuda(device_, native);
  Program& program = program_for({send, receive, count, op}, stream);
  stream.wait(last_);
  if (float* const residual = program.buffers().residual; settings_.spec.policy.decay != 1 && residual) {
    decay_residual(stream, residual, count, static_cast<float>(settings_.spec.policy.decay));
  }
  program.run(stream);
  increment(stream, step_.as<uint64_t>());
  last_.record(stream);
}

}  // namespace gradwire::interposer
