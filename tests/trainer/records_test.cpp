// The output of a run: records with the documented fields for all values, the log file, tables, the console.
#include "trainer/log/records.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ranges>
#include <sstream>

#include "runtime/util/file.h"
#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "tests/trainer/records.h"
#include "trainer/log/console.h"
#include "trainer/log/summary.h"

namespace gradwire::testing {
namespace {

using namespace std::string_literals;

using nlohmann::json;

TEST(Records, EachHasTheFieldsOfItsType) {
  json run = json::parse(run_record(record_config(), record_data(), run_info("ring")));
  EXPECT_EQ(run["type"], "run");
  EXPECT_EQ(run["schema"], 1);
  EXPECT_EQ(run["compression"], "powersgd:rank=4");
  EXPECT_EQ(run["ranks"], 2);
  EXPECT_EQ(run["device"], "host");
  EXPECT_EQ(run["schedule"], "ring");
  EXPECT_EQ(run["model"]["name"], "vit_tiny");
  EXPECT_EQ(run["gradient_group"], 2);
  EXPECT_FALSE(run["model"].contains("gelu"));  // the form of GELU is exact
  TrainConfig approximate = record_config();
  approximate.model.gelu = Gelu::tanh;
  EXPECT_EQ(json::parse(run_record(approximate, record_data(), run_info("ring")))["model"]["gelu"], "tanh");
  EXPECT_EQ(run["train_images"], 20);
  EXPECT_EQ(run["augment"], "none");
  EXPECT_TRUE(run["peak_tflops"].is_null());  // not measured
  EXPECT_TRUE(run["fma_share"].is_null());
  EXPECT_TRUE(run["products"].is_null());  // a GPU run has no BLAS library

  json s = json::parse(step_record(record_step(7, 0.5)));
  EXPECT_EQ(s["type"], "step");
  EXPECT_EQ(s["step"], 7);
  EXPECT_TRUE(s["wire_bytes"].is_number_integer());
  StepRecord numbered;  // a row for each member, and each member in one row
  double number = 0;
  for (const StepField& field : kStepFields) numbered.*field.value = ++number;
  EXPECT_EQ(number * sizeof(double), sizeof(StepValues));
  s = json::parse(step_record(numbered));
  for (const StepField& field : std::ranges::reverse_view(kStepFields)) EXPECT_EQ(s[field.key], number--);
  json e = json::parse(
      eval_record({.step = 3, .epoch = 1.5, .test_loss = 0.4, .test_accuracy = 0.875, .images = 10}));
  EXPECT_EQ(e["type"], "eval");
  EXPECT_EQ(e["epoch"], 1.5);
  EXPECT_EQ(e["test_accuracy"], 0.875);
  EXPECT_EQ(json::parse(summary_record({}))["type"], "summary");
}

TEST(Records, NonFiniteNumbersBecomeNull) {
  for (double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    json s = json::parse(step_record(record_step(0, bad)));
    EXPECT_TRUE(s["loss"].is_null());
    EvalRecord eval;
    eval.test_loss = bad;
    EXPECT_TRUE(json::parse(eval_record(eval))["test_loss"].is_null());
    Summarizer summarizer;
    summarizer.on_step(record_step(0, bad));
    EXPECT_TRUE(json::parse(summary_record(summarizer.summary(1)))["final_loss"].is_null());
  }
}

TEST(Records, PathsThatAreNotUtf8StayValidJson) {
  TrainConfig c = record_config();
  c.data = DataSpec::parse("cifar10:/data/\xff\xfe");
  EXPECT_TRUE(json::parse(run_record(c, record_data(), {})).is_object());
}

// Checks that a rank that takes over a run continues the run's log, and drops the records that it will report
// again.
TEST(Records, AnotherRankContinuesTheLog) {
  const TemporaryFolder folder;
  const std::string path = folder.path("run.jsonl");
  const TrainConfig c = record_config();
  const DataSplits d = record_data();
  RunLog before(path, c, d);
  before.on_run(run_info("ring"));
  for (int64_t i = 0; i < 3; ++i) before.on_step(record_step(i, 1));
  before.on_eval({.step = 2});
  RunInfo taken = run_info("ring");
  taken.first_step = 2;
  taken.takes_over = true;
  RunLog after(path, c, d);
  after.on_run(taken);
  after.on_group(
      {.step = 2, .lost = {0, 3}, .lost_residual_norms = {0.5, NAN}, .ranks = {1, 2}, .why = "gone"});
  after.on_group(
      {.step = 2, .joined = {4}, .ranks = {1, 2, 4}, .global_batch = 32, .lr = 0.5, .seconds = NAN});
  after.on_eval({.step = 2});
  after.on_step(record_step(2, 1));
  before.on_step(record_step(3, 1));  // the stopped rank must not write to the log
  std::vector<std::string> types;
  for (const json& record : records_in(path)) types.push_back(record["type"]);
  EXPECT_EQ(types, (std::vector<std::string>{"run", "step", "step", "shrink", "grow", "eval", "step"}));
  const json shrink = records_in(path)[3];
  EXPECT_EQ(shrink["lost"], (json{0, 3}));
  EXPECT_EQ(shrink["lost_residual_norms"][0], 0.5);
  EXPECT_TRUE(shrink["lost_residual_norms"][1].is_null());
  EXPECT_EQ(shrink["ranks"], (json{1, 2}));
  EXPECT_EQ(shrink["why"], "gone");
  const json grow = records_in(path)[4];
  EXPECT_EQ(grow["joined"], json{4}) << grow;
  EXPECT_EQ(grow["ranks"], (json{1, 2, 4}));
  EXPECT_EQ(grow["lr"], 0.5);
  EXPECT_TRUE(grow["seconds"].is_null());
}

// Checks that the shares of consecutive phases add up to the step. Concurrent work does not count.
TEST(Records, SharesAreRelativeToAllSteps) {
  Summarizer summarizer;
  for (double ms : {10.0, 30.0}) {
    StepRecord s = record_step(0, 1);
    s.step_ms = ms;
    s.data_ms = 0;
    s.forward_ms = ms / 4;
    s.backward_ms = ms / 2;
    s.exposed_comm_ms = 2;
    s.compress_ms = 3, s.communicate_ms = 4, s.decompress_ms = 1;
    summarizer.on_step(s);
  }
  const RunSummary summary = summarizer.summary(1);
  EXPECT_DOUBLE_EQ(summary.shares.forward_ms, 0.25);
  EXPECT_DOUBLE_EQ(summary.shares.exposed_comm_ms, 0.1);
  EXPECT_DOUBLE_EQ(summary.other_share, 0.15);
  EXPECT_DOUBLE_EQ(summary.shares.communicate_ms, 0.2);
  EXPECT_EQ(
      shares_text(summary),
      std::pair("forward 25.0 %, backward 50.0 %, waiting for communication 10.0 %, other 15.0 %"s,
                "compression 15.0 %, communication 20.0 %, decompression 5.0 %; 75 % of that overlapped with "
                "backward"s));
  EXPECT_DOUBLE_EQ(json::parse(summary_record(summary))["shares"]["hidden_of_comm"], 0.75);

  Summarizer alone;  // a world of 1
  StepRecord s = record_step(0, 1, 0);
  s.exposed_comm_ms = 0, s.forward_ms = 6;
  alone.on_step(s);
  EXPECT_EQ(shares_text(alone.summary(1)), std::pair("forward 60.0 %, waiting for data 40.0 %"s, ""s));
  EXPECT_TRUE(json::parse(summary_record(alone.summary(1)))["shares"]["hidden_of_comm"].is_null());
}

TEST(Records, SummaryHoldsMediansAndTheLastEvaluation) {
  Summarizer summarizer;
  summarizer.on_run(run_info("two_shot"));
  std::vector<uint64_t> wire{400, 100, 100};  // a dense first step does not change the median
  for (int64_t i = 0; i < 3; ++i) summarizer.on_step(record_step(i, 3.0 - static_cast<double>(i), wire[i]));
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
  EXPECT_EQ(summary.data_wait_share, 4.0 / 33.0);  // the share of all steps, not of the median step
  EXPECT_FALSE(summary.peak_fraction);
  RunInfo measured = run_info("two_shot");
  measured.peak_tflops = 2;
  summarizer.on_run(measured);
  EXPECT_EQ(summarizer.summary(2.5).peak_fraction, 0.25);
}

// Checks that the straggler is the rank that waits least. In a ring, each rank waits for the previous rank,
// which may also wait.
TEST(Records, StragglerIsTheRankThatWaitsLeast) {
  auto text = [](std::vector<std::vector<double>> waited_s) {
    Summarizer summarizer;
    summarizer.on_step(record_step(0, 1.0));
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
  for (int64_t i = 0; i < 100; ++i)
    summarizer.on_step(record_step(i, i < 100 - kFinalLossSteps ? 1000.0 : 2.0));
  EXPECT_EQ(summarizer.summary(1).final_loss, 2.0);
}

TEST(Records, ARunHasDivergedIfItsLastLossIsNotFinite) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct Case {
    std::vector<double> losses;
    double evaluated;
    double final_loss;  // NaN: diverged
  };
  for (const Case& c : {Case{{4, nan, 1, 3}, 1, 2}, Case{{4, nan}, 1, nan}, Case{{4, HUGE_VAL}, 1, nan},
                        Case{{4, 2}, nan, nan}}) {
    Summarizer summarizer;
    int64_t step = 0;
    for (const double loss : c.losses) summarizer.on_step(record_step(step++, loss));
    summarizer.on_eval({.step = step, .test_loss = c.evaluated});
    const RunSummary summary = summarizer.summary(1);
    EXPECT_EQ(summary.diverged(), std::isnan(c.final_loss));
    EXPECT_EQ(summary.test_accuracy.has_value(), !summary.diverged());
    if (!summary.diverged()) {
      EXPECT_EQ(summary.final_loss, c.final_loss);
    }
  }
}

TEST(Records, AWorldOfOneHasNoRatioAndARunWithoutEvaluationNoAccuracy) {
  Summarizer summarizer;
  StepRecord s = record_step(0, 1.0);
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
  summarizer.on_step(record_step(0, 1.0));
  json document =
      json::parse(compare_document({compared_run("fp32", summarizer.summary(1)), compared_run("bf16", {})}));
  ASSERT_EQ(document.size(), 2u);
  std::vector<std::string> fields;
  for (const auto& [key, value] : document[0].items()) fields.push_back(key);
  std::vector<std::string> expected{"compression",  "test_accuracy",  "test_accuracy_std",
                                    "final_loss",   "final_loss_std", "step_ms",
                                    "images_per_s", "wire_bytes",     "wire_bytes_per_element",
                                    "dense_bytes",  "ratio",          "exposed_comm_ms",
                                    "ranks",        "device",         "schedule",
                                    "bucket_mb",    "link",           "seeds"};
  std::sort(expected.begin(), expected.end());
  std::sort(fields.begin(), fields.end());
  EXPECT_EQ(fields, expected);
  EXPECT_EQ(document[0]["ratio"], 4.0);
  EXPECT_TRUE(document[0]["test_accuracy_std"].is_null());  // a single run
}

TEST(Records, SeedsHaveAMeanAndASampleDeviation) {
  ComparedRun run = compared_run("bf16", {});
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
  EXPECT_EQ(row["seeds"][1], (json{{"seed", 6},
                                   {"test_accuracy", 0.81},
                                   {"final_loss", 2.0},
                                   {"diverged", false},
                                   {"log", "out.1.jsonl"}}));
  expect_has(compare_table({run}), {"81.00 +-1.00 %  2.0000 +-1.0000"});
  run.seeds[1].summary.test_accuracy = {};  // this run has no evaluation
  EXPECT_TRUE(json::parse(compare_document({run}))[0]["test_accuracy"].is_null());
}

TEST(RunLog, WritesEachRecordImmediately) {
  TemporaryFolder folder;
  TrainConfig c = record_config();
  DataSplits d = record_data();
  RunLog log(folder.path("run.jsonl"), c, d);
  EXPECT_FALSE(std::filesystem::exists(folder.path("run.jsonl")))
      << "a run that never starts must leave no file";
  log.on_run({});
  EXPECT_EQ(records_in(folder.path("run.jsonl")).size(), 1u);
  log.on_step(record_step(0, 1.0));
  EXPECT_EQ(records_in(folder.path("run.jsonl")).size(), 2u);
  log.on_eval({});
  log.write_summary({});
  std::vector<json> records = records_in(folder.path("run.jsonl"));
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[0]["type"], "run");
  EXPECT_EQ(records[3]["type"], "summary");
}

TEST(RunLog, RejectsEqualFilesUnderDifferentNames) {
  TemporaryFolder folder;
  write_bytes(folder.path("run"), {});
  std::filesystem::create_symlink(folder.path("run"), folder.path("link"));
  std::filesystem::create_hard_link(folder.path("run"), folder.path("hard"));
  std::filesystem::create_symlink("none", folder.path("dangling"));
  check_all_different({{"--init", ""}, {"--log", ""}, {"--trace", folder.path("new")}});
  check_all_different({{"--log", "/dev/null"}, {"--trace", "/dev/null"}});
  for (const std::string& other :
       {folder.path("run"), folder.path("./run"), folder.path("link"), folder.path("hard")}) {
    expect_bad_input(
        [&] {
          check_all_different({{"--log", folder.path("run")}, {"--trace", other}});
        },
        {"--log", "--trace " + other, "the same file"});
  }
  expect_bad_input(
      [&] {
        check_all_different({{"--log", folder.path("new")}, {"--trace", folder.path("x/../new")}});
      },
      {"the same file"});
  expect_bad_input(
      [&] {
        check_all_different({{"--log", folder.path("none")}, {"--init", folder.path("dangling"), false}});
      },
      {"the same file"});
}

TEST(RunLog, AtomicWritesLeaveTheOldOrTheNewFile) {
  TemporaryFolder folder;
  std::string path = folder.path("out.json");
  OutputFile(path).write("one");
  OutputFile(path).write("two");
  Bytes bytes = read_bytes(path);
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
  std::string table = compare_table({compared_run("fp32", {}), compared_run("powersgd:rank=4", {})});
  std::vector<size_t> lengths;
  std::istringstream stream(table);
  for (std::string text; std::getline(stream, text);) lengths.push_back(text.size());
  ASSERT_EQ(lengths.size(), 4u);
  for (size_t length : lengths) EXPECT_EQ(length, lengths[0]);
  EXPECT_EQ(table.find("bucket"), std::string::npos);
}

TEST(CompareTable, BucketSizesHaveAColumnWhereTheyDiffer) {
  std::vector<ComparedRun> runs{compared_run("fp32", {}), compared_run("fp32", {})};
  runs[0].bucket_mb = 0.5;
  runs[1].bucket_mb = 25;
  std::istringstream table(compare_table(runs));
  std::string head, rule, first, second;
  std::getline(table, head), std::getline(table, rule), std::getline(table, first),
      std::getline(table, second);
  expect_has(head, {"compression  bucket MiB  test accuracy"});
  EXPECT_EQ(first.substr(0, head.find("  test accuracy")), "fp32                0.5");
  EXPECT_EQ(second.substr(0, head.find("  test accuracy")), "fp32                 25");
  const json document = json::parse(compare_document(runs));
  EXPECT_EQ(document[0]["bucket_mb"], 0.5);
  EXPECT_TRUE(document[1]["bucket_mb"].is_number_integer());
}

// Checks that output to a file or a pipe has no control characters, and has a line for the first step, every
// n-th step and the last step.
TEST(Console, PrintsPlainLinesIfNotATerminal) {
  TemporaryFolder folder;
  TrainConfig c = record_config();
  c.steps = 10;
  std::FILE* out = std::fopen(folder.path("out").c_str(), "w");
  {
    Console console(c, out, false, 4);
    console.on_run(run_info("ring"));
    for (int64_t i = 0; i < 10; ++i) console.on_step(record_step(i, 1.0));
  }
  std::fclose(out);
  Bytes bytes = read_bytes(folder.path("out"));
  std::string text(bytes.begin(), bytes.end());
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  // Lines for the model, and steps 1, 4, 8, 10.
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1 + 4);
  expect_has(text, {"step 10/10"});
}

