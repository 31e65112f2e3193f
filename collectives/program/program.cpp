#include "collectives/program/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "collectives/program/compiler.h"
#include "kernels/wire/fp16.h"
#include "runtime/util/error.h"
#include "runtime/util/mix.h"

namespace gradwire {
namespace {

// Returns whether one transfer writes memory that the other reads or writes.
bool collide(const Transfer& a, const Transfer& b) {
  if (a.kind == Transfer::Kind::send && b.kind == Transfer::Kind::send) return false;
  const auto begin = [](const Transfer& t) { return reinterpret_cast<uintptr_t>(t.data); };
  return begin(a) < begin(b) + b.bytes && begin(b) < begin(a) + a.bytes;
}

// Returns the bytes of this rank's window that other ranks read.
int64_t bytes_read(const FusedAllreduce& call, Wire wire) {
  const int world = call.peers.world, rank = call.peers.rank;
  int64_t others = 0;  // this rank's parts of other ranks' chunks
  for (int c = 0; c < world; ++c) {
    if (c != rank) others += wire->bytes(call.begin[c + 1] - call.begin[c]);
  }
  const int64_t own = call.begin[rank + 1] - call.begin[rank];
  if (!call.one_shot) return others + (world - 1) * wire->bytes(own);
  return (world - 1) * (others + 4 * own);
}

}  // namespace

Program::Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers,
                 Options options)
    : transport_(transport),
      options_(std::move(options)),
      windows_(open_windows(transport, schedule, buffers, options_)),
      whole_(left_to_library(transport, schedule, options_)),
      slices_(options_.transfers && !windows_ && !whole_
                  ? slices_for(schedule, buffers.count, options_.wire, options_.slice_bytes, buffers.shards)
                  : 1),
      overlapped_(options_.transfers && (slices_ > 1 || options_.beside_others || windows_)),
      schedule_(slices_ > 1 ? pipelined(schedule, slices_) : schedule),
      ranges_(chunk_ranges(schedule_, buffers.count, buffers.shards, options_.wire->granularity)),
      call_(describe(buffers)),
      buffers_(buffers) {
  if (schedule.world != transport.world()) {
    throw BadInput(fmt::format("{}: a schedule for {} ranks on a transport of {}", options_.what,
                               schedule.world, transport.world()));
  }
  if (options_.wire->registered && transport.device().is_cuda()) {
    throw BadInput(
        fmt::format("{}: wire format '{}' was registered with callbacks for the host, and the "
                    "communicator is on {}",
                    options_.what, options_.wire->name, transport.device().name()));
  }
  workspace_bytes_ = compile(nullptr);
  info_ = describe_exchanges();
  if (overlapped_) {
    start_ = Event::create(transport.device());
    kernels_done_ = Event::create(transport.device());
    for (int k = 0; k < info_.exchanges; ++k) exchange_done_.push_back(Event::create(transport.device()));
  }
}

int64_t Program::shard_elements() const {
  int64_t elements = 0;
  for (size_t c = 0; c < ranges_.size(); ++c) {
    if (schedule_.owner[c] == transport_.rank()) elements += ranges_[c].count();
  }
  return elements;
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
  workspace_ = workspace;
  compile(static_cast<std::byte*>(workspace));
  bound_ = true;
}

void Program::rebind(const void* in, void* out) {
  buffers_.in = in;
  buffers_.out = out;
  if (bound_) compile(static_cast<std::byte*>(workspace_));
}

void Program::rebind_residual(float* residual) {
  buffers_.residual = residual;
  if (bound_) compile(static_cast<std::byte*>(workspace_));
}

int64_t Program::elements_in() const {
  const bool from_owners =
      schedule_.collective == Collective::all_gather || schedule_.collective == Collective::broadcast;
  return from_owners ? shard_elements() : buffers_.count;
}
int64_t Program::elements_out() const {
  return schedule_.collective == Collective::reduce_scatter ? shard_elements() : buffers_.count;
}

