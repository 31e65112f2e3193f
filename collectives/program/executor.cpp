#include "collectives/program/executor.h"

#include <fmt/format.h>

#include <optional>

namespace gradwire {
namespace {

// At most this many spans per run in a trace; with more exchanges, a span covers a group of them.
constexpr int kMostSpans = 64;

}  // namespace

class ProgramExecutor::Run {
 public:
  Run(ProgramExecutor& executor, const Stream& stream, const Stream& transfers, BucketPhases* phases)
      : executor_(executor),
        transport_(executor.plan_.transport),
        stream_(stream),
        transfers_(transfers),
        phases_(phases) {
    Tracer* const tracer = phases != nullptr ? phases->tracer() : nullptr;
    if (tracer == nullptr || !tracer->recording()) return;
    tracer_ = tracer;
    if (executor.labels_.empty()) executor.label_spans(phases->bucket());
  }

  void start(const Exchange& exchange) {
    if (started_ == 0) executor_.enter(phases_, stream_, Phase::communicate);
    if (!exchange.early || !transport_.has_early_exchange()) finish_until(started_);
    if (started_ == finished_) open_span(started_);
    transport_.begin_exchange(transfers_, exchange.transfers, exchange.label);
    finish_until(started_++);
  }

  void launch(const Kernel& kernel) {
    await(kernel.after);
    if (started_ == 0) executor_.enter(phases_, stream_, Phase::compress);
    if (started_ > 0 && awaited_ + 1 == executor_.info_.exchanges) {
      executor_.enter(phases_, stream_, Phase::decompress);
    }
    kernel.launch(stream_, executor_.plan_.options.wire);
    if (kernel.needed) executor_.order(stream_, transfers_);
  }

  void finish() { await(started_ - 1); }

 private:
  // Enqueues the ends of the first `count` exchanges.
  void finish_until(int count) {
    for (; finished_ < count; ++finished_) {
      transport_.end_exchange(transfers_);
      const int next = finished_ + 1;
      // Close the span before the event that readers of the span wait for.
      if (next == executor_.info_.exchanges || next % executor_.exchanges_per_span() == 0) span_.reset();
      if (executor_.plan_.overlapped) executor_.exchange_done_[finished_].record(transfers_);
      if (next < started_) open_span(next);
    }
  }

  // Makes later kernels wait for this exchange and all earlier exchanges. Does nothing for -1.
  void await(int exchange) {
    finish_until(exchange + 1);
    if (exchange <= awaited_) return;
    if (executor_.plan_.overlapped) stream_.wait(executor_.exchange_done_[exchange]);
    awaited_ = exchange;
  }

  // Opens a span if the exchange is the first exchange of its group. The exchange must be the oldest exchange
  // in flight.
  void open_span(int exchange) {
    const int group = executor_.exchanges_per_span();
    if (tracer_ == nullptr || exchange % group != 0) return;
    span_.emplace(tracer_, transfers_, executor_.labels_[static_cast<size_t>(exchange / group)]);
  }

  ProgramExecutor& executor_;
  Transport& transport_;
  const Stream &stream_, &transfers_;
  BucketPhases* const phases_;
  Tracer* tracer_ = nullptr;        // null: not recording
  int started_ = 0, finished_ = 0;  // numbers of exchanges
  int awaited_ = -1;                // the last exchange that `stream` has waited for
  std::optional<SpanOnStream> span_;
};

ProgramExecutor::ProgramExecutor(const ProgramPlan& plan, const ProgramMemory& memory)
    : plan_(plan),
      info_{.part = plan.options.part, .schedule = name(plan.schedule.kind), .slices = plan.slices} {
  bind(memory);
  if (plan.uses_library) info_.bytes_sent = 4 * elements_sent(plan.schedule, plan.rank(), plan.count);
  for (const Operation& operation : program_.operations) {
    const auto* exchange = std::get_if<Exchange>(&operation);
    if (exchange == nullptr) continue;
    ++info_.exchanges;
    info_.bytes_sent += exchange->bytes_sent();
  }
  if (!plan.overlapped) return;
  begun_ = Event::create(plan.transport.device());
  ordered_ = Event::create(plan.transport.device());
  for (int k = 0; k < info_.exchanges; ++k) exchange_done_.push_back(Event::create(plan.transport.device()));
}

void ProgramExecutor::bind(const ProgramMemory& memory) {
  memory_ = memory;
  if (!plan_.uses_library) program_ = compile(plan_, memory);
}

void ProgramExecutor::run(const Stream& stream, BucketPhases* phases) {
  const Stream& transfers = plan_.overlapped ? plan_.options.transfers : stream;
  if (plan_.overlapped) {
    begun_.record(stream);
    transfers.wait(begun_);
  }
  plan_.transport.begin_call(transfers, plan_.call);
  if (plan_.uses_library) {
    enter(phases, stream, Phase::communicate);
    call_library(transfers);
    return order(transfers, stream);
  }
  Run run(*this, stream, transfers, phases);
  for (const Operation& operation : program_.operations) {
    if (const auto* exchange = std::get_if<Exchange>(&operation)) {
      run.start(*exchange);
    } else {
      run.launch(std::get<Kernel>(operation));
    }
  }
  run.finish();
}

void ProgramExecutor::call_library(const Stream& stream) const {
  if (plan_.count == 0) return;
  const float scale = plan_.options.scale;
  const bool mean = scale == 1.0f / static_cast<float>(plan_.schedule.world);
  plan_.transport.allreduce(stream, memory_.in, memory_.out, plan_.count, mean,
                            static_cast<uint64_t>(info_.bytes_sent), plan_.call.what);
  if (mean || scale == 1.0f) return;
  fp32_reduce(stream, {.own = memory_.out, .out = memory_.out, .scale = scale, .count = plan_.count});
}

void ProgramExecutor::enter(BucketPhases* phases, const Stream& stream, Phase phase) const {
  if (phases != nullptr) phases->enter(stream, phase, phase == Phase::communicate ? &info_ : nullptr);
}

void ProgramExecutor::order(const Stream& earlier, const Stream& later) {
  if (!plan_.overlapped) return;
  ordered_.record(earlier);
  later.wait(ordered_);
}

int ProgramExecutor::exchanges_per_span() const {
  return (info_.exchanges + kMostSpans - 1) / kMostSpans;
}

void ProgramExecutor::label_spans(int bucket) {
  int64_t sent = 0, received = 0;
  int k = 0, first = 0;
  for (const Operation& operation : program_.operations) {
    const auto* exchange = std::get_if<Exchange>(&operation);
    if (exchange == nullptr) continue;
    sent += exchange->bytes_sent();
    received += exchange->bytes_received();
    ++k;
    if (k - first < exchanges_per_span() && k < info_.exchanges) continue;
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

}  // namespace gradwire
