// The output of a run: every line is JSON with the documented fields, whatever the values.
#include "trainer/log/records.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runtime/util/output_file.h"
#include "tests/trainer/files.h"
#include "trainer/log/comparison.h"
#include "trainer/log/console.h"
#include "trainer/log/earlier_run.h"
#include "trainer/log/run_log.h"

namespace gradwire {
namespace {

using nlohmann::json;
using testing::TemporaryFolder;

TrainConfig config() {
  TrainConfig c;
  c.devices = {Device::host(), Device::host()};
  c.compression = CompressionSpec::parse("powersgd:rank=4");
  c.steps = 3;
  return c;
}

RunInfo info(const std::string& schedule) {
  RunInfo info;
  info.parameters = 5;
  info.buckets = 1;
  info.schedule = schedule;
  return info;
}

ComparedRun compared(const std::string& compression, const RunSummary& summary) {
  ComparedRun run;
  run.compression = compression;
  run.seeds = {{0, summary, ""}};
  run.ranks = 4;
  run.device = "host";
  return run;
}

DataSplits data() {
  return make_synthetic(VitConfig{}, 20, 10, 0);
}

StepRecord step(int64_t index, double loss, uint64_t wire = 100) {
  StepRecord s;
  s.step = index;
  s.loss = loss;
  s.step_ms = 10.0 + static_cast<double>(index);
  s.images_per_s = 1000;
  s.wire_bytes = wire;
  s.dense_bytes = 400;
  s.exposed_comm_ms = 1.5;
  s.data_ms = index == 0 ? 4 : 0;
  s.tflops = 0.5;
  return s;
}

std::vector<json> lines(const std::string& path) {
  std::ifstream file(path);
  std::vector<json> records;
  for (std::string text; std::getline(file, text);) records.push_back(json::parse(text));
  return records;
}

TEST(Records, EachHasTheFieldsOfItsType) {
  json run = json::parse(run_record(config(), data(), info("ring")));
  EXPECT_EQ(run["type"], "run");
  EXPECT_EQ(run["schema"], 1);
  EXPECT_EQ(run["compression"], "powersgd:rank=4");
  EXPECT_EQ(run["ranks"], 2);
  EXPECT_EQ(run["device"], "host");
  EXPECT_EQ(run["schedule"], "ring");
  EXPECT_EQ(run["model"]["name"], "vit_tiny");
  EXPECT_EQ(run["gradient_group"], 2);
  EXPECT_FALSE(run["model"].contains("gelu"));  // exact
  TrainConfig approximate = config();
  approximate.model.gelu = Gelu::tanh;
  EXPECT_EQ(json::parse(run_record(approximate, data(), info("ring")))["model"]["gelu"], "tanh");
  EXPECT_EQ(run["train_images"], 20);
  EXPECT_EQ(run["augment"], "none");
  EXPECT_TRUE(run["peak_tflops"].is_null());  // not measured
  EXPECT_TRUE(run["fma_share"].is_null());
  EXPECT_TRUE(run["products"].is_null());  // on a GPU

  json s = json::parse(step_record(step(7, 0.5)));
  EXPECT_EQ(s["type"], "step");
  EXPECT_EQ(s["step"], 7);
  for (const char* field : {"loss", "lr", "step_ms", "images_per_s", "wire_bytes", "dense_bytes", "comm_ms",
                            "compress_ms", "communicate_ms", "decompress_ms", "exposed_comm_ms", "data_ms",
                            "forward_ms", "backward_ms", "optimizer_ms", "tflops"}) {
    EXPECT_TRUE(s[field].is_number()) << field;
  }
  json e = json::parse(
      eval_record({.step = 3, .epoch = 1.5, .test_loss = 0.4, .test_accuracy = 0.875, .images = 10}));
  EXPECT_EQ(e["type"], "eval");
  EXPECT_EQ(e["epoch"], 1.5);
  EXPECT_EQ(e["test_accuracy"], 0.875);
  EXPECT_EQ(json::parse(summary_record({}))["type"], "summary");
}

TEST(Records, NonFiniteNumbersBecomeNull) {
  for (double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    json s = json::parse(step_record(step(0, bad)));
    EXPECT_TRUE(s["loss"].is_null());
    EvalRecord eval;
    eval.test_loss = bad;
    EXPECT_TRUE(json::parse(eval_record(eval))["test_loss"].is_null());
    Summarizer summarizer;
    summarizer.on_step(step(0, bad));
    EXPECT_TRUE(json::parse(summary_record(summarizer.summary(1)))["final_loss"].is_null());
  }
}

TEST(Records, PathsThatAreNotUtf8StayValidJson) {
  TrainConfig c = config();
  c.data = DataSpec::parse("cifar10:/data/\xff\xfe");
  EXPECT_TRUE(json::parse(run_record(c, data(), {})).is_object());
}

// A rank that takes over a run continues its log, and drops the records that it will report again.
TEST(Records, AnotherRankContinuesTheLog) {
  const TemporaryFolder folder;
  const std::string path = folder.path("run.jsonl");
  const TrainConfig c = config();
  const DataSplits d = data();
  RunLog before(path, c, d);
  before.on_run(info("ring"));
  for (int64_t i = 0; i < 3; ++i) before.on_step(step(i, 1));
  before.on_eval({.step = 2});
  RunInfo taken = info("ring");
  taken.first_step = 2;
  taken.takes_over = true;
  RunLog after(path, c, d);
  after.on_run(taken);
  after.on_shrink(
      {.step = 2, .lost = {0, 3}, .lost_residual_norms = {0.5, NAN}, .ranks = {1, 2}, .why = "gone"});
  after.on_grow(
      {.step = 2, .joined = {4}, .ranks = {1, 2, 4}, .global_batch = 32, .lr = 0.5, .seconds = NAN});
  after.on_eval({.step = 2});
  after.on_step(step(2, 1));
  before.on_step(step(3, 1));  // the stopped rank must not write to the log
  std::vector<std::string> types;
  for (const json& record : lines(path)) types.push_back(record["type"]);
  EXPECT_EQ(types, (std::vector<std::string>{"run", "step", "step", "shrink", "grow", "eval", "step"}));
  const json shrink = lines(path)[3];
  EXPECT_EQ(shrink["lost"], (json{0, 3}));
  EXPECT_EQ(shrink["lost_residual_norms"][0], 0.5);
  EXPECT_TRUE(shrink["lost_residual_norms"][1].is_null());
  EXPECT_EQ(shrink["ranks"], (json{1, 2}));
  EXPECT_EQ(shrink["why"], "gone");
  const json grow = lines(path)[4];
  EXPECT_EQ(grow["joined"], json{4}) << grow;
  EXPECT_EQ(grow["ranks"], (json{1, 2, 4}));
  EXPECT_EQ(grow["lr"], 0.5);
  EXPECT_TRUE(grow["seconds"].is_null());
}

// Consecutive phases add up to the step; concurrent work does not count.
TEST(Records, SharesAreRelativeToAllSteps) {
  Summarizer summarizer;
  for (double ms : {10.0, 30.0}) {
    StepRecord s = step(0, 1);
    s.step_ms = ms;
    s.data_ms = 0;
    s.forward_ms = ms / 4;
    s.backward_ms = ms / 2;
    s.exposed_comm_ms = 2;
    s.compress_ms = 3, s.communicate_ms = 4, s.decompress_ms = 1;
    summarizer.on_step(s);
  }
  const RunSummary summary = summarizer.summary(1);
  const StepShares& shares = summary.shares;
  EXPECT_DOUBLE_EQ(shares.forward, 0.25);
  EXPECT_DOUBLE_EQ(shares.exposed_comm, 0.1);
  EXPECT_DOUBLE_EQ(shares.other, 0.15);
  EXPECT_DOUBLE_EQ(shares.communicate, 0.2);
  EXPECT_DOUBLE_EQ(*shares.hidden_of_comm(), 0.75);
  EXPECT_EQ(
      shares_text(summary),
      "Step time: forward 25.0 %, backward 50.0 %, waiting for communication 10.0 %, other 15.0 %\n"
      "In parallel: compression 15.0 %, communication 20.0 %, decompression 5.0 % of the step; 75 % of that "
      "overlapped with backward");
  EXPECT_DOUBLE_EQ(json::parse(summary_record(summary))["shares"]["hidden_of_comm"], 0.75);

  Summarizer alone;  // a world of 1
  StepRecord s = step(0, 1, 0);
  s.exposed_comm_ms = 0, s.forward_ms = 6;
  alone.on_step(s);
  EXPECT_EQ(shares_text(alone.summary(1)), "Step time: forward 60.0 %, waiting for data 40.0 %");
  EXPECT_TRUE(json::parse(summary_record(alone.summary(1)))["shares"]["hidden_of_comm"].is_null());
}

TEST(Records, SummaryHoldsMediansAndTheLastEvaluation) {
  Summarizer summarizer;
  summarizer.on_run(info("two_shot"));
  std::vector<uint64_t> wire{400, 100, 100};  // a dense first step does not change the median
  for (int64_t i = 0; i < 3; ++i)
    summarizer.on_step(step(i, 3.0 - static_cast<double>(i), wire[static_cast<size_t>(i)]));
  summarizer.on_eval({.test_accuracy = 0.1});
  summarizer.on_eval({.test_loss = 0.3, .test_accuracy = 0.9});
  RunSummary summary = summarizer.summary(2.5);
  EXPECT_EQ(summary.steps, 3);
  EXPECT_EQ(summary.step_ms, 11);
  EXPECT_EQ(summary.wire_bytes, 100);
  EXPECT_EQ(summary.ratio, 4.0);
  EXPECT_EQ(summary.total_wire_bytes, 600u);
  EXPECT_EQ(summary.test_accuracy, 0.9);
  EXPECT_EQ(summary.final_loss, 2.0);
  EXPECT_EQ(summary.schedule, "two_shot");
  EXPECT_EQ(summary.tflops, 0.5);
  EXPECT_EQ(summary.data_wait_share, 4.0 / 33.0);  // of all steps, not of the median step
  EXPECT_FALSE(summary.peak_fraction);
  RunInfo measured = info("two_shot");
  measured.peak_tflops = 2;
  summarizer.on_run(measured);
  EXPECT_EQ(summarizer.summary(2.5).peak_fraction, 0.25);
}

// In a ring, each rank waits for the previous one, which may itself wait: the straggler is the rank that
// waits least.
TEST(Records, StragglerIsTheRankThatWaitsLeast) {
  auto text = [](std::vector<std::vector<double>> waited_s) {
    Summarizer summarizer;
    summarizer.on_step(step(0, 1.0));
    summarizer.on_end({.waited_s = std::move(waited_s)});
    const RunSummary summary = summarizer.summary(100);
    EXPECT_EQ(json::parse(summary_record(summary))["waited_s"].size(), summary.waited_s.size());
    return straggler_text(summary);
  };
  EXPECT_EQ(text({{0, 0, 21}, {21, 0, 0}, {0, 1, 0}}),
            "Rank 2 was the straggler: each other rank waited 20.0 s longer (20 % of the run)");
  EXPECT_EQ(text({{0, 5}, {4, 0}}), "");
  EXPECT_EQ(text({}), "");
}

TEST(Records, FinalLossIsTheMeanOfTheLastSteps) {
  Summarizer summarizer;
  for (int64_t i = 0; i < 100; ++i) summarizer.on_step(step(i, i < 100 - kFinalLossSteps ? 1000.0 : 2.0));
  EXPECT_EQ(summarizer.summary(1).final_loss, 2.0);
}

TEST(Records, AWorldOfOneHasNoRatioAndARunWithoutEvaluationNoAccuracy) {
  Summarizer summarizer;
  StepRecord s = step(0, 1.0);
  s.wire_bytes = s.dense_bytes = 0;
  summarizer.on_step(s);
  json summary = json::parse(summary_record(summarizer.summary(1)));
  EXPECT_TRUE(summary["ratio"].is_null());
  EXPECT_TRUE(summary["test_accuracy"].is_null());
}

TEST(Records, MedianIgnoresMissingMeasurements) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({NAN, 5, NAN}), 5);
  EXPECT_EQ(median({7}), 7);
  EXPECT_TRUE(std::isnan(median({})));
  EXPECT_TRUE(std::isnan(median({NAN})));
}

