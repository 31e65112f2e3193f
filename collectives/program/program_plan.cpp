#include "collectives/program/program_plan.h"

#include <fmt/format.h>

#include <bit>
#include <utility>

#include "kernels/wire/part_scale.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

std::shared_ptr<MappedPeers> open_windows(Transport& transport, const Schedule& schedule, int64_t count,
                                          const Shards& shards, const Program::Options& options) {
  const Execution execution = schedule.execution;
  if (execution == Execution::messages || execution == Execution::library || transport.world() == 1)
    return nullptr;
  const bool shared = static_cast<bool>(options.transfers);
  if (execution == Execution::node_peer_access) {
    if (schedule.kind != ScheduleKind::hierarchical || schedule.collective != Collective::allreduce) {
      throw BadInput(fmt::format("{}: peer access inside nodes needs a hierarchical allreduce, not a {} {}",
                                 options.what, name(schedule.kind), name(schedule.collective)));
    }
    if (schedule.per_node == 1 || !transport.peer_access_obstacle(schedule.per_node).empty()) return nullptr;
    const auto chunks = chunk_ranges(schedule, count, shards, options.wire->granularity);
    return transport.peer_access()->open(peer_memory_offsets(chunks, options).back(), shared,
                                         schedule.per_node);
  }
  if (!transport.peer_access_obstacle().empty()) return nullptr;
  if (schedule.collective != Collective::allreduce || schedule.kind != ScheduleKind::two_shot ||
      schedule.world != transport.world()) {
    throw BadInput(fmt::format("{}: one kernel can only carry out a two-shot allreduce of all {} ranks",
                               options.what, transport.world()));
  }
  FusedAllreduce call = fused_call(transport, schedule, count, shards, options);
  return transport.peer_access()->open(lay_out(call, options.wire), shared);
}

// Returns whether the transport's own allreduce carries out the schedule.
bool uses_library(Transport& transport, const Schedule& schedule, const Program::Options& options) {
  if (schedule.execution != Execution::library || transport.world() == 1) return false;
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
      windows(open_windows(t, s, count, shards, options)),
      execution(windows || uses_library(t, s, options) ? s.execution : Execution::messages),
      slices(options.transfers && execution == Execution::messages
                 ? Program::slices_for(s, count, options.wire, options.slice_bytes, shards)
                 : 1),
      overlapped(options.transfers && (slices > 1 || options.beside_others || windows)),
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
  hash = mix(hash, static_cast<uint64_t>(execution));
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

FusedAllreduce fused_call(const Transport& transport, const Schedule& schedule, int64_t count,
                          const Shards& shards, const Program::Options& options) {
  const auto ranges = chunk_ranges(schedule, count, shards, options.wire->granularity);
  FusedAllreduce call;
  call.peers.rank = transport.rank();
  call.peers.world = transport.world();
  // One shot would need the seeds of the other ranks' random bits. Exchanging the seeds is not worthwhile.
  const bool random = options.rounding.mode == Rounding::stochastic && !options.wire->exact;
  call.one_shot = schedule.execution == Execution::one_shot_kernel && !random;
  call.part_scale = part_scale_for(options.scale);
  call.scale = options.scale / call.part_scale;
  call.rounding = options.rounding;
  for (size_t c = 0; c < ranges.size(); ++c) call.begin[c] = ranges[c].begin;
  call.begin[ranges.size()] = count;
  return call;
}

std::vector<int64_t> peer_memory_offsets(const std::vector<ChunkRange>& chunks,
                                         const Program::Options& options) {
  const Wire wire = options.fp32_intra_node ? kFp32 : options.wire;
  std::vector<int64_t> offsets = {0};
  for (ChunkRange range : chunks)
    offsets.push_back(offsets.back() + (wire->bytes(range.count()) + 255) / 256 * 256);
  return offsets;
}

}  // namespace gradwire
