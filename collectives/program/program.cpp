#include "collectives/program/program.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/wire/floats.h"
#include "runtime/util/error.h"
#include "runtime/util/hash.h"

namespace gradwire {
namespace {

// At most this many spans per run in a trace; with more exchanges, a span covers a group of them.
constexpr int kMaxSpans = 64;

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

}  // namespace

Program::Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers,
                 Options options)
    : transport_(transport),
      options_(std::move(options)),
      buffers_(buffers),
      uses_library_(library_serves(transport, schedule, options_)),
      slices_(options_.transfers && !uses_library_
                  ? slices_for(schedule, buffers.count, options_.wire, options_.slice_bytes, buffers.shards)
                  : 1),
      overlapped_(options_.transfers && (slices_ > 1 || options_.beside_others)),
      schedule_(slices_ > 1 ? pipelined(schedule, slices_) : schedule),
      ranges_(chunk_ranges(schedule_, buffers.count, buffers.shards, options_.wire->granularity)),
      call_(describe()) {
  if (schedule.world != transport.world()) {
    throw BadInput("{}: a schedule for {} ranks on a transport of {}", options_.what, schedule.world,
                   transport.world());
  }
  if (options_.wire->registered && transport.device().is_cuda()) {
    throw BadInput(
        "{}: wire format '{}' was registered with callbacks for the host, and the "
        "communicator is on {}",
        options_.what, options_.wire->name, transport.device().name());
  }
  const int64_t count = buffers.count;
  const int64_t owned =
      elements_owned(schedule_, transport.rank(), count, options_.wire->granularity, buffers.shards);
  const Collective collective = schedule.collective;
  elements_in_ = collective == Collective::all_gather || collective == Collective::broadcast ? owned : count;
  elements_out_ = collective == Collective::reduce_scatter ? owned : count;
  place(0);
  info_ = {.part = options_.part, .schedule = name(schedule.kind), .slices = slices_};
  if (uses_library_) info_.bytes_sent = 4 * elements_sent(schedule_, transport.rank(), count);
  for (const Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation);
    if (exchange == nullptr) continue;
    ++info_.exchanges;
    info_.bytes_sent += exchange->bytes(Transfer::Kind::send);
  }
  exchanges_per_span_ = (info_.exchanges + kMaxSpans - 1) / kMaxSpans;
  if (!overlapped_) return;
  begun_ = Event::create(transport.device());
  ordered_ = Event::create(transport.device());
  for (int k = 0; k < info_.exchanges; ++k) exchange_done_.push_back(Event::create(transport.device()));
}

Call Program::describe() const {
  uint64_t hash = mix(1 + static_cast<uint64_t>(schedule_.collective), static_cast<uint64_t>(buffers_.count));
  hash = mix(hash, static_cast<uint64_t>(options_.rounding.mode));
  hash = mix(hash, std::bit_cast<uint32_t>(options_.scale));
  hash = mix(hash, (options_.fp32_intra_node ? 1 : 0) + 2 * static_cast<uint64_t>(buffers_.dtype));
  hash = mix(hash, static_cast<uint64_t>(options_.wire->bytes(buffers_.count)));
  hash = mix(hash, static_cast<uint64_t>(options_.wire->granularity));
  for (char c : std::string(options_.wire->name) + "\n" + options_.what + "\n" + options_.spec) {
    hash = mix(hash, static_cast<uint64_t>(c));
  }
  hash = mix(hash, static_cast<uint64_t>(schedule_.chunks) * 16 + static_cast<uint64_t>(schedule_.kind));
  for (int64_t shard : buffers_.shards) hash = mix(hash, static_cast<uint64_t>(shard));
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
  const char* const values = buffers_.dtype == DType::f32    ? "floats"
                             : buffers_.dtype == DType::bf16 ? "BF16 values"
                                                             : "FP16 values";
  const std::string wire = options_.wire->name;
  const std::string spec = options_.spec.empty() || options_.spec == wire ? "" : ", " + options_.spec;
  return {hash,
          fmt::format("{} of {} ({} {}, {}, {}{})", name(schedule_.collective), options_.what, buffers_.count,
                      values, options_.wire->registered ? options_.wire->identity() : wire,
                      name(schedule_.kind), spec)};
}

