// gradwire-bench compare: a verdict for each row of two results of one command: whether the second is faster,
// by intervals [min, Q3].
//
// The interval is where a quiet machine's times lie: other work only lengthens times, so the slowest quarter
// is left out. The rules are those of nvbench's robust comparison:
//
//   FASTER, SLOWER   the intervals do not overlap, and the gap is at least 1 % of the lower one's end
//   SAME             the intervals overlap by at least half of the shorter, the medians differ by at most
//                    2 %, and both interquartile ranges are at most 5 % of the median
//   UNSURE           otherwise: fewer than 10 samples, too much noise, or too small a difference
//
// Where the SM clock of both is known, the verdict in cycles must be the same, else the verdict is UNSURE.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>
#include <sstream>

#include "bench/harness/command.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/log/summary.h"

namespace gradwire::bench {
namespace {

constexpr double kGap = 0.01, kCenters = 0.02, kSpread = 0.05, kOverlap = 0.5;
constexpr int kMinSamples = 10;
const std::string kSame = "SAME", kFaster = "FASTER", kSlower = "SLOWER", kUnsure = "UNSURE";

// Returns the verdict, and the reason of UNSURE.
std::pair<std::string, std::string> compare_times(const Timing& before, const Timing& after) {
  if (const int n = std::min(before.n, after.n); n < kMinSamples)
    return {kUnsure, fmt::format("{} samples; at least {} are needed", n, kMinSamples)};
  if (after.min_us > before.q3_us * (1 + kGap)) return {kSlower, ""};
  if (before.min_us > after.q3_us * (1 + kGap)) return {kFaster, ""};
  for (const auto& [timing, which] : {std::pair(&before, "A"), std::pair(&after, "B")}) {
    const double spread = (timing->q3_us - timing->q1_us) / timing->median_us;
    if (spread > kSpread)
      return {kUnsure, fmt::format("{}'s interquartile range is {:.0f} %", which, 100 * spread)};
  }
  const double centers =
      std::abs(after.median_us - before.median_us) / std::min(after.median_us, before.median_us);
  if (centers > kCenters) {
    return {kUnsure, fmt::format("the medians differ by {:.0f} %, but the intervals do not, by {:.0f} %",
                                 100 * centers, 100 * kGap)};
  }
  const double shared = std::min(before.q3_us, after.q3_us) - std::max(before.min_us, after.min_us);
  const double shorter = std::min(before.q3_us - before.min_us, after.q3_us - after.min_us);
  if (shared < kOverlap * shorter) return {kUnsure, "the intervals hardly overlap"};
  return {kSame, ""};
}

// Returns the row of two measurements with the names of --json: verdict, time, cycles, why.
Json compared(const std::string& name, const Timing& before, const Timing& after) {
  auto [time, why] = compare_times(before, after);
  std::string verdict = time;
  Json cycles = nullptr;
  if (before.sm_mhz > 0 && after.sm_mhz > 0) {
    auto in_cycles = [](Timing t) {
      for (double* us : {&t.min_us, &t.q1_us, &t.median_us, &t.q3_us}) *us *= t.sm_mhz;
      return t;
    };
    cycles = compare_times(in_cycles(before), in_cycles(after)).first;
    if (cycles != time) {
      verdict = kUnsure;
      if (why.empty()) {
        why = fmt::format("{} in cycles: the SM clock was {:.0f} and {:.0f} MHz", cycles.get<std::string>(),
                          before.sm_mhz, after.sm_mhz);
      }
    }
  }
  Json row = {{"row", name},      {"verdict", verdict}, {"time", time},
              {"cycles", cycles}, {"why", why},         {"change", after.median_us / before.median_us - 1}};
  for (const auto& [key, timing] : {std::pair("a", &before), std::pair("b", &after)}) {
    row[key] = {{"n", timing->n},
                {"min_us", timing->min_us},
                {"median_us", timing->median_us},
                {"q3_us", timing->q3_us},
                {"sm_mhz", timing->sm_mhz > 0 ? Json(timing->sm_mhz) : Json(nullptr)}};
  }
  return row;
}

// The fields that identify a row. All others are measured, or settings of the measurement.
const std::vector<std::string> kIdentity = {
    "model",  "op",         "variant", "spec",  "compression", "schedule", "transport", "ranks",  "rank",
    "device", "size_bytes", "shape",   "cache", "batch_size",  "average",  "blocking",  "unalign"};

using TimedRow = std::pair<std::string, Timing>;  // the row's name and its measurement

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw BadInput(
      "{}: {}; expected the --json of gradwire-bench kernels, formats, hook, "
      "orthonormalize, step or collectives",
      path, why);
}

// Returns the measurement that an object holds, or nothing.
std::optional<Timing> timing_of(const Json& object, const std::string& path) {
  if (!object.is_object() || !object.contains("min_us") || !object.contains("q3_us")) return {};
  auto number = [&](const char* key) {
    const auto at = object.find(key);
    if (at == object.end() || !at->is_number() || at->get<double>() < 0)
      refuse(path, fmt::format("{} is not a number", key));
    return at->get<double>();
  };
  Timing timing{static_cast<int>(number("n")), number("min_us"), number("q1_us"), number("median_us"),
                number("q3_us")};
  if (timing.median_us <= 0) refuse(path, "median_us is 0");
  if (const auto mhz = object.find("sm_mhz"); mhz != object.end() && mhz->is_number()) {
    timing.sm_mhz = mhz->get<double>();
  }
  return timing;
}

// Returns the measurements of a result: of each row, and of the objects within a row, such as "encode". Their
// names lack the fields `ignore`.
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
    // Values that are the same in most rows stay: a name must not depend on the other rows.
    std::string name;
    for (const std::string& key : kIdentity) {
      const auto at = row.find(key);
      if (at == row.end() || std::find(ignore.begin(), ignore.end(), key) != ignore.end()) continue;
      std::string text = at->is_string() ? at->get<std::string>() : fmt::format("{}={}", key, at->dump());
      if (!text.empty()) name += (name.empty() ? "" : ", ") + text;
    }
    if (const auto timing = timing_of(row, path)) rows.emplace_back(name, *timing);
    for (const auto& [key, value] : row.items()) {
      if (const auto timing = timing_of(value, path))
        rows.emplace_back(fmt::format("{}, {}", name, key), *timing);
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
        refuse(path, fmt::format("row {}, '{}', is not in {}", i + 1, read[i].first, paths[0]));
      if (i >= read.size() || read[i].first != rows[i].first)
        refuse(path, fmt::format("row {} is not '{}' as in {}", i + 1, rows[i].first, paths[0]));
      runs[i].push_back(read[i].second);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) rows[i].second = merge(runs[i]);
  return rows;
}

