// Executes sends and receives overlapped with kernels. Exchanges are posted as early as their data allows,
// and kernels wait only for the exchanges that the kernels depend on.
#include <fmt/format.h>

#include <optional>

#include "collectives/program/compiler.h"
#include "collectives/program/executor.h"

namespace gradwire {
namespace {

// At most this many spans per run in a trace; with more exchanges, a span covers a group of them.
constexpr int kMostSpans = 64;

class MessageExecutor final : public ProgramExecutor {
 public:
  MessageExecutor(const ProgramPlan& plan, const ProgramMemory& memory) : ProgramExecutor(plan) {
    bind(memory);
    for (const Operation& operation : program_.operations) {
      const auto* exchange = std::get_if<Exchange>(&operation);
      if (exchange == nullptr) continue;
      ++info_.exchanges;
      info_.bytes_sent += exchange->bytes_sent();
    }
    if (!plan.overlapped) return;
    for (int k = 0; k < info_.exchanges; ++k) {
      exchange_done_.push_back(Event::create(plan.transport.device()));
    }
  }

  void bind(const ProgramMemory& memory) override {
    program_ = compile(plan_, memory);
    workspace_bytes_ = program_.workspace_bytes;
  }

 private:
  // One run: its streams, and the numbers of exchanges started and finished.
  class Run;

  void enqueue(const Stream& stream, const Stream& transfers, BucketPhases* phases) override;
  int exchanges_per_span() const { return (info_.exchanges + kMostSpans - 1) / kMostSpans; }
  void label_spans(int bucket);

  CompiledProgram program_;
  std::vector<Event> exchange_done_;   // [exchange], if overlapped
  std::vector<TraceLabelPtr> labels_;  // [span]; created when first traced
};

class MessageExecutor::Run {
 public:
  Run(MessageExecutor& executor, const Stream& stream, const Stream& transfers, BucketPhases* phases)
      : executor_(executor),
        early_(executor.plan_.transport.early_exchange()),
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
    if (!exchange.early || early_ == nullptr) finish_until(started_);
    if (started_ == finished_) open_span(started_);
    if (early_ != nullptr) {
      early_->begin_exchange(transfers_, exchange.transfers, exchange.label);
    } else {
      executor_.plan_.transport.exchange(transfers_, exchange.transfers, exchange.label);
    }
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
      if (early_ != nullptr) early_->end_exchange(transfers_);
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

  MessageExecutor& executor_;
  EarlyExchange* const early_;  // null: exchanges run one after another
  const Stream &stream_, &transfers_;
  BucketPhases* const phases_;
  Tracer* tracer_ = nullptr;        // null: not recording
  int started_ = 0, finished_ = 0;  // numbers of exchanges
  int awaited_ = -1;                // the last exchange that `stream` has waited for
  std::optional<SpanOnStream> span_;
};

void MessageExecutor::enqueue(const Stream& stream, const Stream& transfers, BucketPhases* phases) {
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

void MessageExecutor::label_spans(int bucket) {
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

}  // namespace

std::unique_ptr<ProgramExecutor> make_message_executor(const ProgramPlan& plan, const ProgramMemory& memory) {
  return std::make_unique<MessageExecutor>(plan, memory);
}

}  // namespace gradwire
