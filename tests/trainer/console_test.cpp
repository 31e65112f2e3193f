// The log file and the output on the console.
#include "trainer/log/console.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "runtime/util/output_file.h"
#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "tests/trainer/records.h"
#include "trainer/log/comparison.h"
#include "trainer/log/run_log.h"

namespace gradwire {
namespace {

using nlohmann::json;
using testing::compared_run;
using testing::record_config;
using testing::record_data;
using testing::record_step;
using testing::records_in;
using testing::run_info;
using testing::TemporaryFolder;

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

TEST(RunLog, RejectsUnwritablePathsAtOnce) {
  TemporaryFolder folder;
  TrainConfig c = record_config();
  DataSplits d = record_data();
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
  testing::expect_has(head, {"compression  bucket MiB  test accuracy"});
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
    Console console(c, {out, false, 4});
    console.on_run(run_info("ring"));
    for (int64_t i = 0; i < 10; ++i) console.on_step(record_step(i, 1.0));
  }
  std::fclose(out);
  testing::Bytes bytes = testing::read_bytes(folder.path("out"));
  std::string text(bytes.begin(), bytes.end());
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  // Lines for the model, the schedule, and steps 1, 4, 8, 10.
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2 + 4);
  testing::expect_has(text, {"Schedule: ", "step 10/10"});
}

}  // namespace
}  // namespace gradwire