TEST(EarlierRun, IsReadFromItsLog) {
  TemporaryFolder folder;
  const std::string path = folder.path("run.jsonl");
  EXPECT_EQ(read_earlier_run(path).settings, "");
  const TrainConfig c = record_config();
  const DataSplits d = record_data();
  Summarizer summarizer;
  {
    RunLog log(path, c, d);
    log.on_run(run_info("ring"));
    log.on_step(record_step(0, 1.25));
    summarizer.on_run(run_info("ring"));
    summarizer.on_step(record_step(0, 1.25));
    EXPECT_EQ(read_earlier_run(path).settings, settings_text(run_record(c, d, {})));
    EXPECT_FALSE(read_earlier_run(path).finished);
    summarizer.on_eval({.test_accuracy = 0.5});
    log.write_summary(summarizer.summary(7.5));
  }
  const EarlierRun earlier = read_earlier_run(path);
  EXPECT_TRUE(earlier.finished);
  ComparedRun now = compared_run("bf16", summarizer.summary(7.5)),
              before = compared_run("bf16", earlier.summary);
  EXPECT_EQ(compare_document({before}), compare_document({now}));
  EXPECT_EQ(earlier.summary.seconds, 7.5);

  Bytes cut = read_bytes(path);
  cut.resize(cut.size() - 3);
  write_bytes(path, cut);
  EXPECT_FALSE(read_earlier_run(path).finished);
  write_bytes(path, {'{', '}', '\n'});
  EXPECT_EQ(read_earlier_run(path).settings, "");
}