FusedAllreduce Program::fused_call(const Transport& transport, const Schedule& schedule,
                                   const ProgramBuffers& buffers, const Options& options) {
  const auto ranges = chunk_ranges(schedule, buffers.count, buffers.shards, options.wire->granularity);
  FusedAllreduce call;
  call.peers.rank = transport.rank();
  call.peers.world = transport.world();
  // One shot would need the seeds of the other ranks' random bits; exchanging them is not worthwhile.
  const bool random = options.rounding.mode == Rounding::stochastic && !options.wire->exact;
  call.one_shot = schedule.carrier == Carrier::one_shot_kernel && !random;
  call.part_scale = part_scale_for(options.scale);
  call.scale = options.scale / call.part_scale;
  call.rounding = options.rounding;
  for (size_t c = 0; c < ranges.size(); ++c) call.begin[c] = ranges[c].begin;
  call.begin[ranges.size()] = buffers.count;
  return call;
}

std::shared_ptr<MappedPeers> Program::open_windows(Transport& transport, const Schedule& schedule,
                                                   const ProgramBuffers& buffers, const Options& options) {
  if (schedule.carrier == Carrier::messages || schedule.carrier == Carrier::library || transport.world() == 1)
    return nullptr;
  if (schedule.carrier == Carrier::node_windows) {
    if (schedule.kind != ScheduleKind::hierarchical || schedule.collective != Collective::allreduce)
      throw BadInput(fmt::format("{}: windows inside nodes are for hierarchical allreduces", options.what));
    if (schedule.per_node == 1 || !transport.peer_access_obstacle(schedule.per_node).empty()) return nullptr;
    const auto chunks = chunk_ranges(schedule, buffers.count, buffers.shards, options.wire->granularity);
    return transport.peer_access()->open(places_in_windows(chunks, options).back(),
                                         static_cast<bool>(options.transfers), schedule.per_node);
  }
  if (!transport.peer_access_obstacle().empty()) return nullptr;
  if (schedule.collective != Collective::allreduce || schedule.kind != ScheduleKind::two_shot ||
      schedule.world != transport.world()) {
    throw BadInput(fmt::format(
        "{}: one kernel carries out a two-shot allreduce of all ranks, and nothing else", options.what));
  }
  FusedAllreduce call = fused_call(transport, schedule, buffers, options);
  return transport.peer_access()->open(lay_out(call, options.wire), static_cast<bool>(options.transfers));
}

std::vector<int64_t> Program::places_in_windows(const std::vector<ChunkRange>& chunks,
                                                const Options& options) {
  const Wire wire = options.fp32_intra_node ? kFp32 : options.wire;
  std::vector<int64_t> places = {0};
  for (ChunkRange range : chunks)
    places.push_back(places.back() + (wire->bytes(range.count()) + 255) / 256 * 256);
  return places;
}

bool Program::left_to_library(Transport& transport, const Schedule& schedule, const Options& options) {
  if (schedule.carrier != Carrier::library || transport.world() == 1) return false;
  if (!options.wire->exact) {
    throw BadInput(
        fmt::format("{}: schedule=nccl adds FP32, not {}; use wire format fp32, or another schedule",
                    options.what, options.wire->name));
  }
  if (const std::string obstacle = transport.native_allreduce_obstacle(); !obstacle.empty())
    throw BadInput(fmt::format("{}: schedule=nccl: {}", options.what, obstacle));
  return true;
}

