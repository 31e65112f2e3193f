#include "collectives/program/program.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "collectives/program/executor.h"
#include "kernels/wire/floats.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

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

namespace {

Activity activity(Phase phase) {
  return phase == Phase::compress      ? Activity::compress
         : phase == Phase::communicate ? Activity::communicate
                                       : Activity::decompress;
}

}  // namespace

// Appends a segment that begins now. Creates events in the first steps and reuses the events in later steps.
BucketPhases::Segment& BucketPhases::next(const Stream& stream) {
  if (used_ == segments_.size()) segments_.emplace_back().begin = Event::create_timer(stream.device());
  Segment& segment = segments_[used_++];
  segment.begin.record(stream);
  return segment;
}

void BucketPhases::begin(const Stream& stream) {
  stream_ = stream;
  used_ = 0;
  entered_ = false;
  if (!options_.timing) return;
  Segment& first = next(stream);
  first.phase = Phase::compress;
  first.allreduce = nullptr;
}

void BucketPhases::enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce) {
  if (!stream_ || !(stream == stream_)) return;
  if (options_.timing) {
    Segment* current = &segments_[used_ - 1];
    if (entered_ && current->phase == phase && current->allreduce == allreduce) return;
    if (entered_) current = &next(stream);  // otherwise nothing has been enqueued since begin()
    current->phase = phase;
    current->allreduce = allreduce;
  }
  entered_ = true;
  range_.reset();  // end the previous range before the next begins
  range_.emplace(activity(phase), options_.bucket);
}

void BucketPhases::end() {
  range_.reset();
  if (options_.timing) next(stream_);
  stream_ = {};
}

std::pair<double, double> BucketPhases::since(const BucketPhases& first) const {
  if (used_ < 2 || first.used_ < 2) return {0, 0};
  const Event& zero = first.segments_[0].begin;
  return {elapsed_ms(zero, segments_[0].begin), elapsed_ms(zero, segments_[used_ - 1].begin)};
}

double BucketPhases::ms(Phase phase) const {
  double sum = 0;
  for (size_t i = 0; i + 1 < used_; ++i) {
    if (segments_[i].phase == phase) sum += elapsed_ms(segments_[i].begin, segments_[i + 1].begin);
  }
  return sum;
}

void BucketPhases::trace(Tracer& tracer, const std::string& row, int64_t step,
                         const std::vector<std::pair<std::string, TraceLabel::Value>>& details) const {
  for (size_t i = 0; i + 1 < used_; ++i) {
    const Segment& segment = segments_[i];
    const char* phase = name(activity(segment.phase));
    TraceLabel label{
        .name = fmt::format("{} {}", phase, options_.bucket), .category = phase, .details = details};
    if (const ProgramInfo* allreduce = segment.allreduce) {
      if (!allreduce->part.empty()) label.details.emplace_back("part", allreduce->part);
      label.details.emplace_back("schedule", allreduce->schedule);
      label.details.emplace_back("sent_bytes", allreduce->bytes_sent);
      label.details.emplace_back("exchanges", int64_t{allreduce->exchanges});
      label.details.emplace_back("slices", int64_t{allreduce->slices});
    }
    tracer.add(row, std::make_shared<const TraceLabel>(std::move(label)), step, segment.begin,
               segments_[i + 1].begin);
  }
}

namespace {

// Returns whether the transport's own allreduce carries out the schedule.
bool library_serves(Transport& transport, const Schedule& schedule, const Program::Options& options) {
  if (schedule.kind != ScheduleKind::nccl || transport.world() == 1) return false;
  if (!options.wire->exact) {
    throw BadInput("{}: schedule=nccl adds FP32, not {}; use wire format fp32, or another schedule",
                   options.what, options.wire->name);
  }
  if (const std::string obstacle = transport.allreduce_obstacle(); !obstacle.empty())
    throw BadInput("{}: schedule=nccl: {}", options.what, obstacle);
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
    throw BadInput("{}: a schedule for {} ranks on a transport of {}", options.what, schedule.world,
                   transport.world());
  }
  if (options.wire->registered && transport.device().is_cuda()) {
    throw BadInput(
        "{}: wire format '{}' was registered with callbacks for the host, and the "
        "communicator is on {}",
        options.what, options.wire->name, transport.device().name());
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
