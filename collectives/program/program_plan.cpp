#include "collectives/program/program_plan.h"

#include <fmt/format.h>

#include <bit>
#include <utility>

#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

// Returns whether the transport's own allreduce carries out the schedule.
bool library_serves(Transport& transport, const Schedule& schedule, const Program::Options& options) {
  if (schedule.kind != ScheduleKind::nccl || transport.world() == 1) return false;
  if (!options.wire->exact) {
    throw BadInput(
        fmt::format("{}: schedule=nccl adds FP32, not {}; use wire format fp32, or another schedule",
                    options.what, options.wire->name));
  }
  if (const std::string obstacle = transport.native_allreduce_obstacle(); !obstacle.empty())
    throw BadInput(fmt::format("{}: schedule=nccl: {}", options.what, obstacle));
  return true;
}

const char* plural_of(DType dtype) {
  return dtype == DType::f32 ? "floats" : dtype == DType::bf16 ? "BF16 values" : "FP16 values";
}

}  // namespace

ProgramPlan::ProgramPlan(Transport& t, const Schedule& s, const ProgramBuffers& buffers, Program::Options o)
    : transport(t),
      options(std::move(o)),
      count(buffers.count),
      dtype(buffers.dtype),
      shards(buffers.shards),
      uses_library(library_serves(t, s, options)),
      slices(options.transfers && !uses_library
                 ? Program::slices_for(s, count, options.wire, options.slice_bytes, shards)
                 : 1),
      overlapped(options.transfers && (slices > 1 || options.beside_others)),
      schedule(slices > 1 ? pipelined(s, slices) : s),
      ranges(chunk_ranges(schedule, count, shards, options.wire->granularity)),
      call(describe()) {
  if (schedule.world != transport.world()) {
    throw BadInput(fmt::format("{}: a schedule for {} ranks on a transport of {}", options.what,
                               schedule.world, transport.world()));
  }
  if (options.wire->registered && transport.device().is_cuda()) {
    throw BadInput(
        fmt::format("{}: wire format '{}' was registered with callbacks for the host, and the "
                    "communicator is on {}",
                    options.what, options.wire->name, transport.device().name()));
  }
}

int64_t ProgramPlan::elements_in() const {
  const bool from_owners =
      schedule.collective == Collective::all_gather || schedule.collective == Collective::broadcast;
  return from_owners ? elements_owned(schedule, rank(), count, options.wire->granularity, shards) : count;
}

int64_t ProgramPlan::elements_out() const {
  return schedule.collective == Collective::reduce_scatter
             ? elements_owned(schedule, rank(), count, options.wire->granularity, shards)
             : count;
}

Call ProgramPlan::describe() const {
  uint64_t hash = mix(1 + static_cast<uint64_t>(schedule.collective), static_cast<uint64_t>(count));
  hash = mix(hash, static_cast<uint64_t>(options.rounding.mode));
  hash = mix(hash, std::bit_cast<uint32_t>(options.scale));
  hash = mix(hash, (options.fp32_intra_node ? 1 : 0) + 2 * static_cast<uint64_t>(dtype));
  hash = mix(hash, static_cast<uint64_t>(options.wire->bytes(count)));
  hash = mix(hash, static_cast<uint64_t>(options.wire->granularity));
  for (char c : std::string(options.wire->name) + "\n" + options.what + "\n" + options.spec) {
    hash = mix(hash, static_cast<uint64_t>(c));
  }
  hash = mix(hash, static_cast<uint64_t>(schedule.chunks) * 16 + static_cast<uint64_t>(schedule.kind));
  for (int64_t shard : shards) hash = mix(hash, static_cast<uint64_t>(shard));
  for (int32_t owner : schedule.owner) hash = mix(hash, static_cast<uint64_t>(owner));
  for (const auto& rounds : schedule.rounds) {
    for (const Round& round : rounds) {
      hash = mix(hash, round.size());
      for (const Step& s : round) {
        hash = mix(hash, static_cast<uint64_t>(s.chunk) << 32 | static_cast<uint64_t>(s.peer) << 8 |
                             static_cast<uint64_t>(s.kind) << 1 | static_cast<uint64_t>(s.intra_node));
      }
    }
  }
  const std::string wire = options.wire->name;
  const std::string spec = options.spec.empty() || options.spec == wire ? "" : ", " + options.spec;
  return {hash, fmt::format("{} of {} ({} {}, {}, {}{})", name(schedule.collective), options.what, count,
                            plural_of(dtype), options.wire->registered ? options.wire->identity() : wire,
                            name(schedule.kind), spec)};
}

}  // namespace gradwire