size_t Program::compile(std::byte* base) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  size_t used = 0;
  if (buffers_.dtype != DType::f32) {
    auto wide = [&](int64_t elements) {
      auto* place = reinterpret_cast<float*>(begin + used);
      used += (static_cast<size_t>(elements) * sizeof(float) + 255) / 256 * 256;
      return place;
    };
    wide_in_ = wide(elements_in());
    wide_out_ = schedule_.collective == Collective::allreduce ? wide_in_ : wide(elements_out());
  }
  const bool wide = buffers_.dtype != DType::f32;
  const float* in = wide ? wide_in_ : static_cast<const float*>(buffers_.in);
  float* out = wide ? wide_out_ : static_cast<float*>(buffers_.out);
  if (windows_ && !over_node_windows()) {
    FusedAllreduce call = fused_call(transport_, schedule_, buffers_, options_);
    call.peers = windows_->memory;
    call.in = in;
    call.out = out;
    call.residual = options_.wire->exact ? nullptr : buffers_.residual;
    lay_out(call, options_.wire);
    operations_.clear();
    operations_.push_back({.work = call});
    return used;
  }
  if (whole_) {
    operations_.clear();
    const bool mean = options_.scale == 1.0f / static_cast<float>(schedule_.world);
    if (buffers_.count > 0) {
      operations_.push_back({.work = LibraryAllreduce{in, out, mean, mean ? 1.0f : options_.scale}});
    }
    return used;
  }
  used += Compiler(*this, in, out, reinterpret_cast<std::byte*>(begin + used)).compile();
  find_early();
  return used;
}

void Program::find_early() {
  const Exchange* before = nullptr;
  for (Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation.work);
    if (exchange == nullptr) continue;
    operation.early = before != nullptr;
    if (before != nullptr) {
      for (const Transfer& a : before->transfers) {
        for (const Transfer& b : exchange->transfers) operation.early &= !collide(a, b);
      }
    }
    before = exchange;
  }
}

Call Program::describe(const ProgramBuffers& buffers) const {
  const auto [count, dtype] = std::pair(buffers.count, buffers.dtype);
  uint64_t hash = mix(1 + static_cast<uint64_t>(schedule_.collective), static_cast<uint64_t>(count));
  hash = mix(hash, static_cast<uint64_t>(options_.rounding.mode));
  hash = mix(hash, std::bit_cast<uint32_t>(options_.scale));
  hash = mix(hash, (options_.fp32_intra_node ? 1 : 0) + 2 * static_cast<uint64_t>(dtype));
  hash = mix(hash, static_cast<uint64_t>(options_.wire->bytes(count)));
  hash = mix(hash, static_cast<uint64_t>(options_.wire->granularity));
  for (char c : std::string(options_.wire->name) + "\n" + options_.what + "\n" + options_.spec) {
    hash = mix(hash, static_cast<uint64_t>(c));
  }
  hash = mix(hash, static_cast<uint64_t>(schedule_.chunks) * 16 + static_cast<uint64_t>(schedule_.kind));
  hash = mix(hash, static_cast<uint64_t>(carrier()));
  for (int64_t shard : buffers.shards) hash = mix(hash, static_cast<uint64_t>(shard));
  for (int32_t owner : schedule_.owner) hash = mix(hash, static_cast<uint64_t>(owner));
  for (const auto& rounds : schedule_.rounds) {
    for (const Round& round : rounds) {
      hash = mix(hash, round.size());
      for (const Step& s : round) {
        hash = mix(hash, static_cast<uint64_t>(s.chunk) << 32 | static_cast<uint64_t>(s.peer) << 8 |
                             static_cast<uint64_t>(s.kind) << 1 | static_cast<uint64_t>(s.intra_node));
      }
    }
  }
  const std::string wire = options_.wire->name;
  const std::string spec = options_.spec.empty() || options_.spec == wire ? "" : ", " + options_.spec;
  return {hash, fmt::format("{} of {} ({} {}, {}, {}{})", name(schedule_.collective), options_.what, count,
                            dtype == DType::f32    ? "floats"
                            : dtype == DType::bf16 ? "BF16 values"
                                                   : "FP16 values",
                            options_.wire->registered ? options_.wire->identity() : wire,
                            name(schedule_.kind), spec)};
}