class Compare final : public Command {
 public:
  explicit Compare(CLI::App& app)
      : Command(
            app, "compare",
            "Whether each row of B is SAME, FASTER or SLOWER than in A, or UNSURE; exit code 1 if a row is "
            "SLOWER") {
    add("A", before_, "A result: --json of a measuring command; or several, A1,A2,..., from runs in turns")
        ->type_name("FILE")
        ->required();
    add("B", after_, "The same of another build")->type_name("FILE")->required();
    add_repeatable("--ignore", ignore_,
                   "Match rows that differ in this field, such as device or size_bytes; repeatable");
    add_files("Write the verdicts to FILE");
  }

  int run() override {
    for (const std::string& key : ignore_) {
      if (std::find(kIdentity.begin(), kIdentity.end(), key) == kIdentity.end())
        throw BadInput("--ignore {}: not a field that identifies rows; use one of {}", key,
                       fmt::join(kIdentity, ", "));
    }
    open();
    const std::vector<TimedRow> before = read_runs(before_, ignore_), after = read_runs(after_, ignore_);
    std::multimap<std::string, const Timing*> open_rows;  // equal names stay in order
    for (const auto& [name, timing] : after) open_rows.emplace(name, &timing);
    std::vector<std::string> alone;
    Table table = {{"row", "A, us", "B, us", "median", "verdict"}};
    std::map<std::string, int> counts;
    auto interval = [](const Timing& t) { return fmt::format("{:.4g} to {:.4g}", t.min_us, t.q3_us); };
    for (const auto& [name, timing] : before) {
      const auto at = open_rows.lower_bound(name);
      if (at == open_rows.end() || at->first != name) {
        alone.push_back(name);
        continue;
      }
      const Json& row = rows_.emplace_back(compared(name, timing, *at->second));
      const std::string verdict = row["verdict"], why = row["why"];
      ++counts[verdict];
      table.push_back({name, interval(timing), interval(*at->second),
                       fmt::format("{:+.1f} %", 100 * row["change"].get<double>()),
                       verdict + (why.empty() ? "" : ": " + why)});
      open_rows.erase(at);
    }
    if (rows_.empty()) {
      throw BadInput(
          "{} and {} have no row in common: the first has '{}', the second '{}'; see "
          "--ignore",
          before_, after_, before[0].first, after[0].first);
    }
    fmt::print("{}\n{} rows: {} SAME, {} FASTER, {} SLOWER, {} UNSURE\n", table_text(table, "", true),
               rows_.size(), counts[kSame], counts[kFaster], counts[kSlower], counts[kUnsure]);
    if (!alone.empty()) fmt::print("only in {}: {} rows, such as {}\n", before_, alone.size(), alone[0]);
    if (!open_rows.empty())
      fmt::print("only in {}: {} rows, such as {}\n", after_, open_rows.size(), open_rows.begin()->first);
    write_files();
    return counts[kSlower] > 0 ? 1 : 0;
  }

 private:
  std::string before_, after_;  // paths, separated by commas
  std::vector<std::string> ignore_;
};

}  // namespace

std::unique_ptr<Command> make_compare(CLI::App& app) {
  return std::make_unique<Compare>(app);
}

}  // namespace gradwire::bench
