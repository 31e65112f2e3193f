#include "collectives/program/program.h"

#include <algorithm>

#include "collectives/program/executor.h"
#include "kernels/wire/fp16.h"
#include "runtime/util/error.h"

namespace gradwire {

Program::Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers,
                 Options options)
    : plan_(std::make_unique<const ProgramPlan>(transport, schedule, buffers, std::move(options))),
      buffers_(buffers),
      executor_(std::make_unique<ProgramExecutor>(*plan_, memory(nullptr))),
      workspace_bytes_(wide_bytes_ + executor_->workspace_bytes()) {}

Program::~Program() = default;

const ProgramInfo& Program::info() const {
  return executor_->info();
}

int Program::slices_for(const Schedule& schedule, int64_t count, Wire wire, int64_t slice_bytes,
                        const Shards& shards) {
  if (slice_bytes <= 0 || schedule.num_rounds() == 0) return 1;
  int64_t largest = (count + schedule.chunks - 1) / schedule.chunks;
  if (!shards.empty()) {
    largest = 0;
    for (ChunkRange range : chunk_ranges(schedule, count, shards, wire->granularity)) {
      largest = std::max(largest, range.count());
    }
  }
  const int64_t bytes = wire->bytes(largest);
  return static_cast<int>(std::clamp<int64_t>((bytes + slice_bytes - 1) / slice_bytes, 1, kMostSlices));
}

void Program::bind(void* workspace) {
  workspace_ = static_cast<std::byte*>(workspace);
  bound_ = true;
  bind_executor();
}

void Program::rebind(const void* in, void* out) {
  buffers_.in = in;
  buffers_.out = out;
  bind_executor();
}

void Program::rebind_residual(float* residual) {
  buffers_.residual = residual;
  bind_executor();
}

void Program::bind_executor() {
  if (bound_) executor_->bind(memory(workspace_));
}

// Returns the program's memory. Places the widened buffers at the beginning of the workspace.
ProgramMemory Program::memory(std::byte* workspace) {
  const auto begin = reinterpret_cast<uintptr_t>(workspace);
  wide_bytes_ = 0;
  if (widens()) {
    auto wide = [&](int64_t elements) {
      auto* place = reinterpret_cast<float*>(begin + wide_bytes_);
      wide_bytes_ += (static_cast<size_t>(elements) * sizeof(float) + 255) / 256 * 256;
      return place;
    };
    wide_in_ = wide(plan_->elements_in());
    const bool in_place = plan_->schedule.collective == Collective::allreduce;
    wide_out_ = in_place ? wide_in_ : wide(plan_->elements_out());
  }
  return {.in = widens() ? wide_in_ : static_cast<const float*>(buffers_.in),
          .out = widens() ? wide_out_ : static_cast<float*>(buffers_.out),
          .residual = buffers_.residual,
          .workspace = begin + wide_bytes_};
}

void Program::run(const Stream& stream, BucketPhases* phases) {
  if (!bound_ && workspace_bytes_ > 0) throw Error(plan_->options.what + ": Program::run before bind");
  if (widens()) widen(stream, buffers_.dtype, buffers_.in, wide_in_, plan_->elements_in());
  executor_->run(stream, phases);
  if (widens()) narrow(stream, buffers_.dtype, wide_out_, buffers_.out, plan_->elements_out());
}

}  // namespace gradwire
