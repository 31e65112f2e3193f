// The output of --trace: a complete file with properly nested spans. The run itself is unchanged.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "runtime/util/error.h"
#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "tests/trainer/runs.h"
#include "trainer/log/records.h"
#include "trainer/log/trace_file.h"
#include "trainer/train/run.h"

namespace gradwire {
namespace {

struct Span {
  std::string name, category;
  int64_t step, begin_ns, end_ns;
  int64_t bucket, bucket_bytes;  // -1 if the span has no bucket
};
using Rows = std::map<std::pair<int, std::string>, std::vector<Span>>;  // rank and stream

Rows rows_of(const Json& trace) {
  std::map<std::pair<int, int>, std::string> names;
  Rows rows;
  for (const Json& e : trace.at("traceEvents")) {
    if (e["ph"] == "M" && e["name"] == "thread_name") names[{e["pid"], e["tid"]}] = e["args"]["name"];
  }
  for (const Json& e : trace.at("traceEvents")) {
    if (e["ph"] != "X") continue;
    auto ns = [](const Json& us) { return std::llround(us.get<double>() * 1e3); };
    const int64_t begin = ns(e["ts"]);
    rows[{e["pid"], names.at({e["pid"], e["tid"]})}].push_back(
        {e["name"], e["cat"], e["args"]["step"], begin, begin + ns(e["dur"]), e["args"].value("bucket", -1),
         e["args"].value("bucket_bytes", -1)});
  }
  return rows;
}

struct Ending : RunObserver {
  void on_step(const StepRecord& step) override {
    if (step.step == fails_at) throw Error("enough of this");
  }
  void on_end(const EndRecord& end) override { hash = end.parameter_hash; }
  int64_t fails_at = -1;
  uint64_t hash = 0;
};

class TraceTest : public ::testing::TestWithParam<Device> {
 protected:
  TrainConfig config(int ranks, const char* spec) const {
    TrainConfig config;
    config.model = testing::small_model(1);
    config.devices.assign(static_cast<size_t>(ranks), GetParam());
    config.compression = CompressionSpec::parse(spec);
    config.bucket_mb = 0;  // a bucket for each tensor
    config.batch_size = 8;
    config.accumulate = 2;
    config.steps = 9;
    config.eval_every = 0;
    config.trace = folder_.path("trace.json");
    config.trace_steps = {3, 7};
    return config;
  }
  uint64_t train(const TrainConfig& config, int64_t fails_at = -1) const {
    Ending observer;
    observer.fails_at = fails_at;
    run_training(config, make_synthetic(config.model, 256, 8, 1), {{&observer}});
    return observer.hash;
  }
  Json read() const { return Json::parse(std::ifstream(folder_.path("trace.json"))); }