void Program::launch(const Stream& stream, const Operation& kernel) const {
  if (const auto* encode = std::get_if<ReduceEncode>(&kernel.work)) {
    options_.wire->reduce_encode(stream, *encode);
  } else if (const auto* decode = std::get_if<Decode>(&kernel.work)) {
    options_.wire->decode(stream, *decode);
  } else {
    fp32_reduce(stream, std::get<Reduce>(kernel.work));
  }
}

ProgramInfo Program::describe_exchanges() const {
  ProgramInfo info{.part = options_.part, .schedule = name(schedule_.kind), .slices = slices_};
  if (over_node_windows()) {
    info.schedule += " over windows inside nodes";
  } else if (windows_) {
    info.schedule += " in one kernel";
    info.bytes_sent = bytes_read(std::get<FusedAllreduce>(operations_.front().work), options_.wire);
  }
  if (whole_) {
    info.bytes_sent = 4 * elements_sent(schedule_, transport_.rank(), buffers_.count);
  }
  for (const Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation.work);
    if (exchange == nullptr) continue;
    ++info.exchanges;
    for (const Transfer& t : exchange->transfers) {
      if (t.kind == Transfer::Kind::send) info.bytes_sent += static_cast<int64_t>(t.bytes);
    }
  }
  return info;
}

void Program::label_exchanges(int bucket) {
  const int group = (info_.exchanges + kMostSpans - 1) / kMostSpans;
  int64_t sent = 0, received = 0;
  int k = 0, first = 0;
  for (const Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation.work);
    if (exchange == nullptr) continue;
    for (const Transfer& t : exchange->transfers) {
      (t.kind == Transfer::Kind::send ? sent : received) += static_cast<int64_t>(t.bytes);
    }
    ++k;
    if (k - first < group && k < info_.exchanges) continue;
    TraceLabel label{.name = fmt::format("exchange {}", bucket),
                     .category = "exchange",
                     .details = {{"bucket", int64_t{bucket}},
                                 {"part", options_.part.empty() ? "all" : options_.part},
                                 {"exchange", int64_t{first + 1}},
                                 {"exchanges", int64_t{info_.exchanges}},
                                 {"sent_bytes", sent},
                                 {"received_bytes", received}}};
    if (k > first + 1) label.details.emplace_back("to_exchange", int64_t{k});
    labels_.push_back(std::make_shared<const TraceLabel>(std::move(label)));
    first = k;
    sent = received = 0;
  }
}

void Program::run_fused(const Stream& stream, const FusedAllreduce& call) {
  transport_.peer_access()->run_kernel(
      stream, *windows_, static_cast<uint64_t>(info_.bytes_sent), call_.what,
      [wire = options_.wire, call](const Stream& on) { wire->fused_allreduce(on, call); });
}

void Program::run_over_node_windows(const Stream& stream) {
  for (const Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation.work);
    if (exchange == nullptr) {
      launch(stream, operation);
    } else if (!exchange->in_windows) {
      transport_.exchange(stream, exchange->transfers, exchange->label);
    } else {
      uint64_t bytes = 0;
      for (const Transfer& t : exchange->transfers) bytes += t.kind == Transfer::Kind::send ? t.bytes : 0;
      transport_.peer_access()->run_kernel(stream, *windows_, bytes, exchange->label.what,
                                           [barrier = stream_barrier(windows_->memory)](const Stream& on) {
                                             kFp32->fused_allreduce(on, barrier);
                                           });
    }
  }
}

void Program::run_library(const Stream& stream, const LibraryAllreduce& call) {
  transport_.native_allreduce()->allreduce(stream, call.in, call.out, buffers_.count, call.mean,
                                           static_cast<uint64_t>(info_.bytes_sent), call_.what);
  if (call.scale != 1.0f) {
    fp32_reduce(stream, {.own = call.out, .out = call.out, .scale = call.scale, .count = buffers_.count});
  }
}