TEST(EarlierRun, SettingsAreThoseThatDetermineResults) {
  const TrainConfig c = record_config();
  const DataSplits d = record_data();
  const std::string settings = settings_text(run_record(c, d, run_info("ring")));
  EXPECT_EQ(settings_text(step_record({})), "");
  TrainConfig watched = c;
  watched.timeout_s = 5;
  watched.trace = "trace.json";
  EXPECT_EQ(settings_text(run_record(watched, d, run_info("tree"))), settings);
  std::vector<TrainConfig> others(7, c);
  others[0].seed = 3;
  others[1].lr = 0.123;
  others[2].compression = CompressionSpec::parse("powersgd:rank=4,ef=off");
  others[3].devices.pop_back();
  others[4].momentum = 0.5, others[4].optimizer = OptimizerKind::sgd;
  others[5].model.width = 32;
  others[6].link = EmulatedLink::parse("1Gbit,20ms");
  EXPECT_EQ(json::parse(run_record(others[6], d, {}))["link"], "1Gbit,20ms");
  for (const TrainConfig& other : others)
    EXPECT_NE(settings_text(run_record(other, d, run_info("ring"))), settings);
  EXPECT_NE(settings_text(run_record(c, make_synthetic(VitConfig{}, 30, 10, 0), run_info("ring"))), settings);
}

}  // namespace
}  // namespace gradwire::testing