TEST(Records, CompareDocumentHasExactlyTheDocumentedFields) {
  Summarizer summarizer;
  summarizer.on_step(step(0, 1.0));
  json document =
      json::parse(compare_document({compared("fp32", summarizer.summary(1)), compared("bf16", {})}));
  ASSERT_EQ(document.size(), 2u);
  std::vector<std::string> fields;
  for (const auto& [key, value] : document[0].items()) fields.push_back(key);
  std::vector<std::string> expected{"compression",  "test_accuracy",  "test_accuracy_std",
                                    "final_loss",   "final_loss_std", "step_ms",
                                    "images_per_s", "wire_bytes",     "wire_bytes_per_element",
                                    "dense_bytes",  "ratio",          "exposed_comm_ms",
                                    "ranks",        "device",         "schedule",
                                    "bucket_mb",    "seeds"};
  std::sort(expected.begin(), expected.end());
  std::sort(fields.begin(), fields.end());
  EXPECT_EQ(fields, expected);
  EXPECT_EQ(document[0]["ratio"], 4.0);
  EXPECT_TRUE(document[0]["test_accuracy_std"].is_null());  // a single run
}

TEST(Records, SeedsHaveAMeanAndASampleDeviation) {
  ComparedRun run = compared("bf16", {});
  run.seeds.clear();
  for (int i = 0; i < 3; ++i) {
    RunSummary s;
    s.test_accuracy = 0.8 + 0.01 * i;
    s.final_loss = 1.0 + i;
    s.step_ms = i == 0 ? 1000 : 10;  // the first run warms the machine up
    s.wire_bytes = 200;
    s.dense_bytes = 400;
    s.parameters = 100;
    run.seeds.push_back({static_cast<uint64_t>(5 + i), s, fmt::format("out.{}.jsonl", i)});
  }
  const json row = json::parse(compare_document({run}))[0];
  EXPECT_NEAR(row["test_accuracy"], 0.81, 1e-12);
  EXPECT_NEAR(row["test_accuracy_std"], 0.01, 1e-12);
  EXPECT_NEAR(row["final_loss"], 2.0, 1e-12);
  EXPECT_NEAR(row["final_loss_std"], 1.0, 1e-12);
  EXPECT_EQ(row["step_ms"], 10.0);
  EXPECT_EQ(row["ratio"], 2.0);
  EXPECT_EQ(row["wire_bytes_per_element"], 2.0);
  EXPECT_EQ(row["seeds"][1],
            (json{{"seed", 6}, {"test_accuracy", 0.81}, {"final_loss", 2.0}, {"log", "out.1.jsonl"}}));
  EXPECT_NE(compare_table({run}).find("81.00 +-1.00 %  2.0000 +-1.0000"), std::string::npos)
      << compare_table({run});
  run.seeds[1].summary.test_accuracy = {};  // never evaluated
  EXPECT_TRUE(json::parse(compare_document({run}))[0]["test_accuracy"].is_null());
}