void Program::run(const Stream& stream, BucketPhases* phases) {
  if (!bound_ && workspace_bytes_ > 0) throw Error(options_.what + ": Program::run before bind");
  const Stream& transfers = overlapped_ ? options_.transfers : stream;
  const bool wide = buffers_.dtype != DType::f32;
  if (wide) widen(stream, buffers_.dtype, buffers_.in, wide_in_, elements_in());
  auto enter = [&](Phase phase) {
    if (phases != nullptr) phases->enter(stream, phase, phase == Phase::communicate ? &info_ : nullptr);
  };
  Tracer* tracer = phases != nullptr && phases->tracer() != nullptr && phases->tracer()->recording()
                       ? phases->tracer()
                       : nullptr;
  if (tracer != nullptr && labels_.empty()) label_exchanges(phases->bucket());
  // The span belongs to the oldest exchange in flight.
  const int group = (info_.exchanges + kMostSpans - 1) / kMostSpans;
  std::optional<SpanOnStream> span;
  auto open_span = [&](int exchange) {
    if (tracer == nullptr || exchange % group != 0) return;
    span.emplace(tracer, transfers, labels_[static_cast<size_t>(exchange / group)]);
  };
  if (overlapped_) {
    start_.record(stream);
    transfers.wait(start_);
  }
  transport_.begin_call(transfers, call_);
  EarlyExchange* const early = transport_.early_exchange();
  if (over_node_windows()) {
    enter(Phase::communicate);
    run_over_node_windows(transfers);
    if (overlapped_) {
      kernels_done_.record(transfers);
      stream.wait(kernels_done_);
    }
    if (wide) narrow(stream, buffers_.dtype, wide_out_, buffers_.out, elements_out());
    return;
  }
  int started = 0, finished = 0;  // in exchanges
  int awaited = -1;               // the last exchange that `stream` has waited for
  auto finish_until = [&](int count) {
    for (; finished < count; ++finished) {
      if (early != nullptr) early->end_exchange(transfers);
      const int next = finished + 1;
      // Close the span before the event that readers of the span wait for.
      if (next == info_.exchanges || next % group == 0) span.reset();
      if (overlapped_) exchange_done_[finished].record(transfers);
      if (next < started) open_span(next);
    }
  };
  auto await = [&](int exchange) {
    finish_until(exchange + 1);
    if (exchange <= awaited) return;
    if (overlapped_) stream.wait(exchange_done_[exchange]);
    awaited = exchange;
  };
  for (const Operation& operation : operations_) {
    const auto* fused = std::get_if<FusedAllreduce>(&operation.work);
    const auto* whole = std::get_if<LibraryAllreduce>(&operation.work);
    if (fused != nullptr || whole != nullptr) {
      enter(Phase::communicate);
      fused != nullptr ? run_fused(transfers, *fused) : run_library(transfers, *whole);
      if (overlapped_) {
        kernels_done_.record(transfers);
        stream.wait(kernels_done_);
      }
      continue;
    }
    if (const auto* exchange = std::get_if<Exchange>(&operation.work)) {
      if (started == 0) enter(Phase::communicate);
      if (!operation.early || early == nullptr) finish_until(started);
      if (started == finished) open_span(started);
      if (early != nullptr) {
        early->begin_exchange(transfers, exchange->transfers, exchange->label);
      } else {
        transport_.exchange(transfers, exchange->transfers, exchange->label);
      }
      finish_until(started++);
      continue;
    }
    await(operation.after);
    if (started == 0) enter(Phase::compress);
    if (started > 0 && awaited + 1 == info_.exchanges) enter(Phase::decompress);
    launch(stream, operation);
    if (overlapped_ && operation.needed) {
      kernels_done_.record(stream);
      transfers.wait(kernels_done_);
    }
  }
  await(started - 1);
  if (wide) narrow(stream, buffers_.dtype, wide_out_, buffers_.out, elements_out());
}

}  // namespace gradwire