int Program::slices_for(const Schedule& schedule, int64_t count, Wire wire, int64_t slice_bytes,
                        const Shards& shards) {
  if (slice_bytes <= 0 || schedule.num_rounds() == 0) return 1;
  int64_t largest = (count + schedule.chunks - 1) / schedule.chunks;
  if (!shards.empty()) {
    largest = 0;
    for (ElementRange range : chunk_ranges(schedule, count, shards, wire->granularity)) {
      largest = std::max(largest, range.count());
    }
  }
  const int64_t bytes = wire->bytes(largest);
  return static_cast<int>(std::clamp<int64_t>((bytes + slice_bytes - 1) / slice_bytes, 1, kMaxSlices));
}

int64_t Program::Exchange::bytes(Transfer::Kind kind) const {
  int64_t bytes = 0;
  for (const Transfer& t : transfers) bytes += t.kind == kind ? static_cast<int64_t>(t.bytes) : 0;
  return bytes;
}

void Program::bind(void* workspace) {
  workspace_ = reinterpret_cast<uintptr_t>(workspace);
  bound_ = true;
  place(workspace_);
}

void Program::rebind(const void* in, void* out) {
  buffers_.in = in;
  buffers_.out = out;
  if (bound_) place(workspace_);
}

void Program::rebind_residual(float* residual) {
  buffers_.residual = residual;
  if (bound_) place(workspace_);
}

// The widened buffers are at the beginning of the workspace.
void Program::place(uintptr_t workspace) {
  uintptr_t at = workspace;
  in_ = static_cast<const float*>(buffers_.in);
  out_ = static_cast<float*>(buffers_.out);
  if (widens()) {
    const auto wide = [&](int64_t elements) {
      auto* const place = reinterpret_cast<float*>(at);
      at += (static_cast<size_t>(elements) * sizeof(float) + 255) / 256 * 256;
      return place;
    };
    in_ = wide_in_ = wide(elements_in_);
    out_ = schedule_.collective == Collective::allreduce ? wide_in_ : wide(elements_out_);
  }
  workspace_bytes_ = at - workspace + (uses_library_ ? 0 : compile(at));
}

// Executes sends and receives overlapped with kernels. Exchanges are posted as early as their data allows,
// and kernels wait only for the exchanges that the kernels depend on.
class Program::Run {
 public:
  Run(Program& program, const Stream& stream, const Stream& transfers, BucketPhases* phases)
      : program_(program),
        transport_(program.transport_),
        stream_(stream),
        transfers_(transfers),
        phases_(phases) {
    Tracer* const tracer = phases != nullptr ? phases->tracer() : nullptr;
    if (tracer == nullptr || !tracer->recording()) return;
    tracer_ = tracer;
    if (program.labels_.empty()) program.label_spans(phases->bucket());
  }

  void start(const Exchange& exchange) {
    if (started_ == 0) enter(Phase::communicate);
    if (!exchange.early || !transport_.has_early_exchange()) finish_until(started_);
    if (started_ == finished_) open_span(started_);
    transport_.begin_exchange(transfers_, exchange.transfers, exchange.label);
    finish_until(started_++);
  }

  void launch(const Kernel& kernel) {
    await(kernel.after);
    if (started_ == 0) enter(Phase::compress);
    if (started_ > 0 && awaited_ + 1 == program_.info_.exchanges) enter(Phase::decompress);
    if (const auto* encode = std::get_if<ReduceEncode>(&kernel.work)) {
      program_.options_.wire->reduce_encode(stream_, *encode);
    } else if (const auto* decode = std::get_if<Decode>(&kernel.work)) {
      program_.options_.wire->decode(stream_, *decode);
    } else {
      fp32_reduce(stream_, std::get<Reduce>(kernel.work));
    }
    if (kernel.needed) program_.order(stream_, transfers_);
  }

  void finish() { await(started_ - 1); }

 private:
  void enter(Phase phase) const {
    if (phases_ != nullptr) {
      phases_->enter(stream_, phase, phase == Phase::communicate ? &program_.info_ : nullptr);
    }
  }

  // Enqueues the ends of the first `count` exchanges.
  void finish_until(int count) {
    for (; finished_ < count; ++finished_) {
      transport_.end_exchange(transfers_);
      const int next = finished_ + 1;
      // Close the span before the event that readers of the span wait for.
      if (next == program_.info_.exchanges || next % program_.exchanges_per_span_ == 0) span_.reset();
      if (program_.overlapped_) program_.exchange_done_[finished_].record(transfers_);
      if (next < started_) open_span(next);
    }
  }