TEST(EarlierRun, IsReadFromItsLog) {
  TemporaryFolder folder;
  const std::string path = folder.path("run.jsonl");
  EXPECT_EQ(read_earlier_run(path).settings, "");
  const TrainConfig c = config();
  const DataSplits d = data();
  Summarizer summarizer;
  {
    RunLog log(path, c, d);
    log.on_run(info("ring"));
    log.on_step(step(0, 1.25));
    summarizer.on_run(info("ring"));
    summarizer.on_step(step(0, 1.25));
    EXPECT_EQ(read_earlier_run(path).settings, settings_text(run_record(c, d, {})));
    EXPECT_FALSE(read_earlier_run(path).finished);
    summarizer.on_eval({.test_accuracy = 0.5});
    log.write_summary(summarizer.summary(7.5));
  }
  const EarlierRun earlier = read_earlier_run(path);
  EXPECT_TRUE(earlier.finished);
  ComparedRun now = compared("bf16", summarizer.summary(7.5)), before = compared("bf16", earlier.summary);
  EXPECT_EQ(compare_document({before}), compare_document({now}));
  EXPECT_EQ(earlier.summary.seconds, 7.5);

  testing::Bytes cut = testing::read_bytes(path);
  cut.resize(cut.size() - 3);
  testing::write_bytes(path, cut);
  EXPECT_FALSE(read_earlier_run(path).finished);
  testing::write_bytes(path, {'{', '}', '\n'});
  EXPECT_EQ(read_earlier_run(path).settings, "");
}