  const testing::TemporaryFolder folder_;
};
GW_INSTANTIATE_ON_DEVICES(TraceTest);

TEST_P(TraceTest, EveryBucketOfEveryStepIsCompressedThenSentThenDecompressed) {
  for (const char* spec : {"bf16", "powersgd:rank=2", "fp32"}) {
    train(config(3, spec));
    std::set<std::pair<int64_t, int64_t>> buckets;
    const Rows rows = rows_of(read());
    for (int rank = 0; rank < 3; ++rank) {
      std::map<std::pair<int64_t, int64_t>, std::string> phases;  // the phases of a step and bucket, in order
      std::map<int64_t, int64_t> bytes;
      for (const char* stream : {"communicate", "communicate 2"}) {  // buckets alternate
        for (const Span& s : rows.at({rank, stream})) {
          if (s.category == "exchange") continue;
          phases[{s.step, s.bucket}] += s.category + " ";
          bytes[s.bucket] = s.bucket_bytes;
          EXPECT_EQ(s.name, fmt::format("{} {}", s.category, s.bucket));
          EXPECT_EQ(s.bucket % 2, std::string(stream) == "communicate" ? 0 : 1);
        }
      }
      for (const auto& [key, text] : phases) {
        const std::string where = fmt::format("{}, bucket {}: {}", spec, key.second, text);
        EXPECT_NE(text.find("communicate "), std::string::npos) << where;
        if (std::string(spec) == "fp32") {
          EXPECT_EQ(text, "communicate ") << where;
        } else if (bytes[key.second] > 1000) {  // in a smaller bucket, a rank may have no data to encode
          EXPECT_TRUE(text.starts_with("compress communicate ")) << where;
          EXPECT_TRUE(text.ends_with("decompress ")) << where;
        }
        buckets.insert(key);
      }
      EXPECT_EQ(phases.size(), buckets.size()) << "rank " << rank << " misses a bucket";
    }
    std::set<int64_t> steps;
    for (const auto& [step, bucket] : buckets) steps.insert(step);
    EXPECT_EQ(steps, (std::set<int64_t>{3, 4, 5, 6})) << spec;
    EXPECT_EQ(buckets.size() % 4, 0u);
    EXPECT_GT(buckets.size() / 4, 10u);
  }
}

TEST_P(TraceTest, SpansOfOneStreamAreDisjointOrNested) {
  for (const char* spec : {"bf16:schedule=ring", "powersgd:rank=2"}) {
    train(config(4, spec));
    const Rows rows = rows_of(read());
    for (const auto& [where, spans] : rows) {
      std::vector<Span> open;
      for (const Span& span : spans) {  // parents come before their children
        EXPECT_LE(span.begin_ns, span.end_ns);
        while (!open.empty() && open.back().end_ns <= span.begin_ns) open.pop_back();
        if (!open.empty()) {
          EXPECT_LE(span.end_ns, open.back().end_ns)
              << "rank " << where.first << ", " << where.second << ": " << span.name << " begins in "
              << open.back().name << " and ends behind it";
        }
        open.push_back(span);
      }
    }
  }
}

TEST_P(TraceTest, StepsContainTheirParts) {
  train(config(2, "bf16"));
  const Rows rows = rows_of(read());
  for (const auto& [where, spans] : rows) {
    if (where.second != "compute") continue;
    std::map<int64_t, std::map<std::string, int64_t>> count, ns;
    for (const Span& s : spans) ++count[s.step][s.category], ns[s.step][s.category] += s.end_ns - s.begin_ns;
    ASSERT_EQ(ns.size(), 4u);
    for (auto& [step, parts] : ns) {
      const int64_t whole = parts.extract("step").mapped();
      int64_t sum = 0;
      for (const auto& [kind, time] : parts) sum += time;
      EXPECT_LE(sum, whole);
      EXPECT_GT(sum, 0);
      EXPECT_EQ(
          count[step],
          (std::map<std::string, int64_t>{
              {"step", 1}, {"batch", 2}, {"forward", 2}, {"backward", 2}, {"wait", 1}, {"optimizer", 1}}));
    }
  }
}

TEST_P(TraceTest, TracingChangesNoBit) {
  for (const char* spec : {"bf16:round=stochastic", "powersgd:rank=2,wire=bf16"}) {
    TrainConfig c = config(3, spec);
    const uint64_t traced = train(c);
    c.trace.clear();
    EXPECT_EQ(train(c), traced) << spec;
  }
}

TEST_P(TraceTest, AFailedRunKeepsItsCompletedSteps) {
  EXPECT_THROW(train(config(2, "bf16"), 5), Error);
  Json trace = read();
  testing::expect_has(trace["otherData"]["error"].get<std::string>(), {"enough of this"});
  std::set<int64_t> steps;
  const Rows rows = rows_of(trace);
  for (const Span& s : rows.at({0, "compute"})) steps.insert(s.step);
  EXPECT_TRUE(steps.contains(3) && steps.contains(4));
  EXPECT_FALSE(steps.contains(6));

  EXPECT_THROW(train(config(2, "bf16"), 0), Error);  // before tracing starts
  trace = read();
  EXPECT_TRUE(rows_of(trace).empty());
  EXPECT_FALSE(std::filesystem::exists(folder_.path("trace.json.tmp")));
}

TEST_P(TraceTest, AWorldOfOneTracesNoCommunication) {
  train(config(1, "bf16"));
  std::set<std::string> streams;
  const Rows rows = rows_of(read());
  for (const auto& [where, spans] : rows) streams.insert(where.second);
  EXPECT_EQ(streams, (std::set<std::string>{"compute", "host thread"}));
}

// Checks that spans beyond the cap are counted, not stored, so that a long range of steps cannot exhaust
// memory.
TEST_P(TraceTest, BoundsTheNumberOfSpans) {
  const Device device = GetParam();
  const Stream stream = Stream::create(device, "compute");
  Tracer tracer(device, std::chrono::steady_clock::now(), 0, 1 << 30);
  const auto label = std::make_shared<const TraceLabel>(TraceLabel{.name = "a", .category = "b"});
  for (int64_t step = 0; step < 3; ++step) {
    tracer.begin_step(step);
    for (size_t i = 0; i < Tracer::kMaxSpans / 2; ++i) {
      const auto now = std::chrono::steady_clock::now();
      tracer.add("host thread", label, step, now, now);
    }
    { SpanOnStream span(&tracer, stream, label); }
    stream.synchronize();
    tracer.collect(step);
  }
  EXPECT_EQ(tracer.take().size(), Tracer::kMaxSpans);
  EXPECT_EQ(tracer.dropped(), Tracer::kMaxSpans / 2 + 3);
}

}  // namespace
}  // namespace gradwire
