#include "bench/harness/result_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace gradwire::bench {
namespace {

using Json = nlohmann::ordered_json;

// A row's fields as text, in their order.
using Cells = std::vector<std::pair<std::string, std::string>>;

std::string text_of(const Json& value, bool exact) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float() && !exact) return fmt::format("{:.4g}", value.get<double>());
  return value.dump();
}

void collect(const Json& object, const std::string& prefix, bool exact, Cells& cells) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      collect(value, prefix + key + ".", exact, cells);
    } else if (!value.is_array()) {
      cells.emplace_back(prefix + key, text_of(value, exact));
    }
  }
}

std::string in_csv(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string out = "\"";
  for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  out += '"';
  return out;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

// The rows as a rectangle. The first line names the columns; a row without a field has an empty cell.
std::vector<std::vector<std::string>> table_of(const Json& rows, bool exact) {
  std::vector<std::vector<std::string>> table(1);
  std::map<std::string, size_t> columns;
  for (const Json& row : rows) {
    Cells cells;
    collect(row, "", exact, cells);
    table.emplace_back(table[0].size());
    for (auto& [key, text] : cells) {
      const auto [at, is_new] = columns.try_emplace(key, table[0].size());
      if (is_new) table[0].push_back(key);
      if (at->second >= table.back().size()) table.back().resize(at->second + 1);
      table.back()[at->second] = std::move(text);
    }
  }
  for (auto& line : table) line.resize(table[0].size());
  return table;
}

std::string csv_of(const Json& rows) {
  std::string text;
  for (const auto& line : table_of(rows, true)) {
    for (size_t i = 0; i < line.size(); ++i) text += fmt::format("{}{}", i == 0 ? "" : ",", in_csv(line[i]));
    text += "\n";
  }
  return text;
}

std::string markdown_of(const Json& rows) {
  std::string text;
  for (const auto& line : table_of(rows, false)) {
    const bool heading = text.empty();
    for (const std::string& cell : line) text += fmt::format("| {} ", escaped(cell));
    text += "|\n";
    if (!heading) continue;
    for (size_t i = 0; i < line.size(); ++i) text += "|---";
    text += "|\n";
  }
  return text;
}

}  // namespace

CLI::Option* add_result_files(CLI::App& command, ResultPaths& paths, const std::string& about) {
  auto add = [&](const char* flag, std::string& path, const std::string& text) {
    return command.add_option(flag, path, text)->type_name("FILE");
  };
  CLI::Option* json = add("--json", paths.json, about);
  add("--csv", paths.csv, "The same as CSV");
  add("--markdown", paths.markdown, "The same as a Markdown table");
  return json;
}

ResultFiles::ResultFiles(const ResultPaths& paths)
    : json_(paths.json), csv_(paths.csv), markdown_(paths.markdown) {}

void ResultFiles::write(const Json& rows) {
  json_.write(rows.dump(1) + "\n");
  if (!csv_.path().empty()) csv_.write(csv_of(rows));
  if (!markdown_.path().empty()) markdown_.write(markdown_of(rows));
}

void add_timing(Json& row, const Timing& t, const std::string& stop) {
  row["n"] = t.n;
  row["min_us"] = t.min_us;
  row["q1_us"] = t.q1_us;
  row["median_us"] = t.median_us;
  row["q3_us"] = t.q3_us;
  row["iqr_us"] = t.iqr_us();
  row["noise"] = t.noise;
  row["stop"] = stop;
  row["stopped"] = name(t.stopped);
  row["sm_mhz"] = t.sm_mhz > 0 ? Json(t.sm_mhz) : Json(nullptr);
  row["throttled"] = t.throttled.empty() ? Json(nullptr) : Json(t.throttled);
}

Json timing_json(const Timing& timing, const std::string& stop) {
  Json json = Json::object();
  add_timing(json, timing, stop);
  return json;
}

CLI::Option* add_stop(CLI::App& command, std::string& stop) {
  return command
      .add_option(
          "--stop", stop,
          "When a measurement ends: parts of error=0.5%,samples=10,min=0.5s,max=15s (relative standard "
          "error, least samples, least and most time), a number of samples, or a time such as 50ms")
      ->capture_default_str();
}

std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return fmt::format("{:.4g}{}", value, kUnits[unit]);
}

namespace {

constexpr double kGap = 0.01, kCenters = 0.02, kSpread = 0.05, kOverlap = 0.5;
constexpr int kLeastSamples = 10;

struct Reason {
  Verdict verdict;
  std::string why;
};

bool is_above(const Timing& upper, const Timing& lower) {
  return upper.min_us > lower.q3_us * (1 + kGap);
}

Reason judge(const Timing& before, const Timing& after) {
  if (const int n = std::min(before.n, after.n); n < kLeastSamples) {
    return {Verdict::unsure, fmt::format("{} samples; at least {} are needed", n, kLeastSamples)};
  }
  if (is_above(after, before)) return {Verdict::slower, ""};
  if (is_above(before, after)) return {Verdict::faster, ""};
  for (const auto& [timing, which] : {std::pair(&before, "A"), std::pair(&after, "B")}) {
    const double spread = timing->iqr_us() / timing->median_us;
    if (spread > kSpread) {
      return {Verdict::unsure, fmt::format("{}'s interquartile range is {:.0f} %", which, 100 * spread)};
    }
  }
  const double centers =
      std::abs(after.median_us - before.median_us) / std::min(after.median_us, before.median_us);
  if (centers > kCenters) {
    return {Verdict::unsure,
            fmt::format("the medians differ by {:.0f} %, but the intervals do not, by {:.0f} %",
                        100 * centers, 100 * kGap)};
  }
  const double shared = std::min(before.q3_us, after.q3_us) - std::max(before.min_us, after.min_us);
  const double shorter = std::min(before.q3_us - before.min_us, after.q3_us - after.min_us);
  if (shared < kOverlap * shorter) return {Verdict::unsure, "the intervals hardly overlap"};
  return {Verdict::same, ""};
}

Timing in_cycles(Timing timing) {
  for (double* us : {&timing.min_us, &timing.q1_us, &timing.median_us, &timing.q3_us}) *us *= timing.sm_mhz;
  return timing;
}

}  // namespace

const char* name(Verdict verdict) {
  switch (verdict) {
    case Verdict::same:
      return "SAME";
    case Verdict::faster:
      return "FASTER";
    case Verdict::slower:
      return "SLOWER";
    case Verdict::unsure:
      break;
  }
  return "UNSURE";
}

Comparison compare(const Timing& before, const Timing& after) {
  const Reason time = judge(before, after);
  Comparison result;
  result.verdict = result.time = time.verdict;
  result.why = time.why;
  if (before.sm_mhz <= 0 || after.sm_mhz <= 0) return result;
  result.has_cycles = true;
  result.cycles = judge(in_cycles(before), in_cycles(after)).verdict;
  if (result.cycles == result.time) return result;
  result.verdict = Verdict::unsure;
  if (result.why.empty()) {
    result.why = fmt::format("{} in cycles: the SM clock was {:.0f} and {:.0f} MHz", name(result.cycles),
                             before.sm_mhz, after.sm_mhz);
  }
  return result;
}

}  // namespace gradwire::bench