TEST(EarlierRun, SettingsAreThoseThatDetermineResults) {
  const TrainConfig c = config();
  const DataSplits d = data();
  const std::string settings = settings_text(run_record(c, d, info("ring")));
  EXPECT_EQ(settings_text(step_record({})), "");
  TrainConfig watched = c;
  watched.timeout_s = 5;
  watched.trace = "trace.json";
  EXPECT_EQ(settings_text(run_record(watched, d, info("tree"))), settings);
  std::vector<TrainConfig> others(6, c);
  others[0].seed = 3;
  others[1].lr = 0.123;
  others[2].compression = CompressionSpec::parse("powersgd:rank=4,ef=off");
  others[3].devices.pop_back();
  others[4].momentum = 0.5, others[4].optimizer = OptimizerKind::sgd;
  others[5].model.width = 32;
  for (const TrainConfig& other : others)
    EXPECT_NE(settings_text(run_record(other, d, info("ring"))), settings);
  EXPECT_NE(settings_text(run_record(c, make_synthetic(VitConfig{}, 30, 10, 0), info("ring"))), settings);
}

TEST(RunLog, WritesEachRecordImmediately) {
  TemporaryFolder folder;
  TrainConfig c = config();
  DataSplits d = data();
  RunLog log(folder.path("run.jsonl"), c, d);
  EXPECT_FALSE(std::filesystem::exists(folder.path("run.jsonl")))
      << "a run that never starts must leave no file";
  log.on_run({});
  EXPECT_EQ(lines(folder.path("run.jsonl")).size(), 1u);
  log.on_step(step(0, 1.0));
  EXPECT_EQ(lines(folder.path("run.jsonl")).size(), 2u);
  log.on_eval({});
  log.write_summary({});
  std::vector<json> records = lines(folder.path("run.jsonl"));
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0]["type"], "run");
  EXPECT_EQ(records[3]["type"], "summary");
}