  // Makes later kernels wait for this exchange and all earlier exchanges. Does nothing for -1.
  void await(int exchange) {
    finish_until(exchange + 1);
    if (exchange <= awaited_) return;
    if (program_.overlapped_) stream_.wait(program_.exchange_done_[exchange]);
    awaited_ = exchange;
  }

  // Opens a span if the exchange is the first exchange of its group. The exchange must be the oldest exchange
  // in flight.
  void open_span(int exchange) {
    const int group = program_.exchanges_per_span_;
    if (tracer_ == nullptr || exchange % group != 0) return;
    span_.emplace(tracer_, transfers_, program_.labels_[static_cast<size_t>(exchange / group)]);
  }

  Program& program_;
  Transport& transport_;
  const Stream &stream_, &transfers_;
  BucketPhases* const phases_;
  Tracer* tracer_ = nullptr;        // null: not recording
  int started_ = 0, finished_ = 0;  // numbers of exchanges
  int awaited_ = -1;                // the last exchange that `stream` has waited for
  std::optional<SpanOnStream> span_;
};

// Kernels run on `stream`. Exchanges run on the stream for transfers, or on `stream` if exchanges do not
// overlap with kernels.
void Program::run(const Stream& stream, BucketPhases* phases) {
  if (!bound_ && workspace_bytes_ > 0) throw Error(options_.what + ": Program::run before bind");
  if (widens()) widen(stream, buffers_.dtype, buffers_.in, wide_in_, elements_in_);
  const Stream& transfers = overlapped_ ? options_.transfers : stream;
  if (overlapped_) {
    begun_.record(stream);
    transfers.wait(begun_);
  }
  transport_.begin_call(transfers, call_);
  if (uses_library_) {
    if (phases != nullptr) phases->enter(stream, Phase::communicate, &info_);
    const bool mean = options_.scale == 1.0f / static_cast<float>(schedule_.world);
    if (buffers_.count > 0) {
      transport_.allreduce(transfers, in_, out_, buffers_.count, mean,
                           static_cast<uint64_t>(info_.bytes_sent), call_.what);
    }
    if (buffers_.count > 0 && !mean && options_.scale != 1.0f) {
      fp32_reduce(transfers, {.own = out_, .out = out_, .scale = options_.scale, .count = buffers_.count});
    }
    order(transfers, stream);
  } else {
    Run run(*this, stream, transfers, phases);
    for (const Operation& operation : operations_) {
      if (const auto* exchange = std::get_if<Exchange>(&operation)) {
        run.start(*exchange);
      } else {
        run.launch(std::get<Kernel>(operation));
      }
    }
    run.finish();
  }
  if (widens()) narrow(stream, buffers_.dtype, out_, buffers_.out, elements_out_);
}

void Program::order(const Stream& earlier, const Stream& later) {
  if (!overlapped_) return;
  ordered_.record(earlier);
  later.wait(ordered_);
}

void Program::label_spans(int bucket) {
  int64_t sent = 0, received = 0;
  int k = 0, first = 0;
  for (const Operation& operation : operations_) {
    const auto* exchange = std::get_if<Exchange>(&operation);
    if (exchange == nullptr) continue;
    sent += exchange->bytes(Transfer::Kind::send);
    received += exchange->bytes(Transfer::Kind::receive);
    ++k;
    if (k - first < exchanges_per_span_ && k < info_.exchanges) continue;
    TraceLabel label{.name = fmt::format("exchange {}", bucket),
                     .category = "exchange",
                     .details = {{"bucket", int64_t{bucket}},
                                 {"part", info_.part.empty() ? "all" : info_.part},
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
  if (!timing_) return;
  Segment& first = next(stream);
  first.phase = Phase::compress;
  first.allreduce = nullptr;
}

void BucketPhases::enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce) {
  if (!stream_ || !(stream == stream_)) return;
  if (timing_) {
    Segment* current = &segments_[used_ - 1];
    if (entered_ && current->phase == phase && current->allreduce == allreduce) return;
    if (entered_) current = &next(stream);  // otherwise nothing has been enqueued since begin()
    current->phase = phase;
    current->allreduce = allreduce;
  }
  entered_ = true;
  range_.reset();  // end the previous range before the next begins
  range_.emplace(activity(phase), bucket_);
}

void BucketPhases::end() {
  range_.reset();
  if (timing_) next(stream_);
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
    TraceLabel label{.name = fmt::format("{} {}", phase, bucket_), .category = phase, .details = details};
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

}  // namespace gradwire
