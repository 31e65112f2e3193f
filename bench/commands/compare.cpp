// gradwire-bench compare: a verdict for each row of two results of one command.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/commands/main.h"
#include "bench/harness/result_files.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/log/summary.h"

namespace gradwire::bench {
namespace {

using Json = nlohmann::ordered_json;

// The fields that identify a row. All others are measured, or settings of the measurement.
const std::vector<std::string> kIdentity = {
    "model",  "op",         "variant", "spec",  "compression", "schedule", "transport", "ranks",  "rank",
    "device", "size_bytes", "shape",   "cache", "batch_size",  "average",  "blocking",  "unalign"};

struct CompareOptions {
  std::string before, after;  // paths, separated by commas
  std::vector<std::string> ignore;
  ResultPaths results;
};

struct TimedRow {
  std::string name;
  Timing timing;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw BadInput(
      fmt::format("{}: {}; expected the --json of gradwire-bench kernels, formats, hook, "
                  "orthonormalize, step or collectives",
                  path, why));
}

// Returns the row's name, without the fields `ignore`. Values that are the same in most rows stay: a name
// must not depend on the other rows.
std::string name_of(const Json& row, const std::vector<std::string>& ignore) {
  std::string name;
  for (const std::string& key : kIdentity) {
    const auto at = row.find(key);
    if (at == row.end() || std::find(ignore.begin(), ignore.end(), key) != ignore.end()) continue;
    std::string text = at->is_string() ? at->get<std::string>() : fmt::format("{}={}", key, at->dump());
    if (!text.empty()) name += (name.empty() ? "" : ", ") + text;
  }
  return name;
}

bool is_timing(const Json& object) {
  return object.is_object() && object.contains("min_us") && object.contains("q3_us");
}

Timing timing_of(const Json& object, const std::string& path) {
  auto number = [&](const char* key) {
    const auto at = object.find(key);
    if (at == object.end() || !at->is_number() || at->get<double>() < 0)
      refuse(path, fmt::format("{} is not a number", key));
    return at->get<double>();
  };
  Timing timing;
  timing.n = static_cast<int>(number("n"));
  timing.min_us = number("min_us");
  timing.q1_us = number("q1_us");
  timing.median_us = number("median_us");
  timing.q3_us = number("q3_us");
  if (timing.median_us <= 0) refuse(path, "median_us is 0");
  if (const auto mhz = object.find("sm_mhz"); mhz != object.end() && mhz->is_number()) {
    timing.sm_mhz = mhz->get<double>();
  }
  return timing;
}

// Returns the measurements of a result: of each row, and of the objects within a row, such as "encode".
std::vector<TimedRow> read_rows(const std::string& path, const std::vector<std::string>& ignore) {
  Json document;
  try {
    document = Json::parse(read_regular_file(path));
  } catch (const nlohmann::json::exception&) {
    refuse(path, "not JSON");
  }
  if (!document.is_array() || document.empty() || !document[0].is_object())
    refuse(path, "not a list of rows");
  std::vector<TimedRow> rows;
  for (const Json& row : document) {
    if (!row.is_object()) refuse(path, "not a list of rows");
    const std::string name = name_of(row, ignore);
    if (is_timing(row)) rows.push_back({name, timing_of(row, path)});
    for (const auto& [key, value] : row.items()) {
      if (is_timing(value)) rows.push_back({fmt::format("{}, {}", name, key), timing_of(value, path)});
    }
  }
  if (rows.empty()) refuse(path, "no row has min_us and q3_us");
  return rows;
}

// Returns the timing of a row that several runs measured: the interval of the minima of the fastest five.
// Other work on the machine only lengthens times, and may last as long as a run. Five runs of A that are all
// faster than each run of B are hardly a coincidence.
Timing merge(const std::vector<Timing>& runs) {
  if (runs.size() == 1) return runs[0];
  std::vector<double> minima;
  for (const Timing& run : runs) minima.push_back(run.min_us);
  std::sort(minima.begin(), minima.end());
  minima.resize(std::min<size_t>(minima.size(), 5));
  Timing merged = summarize(minima);
  merged.q3_us = minima.back();
  merged.n = 0;
  merged.sm_mhz = runs[0].sm_mhz;
  for (const Timing& run : runs) {
    merged.n += run.n;
    merged.sm_mhz = std::min(merged.sm_mhz, run.sm_mhz);
  }
  return merged;
}

// Returns the merged measurements of all results of one build. Rows that a result lacks are refused.
std::vector<TimedRow> read_runs(const std::string& joined, const std::vector<std::string>& ignore) {
  std::vector<std::string> paths;
  std::istringstream words(joined);
  for (std::string path; std::getline(words, path, ',');) paths.push_back(path);
  if (paths.empty()) refuse("''", "not a file");
  std::vector<TimedRow> rows = read_rows(paths[0], ignore);
  std::vector<std::vector<Timing>> runs(rows.size());
  for (const std::string& path : paths) {
    const std::vector<TimedRow> read = read_rows(path, ignore);
    for (size_t i = 0; i < std::max(rows.size(), read.size()); ++i) {
      if (i >= rows.size())
        refuse(path, fmt::format("row {}, '{}', is not in {}", i + 1, read[i].name, paths[0]));
      if (i >= read.size() || read[i].name != rows[i].name)
        refuse(path, fmt::format("row {} is not '{}' as in {}", i + 1, rows[i].name, paths[0]));
      runs[i].push_back(read[i].timing);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) rows[i].timing = merge(runs[i]);
  return rows;
}

Json json_of(const std::string& row, const Timing& before, const Timing& after, const Comparison& c) {
  Json json = {{"row", row},           {"verdict", name(c.verdict)},
               {"time", name(c.time)}, {"cycles", c.has_cycles ? Json(name(c.cycles)) : Json(nullptr)},
               {"why", c.why},         {"change", after.median_us / before.median_us - 1}};
  for (const auto& [key, timing] : {std::pair("a", &before), std::pair("b", &after)}) {
    json[key] = {{"n", timing->n},
                 {"min_us", timing->min_us},
                 {"median_us", timing->median_us},
                 {"q3_us", timing->q3_us},
                 {"sm_mhz", timing->sm_mhz > 0 ? Json(timing->sm_mhz) : Json(nullptr)}};
  }
  return json;
}

std::string interval(const Timing& timing) {
  return fmt::format("{:.4g} to {:.4g}", timing.min_us, timing.q3_us);
}

// Compares the rows that both results have, each with the row of the same name and place among these.
class ComparedRows {
 public:
  void add(const std::string& row, const Timing& before, const Timing& after) {
    const Comparison c = compare(before, after);
    ++counts_[c.verdict];
    table_.push_back({row, interval(before), interval(after),
                      fmt::format("{:+.1f} %", 100 * (after.median_us / before.median_us - 1)),
                      name(c.verdict) + (c.why.empty() ? "" : ": " + c.why)});
    rows_.push_back(json_of(row, before, after, c));
  }
  int count(Verdict verdict) const {
    const auto at = counts_.find(verdict);
    return at == counts_.end() ? 0 : at->second;
  }
  const Json& rows() const { return rows_; }
  void print() const {
    fmt::print("{}\n{} rows:", table_text(table_, "", true), rows_.size());
    for (Verdict verdict : {Verdict::same, Verdict::faster, Verdict::slower, Verdict::unsure}) {
      fmt::print(" {} {}{}", count(verdict), name(verdict), verdict == Verdict::unsure ? "\n" : ",");
    }
  }

 private:
  Table table_ = {{"row", "A, us", "B, us", "median", "verdict"}};
  Json rows_ = Json::array();
  std::map<Verdict, int> counts_;
};

int run(const CompareOptions& o) {
  for (const std::string& key : o.ignore) {
    if (std::find(kIdentity.begin(), kIdentity.end(), key) == kIdentity.end())
      throw BadInput(fmt::format("--ignore {}: not a field that identifies rows; use one of {}", key,
                                 fmt::join(kIdentity, ", ")));
  }
  ResultFiles results(o.results);
  const std::vector<TimedRow> before = read_runs(o.before, o.ignore), after = read_runs(o.after, o.ignore);
  std::multimap<std::string, const Timing*> open;  // equal names stay in order
  for (const TimedRow& row : after) open.emplace(row.name, &row.timing);
  ComparedRows compared;
  std::vector<std::string> alone;
  for (const TimedRow& row : before) {
    const auto at = open.lower_bound(row.name);
    if (at == open.end() || at->first != row.name) {
      alone.push_back(row.name);
      continue;
    }
    compared.add(row.name, row.timing, *at->second);
    open.erase(at);
  }
  if (compared.rows().empty()) {
    throw BadInput(
        fmt::format("{} and {} have no row in common: the first has '{}', the second '{}'; see "
                    "--ignore",
                    o.before, o.after, before[0].name, after[0].name));
  }
  compared.print();
  if (!alone.empty()) fmt::print("only in {}: {} rows, such as {}\n", o.before, alone.size(), alone[0]);
  if (!open.empty())
    fmt::print("only in {}: {} rows, such as {}\n", o.after, open.size(), open.begin()->first);
  results.write(compared.rows());
  return compared.count(Verdict::slower) > 0 ? 1 : 0;
}

}  // namespace

void add_compare(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<CompareOptions>();
  CLI::App* command = app.add_subcommand(
      "compare",
      "Whether each row of B is SAME, FASTER or SLOWER than in A, or UNSURE; exit code 1 if a row is SLOWER");
  const char* kinds[] = {"A result: --json of a measuring command; or several, A1,A2,..., from runs in turns",
                         "The same of another build"};
  command->add_option("A", o->before, kinds[0])->type_name("FILE")->required();
  command->add_option("B", o->after, kinds[1])->type_name("FILE")->required();
  command
      ->add_option("--ignore", o->ignore,
                   "Match rows that differ in this field, such as device or size_bytes; repeatable")
      ->expected(1)
      ->take_all();
  add_result_files(*command, o->results, "Write the verdicts to FILE");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