TEST(RunLog, RejectsUnwritablePathsAtOnce) {
  TemporaryFolder folder;
  TrainConfig c = config();
  DataSplits d = data();
  testing::expect_bad_input([&] { RunLog(folder.path("none/run.jsonl"), c, d); },
                            {folder.path("none/run.jsonl"), "cannot be written"});
  testing::expect_bad_input([&] { RunLog(folder.path(), c, d); }, {"it is a folder"});
  testing::write_bytes(folder.path("file"), {});
  testing::expect_bad_input([&] { RunLog(folder.path("file/run.jsonl"), c, d); }, {"cannot be written"});
  EXPECT_FALSE(std::filesystem::exists(folder.path("none")));
}

TEST(RunLog, RejectsEqualFilesUnderDifferentNames) {
  TemporaryFolder folder;
  testing::write_bytes(folder.path("run"), {});
  std::filesystem::create_symlink(folder.path("run"), folder.path("link"));
  check_all_different({{"--init", ""}, {"--log", ""}, {"--trace", folder.path("new")}});
  for (const std::string& other : {folder.path("run"), folder.path("./run"), folder.path("link")}) {
    testing::expect_bad_input(
        [&] {
          check_all_different({{"--log", folder.path("run")}, {"--trace", other}});
        },
        {"--log", "--trace " + other, "the same file"});
  }
  testing::expect_bad_input(
      [&] {
        check_all_different({{"--log", folder.path("new")}, {"--trace", folder.path("x/../new")}});
      },
      {"the same file"});
}

TEST(RunLog, AtomicWritesLeaveTheOldOrTheNewFile) {
  TemporaryFolder folder;
  std::string path = folder.path("out.json");
  OutputFile(path).write("one");
  OutputFile(path).write("two");
  testing::Bytes bytes = testing::read_bytes(path);
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Console, FormatsNumbersWithUnits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.00 kB");
  EXPECT_EQ(human_bytes(999600), "1.00 MB");
  EXPECT_EQ(human_bytes(1226141600), "1.23 GB");
  EXPECT_EQ(human_count(306535400), "306,535,400");
  EXPECT_EQ(human_count(-1234), "-1,234");
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(NAN), "-");
  EXPECT_EQ(human_seconds(3.21), "3.2 s");
  EXPECT_EQ(human_seconds(65), "1:05");
  EXPECT_EQ(human_seconds(7390), "2:03:10");
}

TEST(Console, TableHasALineForEachRunAndAlignedColumns) {
  std::string table = compare_table({compared("fp32", {}), compared("powersgd:rank=4", {})});
  std::vector<size_t> lengths;
  std::istringstream stream(table);
  for (std::string text; std::getline(stream, text);) lengths.push_back(text.size());
  ASSERT_EQ(lengths.size(), 4u);
  for (size_t length : lengths) EXPECT_EQ(length, lengths[0]);
  EXPECT_EQ(table.find("bucket"), std::string::npos);
}

TEST(CompareTable, BucketSizesHaveAColumnWhereTheyDiffer) {
  std::vector<ComparedRun> runs{compared("fp32", {}), compared("fp32", {})};
  runs[0].bucket_mb = 0.5;
  runs[1].bucket_mb = 25;
  std::istringstream table(compare_table(runs));
  std::string head, rule, first, second;
  std::getline(table, head), std::getline(table, rule), std::getline(table, first),
      std::getline(table, second);
  EXPECT_NE(head.find("compression  bucket MiB  test accuracy"), std::string::npos) << head;
  EXPECT_EQ(first.substr(0, head.find("  test accuracy")), "fp32                0.5");
  EXPECT_EQ(second.substr(0, head.find("  test accuracy")), "fp32                 25");
  const json document = json::parse(compare_document(runs));
  EXPECT_EQ(document[0]["bucket_mb"], 0.5);
  EXPECT_TRUE(document[1]["bucket_mb"].is_number_integer());
}

// Output to a file or a pipe has no control characters, and a line for the first step, every n-th and the
// last.
TEST(Console, PrintsPlainLinesIfNotATerminal) {
  TemporaryFolder folder;
  TrainConfig c = config();
  c.steps = 10;
  std::FILE* out = std::fopen(folder.path("out").c_str(), "w");
  {
    Console console(c, {out, false, 4});
    console.on_run(info("ring"));
    for (int64_t i = 0; i < 10; ++i) console.on_step(step(i, 1.0));
  }
  std::fclose(out);
  testing::Bytes bytes = testing::read_bytes(folder.path("out"));
  std::string text(bytes.begin(), bytes.end());
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2 + 4);  // the model, the schedule; steps 1, 4, 8, 10
  EXPECT_NE(text.find("Schedule: "), std::string::npos);
  EXPECT_NE(text.find("step 10/10"), std::string::npos);
}

}  // namespace
}  // namespace gradwire
