#include "bench/harness/command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "runtime/threads/thread_pool.h"
#include "trainer/cli/flags.h"
#include "trainer/log/console.h"

namespace gradwire::bench {
namespace {

// Appends a row's fields as text, in their order. exact: with all digits of the numbers.
void collect(const Json& object, const std::string& prefix, bool exact,
             std::vector<std::pair<std::string, std::string>>& cells) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      collect(value, prefix + key + ".", exact, cells);
    } else if (!value.is_array()) {
      cells.emplace_back(prefix + key, value.is_null()     ? ""
                                       : value.is_string() ? value.get<std::string>()
                                       : value.is_number_float() && !exact
                                           ? fmt::format("{:.4g}", value.get<double>())
                                           : value.dump());
    }
  }
}

// Returns the rows as a rectangle. The first line names the columns; a row without a field has an empty cell.
std::vector<std::vector<std::string>> table_of(const Json& rows, bool exact) {
  std::vector<std::vector<std::string>> table(1);
  std::map<std::string, size_t> columns;
  for (const Json& row : rows) {
    std::vector<std::pair<std::string, std::string>> cells;
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

// Returns the text with `replacement` for each `c`.
std::string replaced(const std::string& text, char c, const std::string& replacement) {
  std::string out;
  for (char each : text) out += each == c ? replacement : std::string(1, each);
  return out;
}

std::string csv_text(const Json& rows) {
  std::string text;
  for (const auto& line : table_of(rows, true)) {
    for (size_t i = 0; i < line.size(); ++i) {
      const bool quoted = line[i].find_first_of(",\"\n") != std::string::npos;
      text += fmt::format("{}{}", i == 0 ? "" : ",",
                          quoted ? '"' + replaced(line[i], '"', "\"\"") + '"' : line[i]);
    }
    text += "\n";
  }
  return text;
}

std::string markdown_text(const Json& rows) {
  std::string text;
  for (const auto& line : table_of(rows, false)) {
    const bool heading = text.empty();
    for (const std::string& cell : line) text += fmt::format("| {} ", replaced(cell, '|', "\\|"));
    text += "|\n";
    for (size_t i = 0; heading && i < line.size(); ++i) text += "|---";
    if (heading) text += "|\n";
  }
  return text;
}

}  // namespace

CLI::Option* Command::add_size(const char* flags, uint64_t& bytes, const std::string& about, uint64_t least,
                               uint64_t most) {
  return add(flags, bytes, about)
      ->type_name("SIZE")
      ->transform(size_value(false))
      ->check(CLI::Range(least, most));
}

CLI::Option* Command::add_device() {
  return add("--device", device_, "auto (all devices), host or cuda",
             CLI::IsMember({"auto", "host", "cuda"}));
}

void Command::add_threads(const std::string& about) {
  add("--threads", threads_, about + " (default: GRADWIRE_THREADS, or all cores)", CLI::Range(1, 4096));
}

void Command::add_stop() {
  add("--stop", stop_text_,
      "When a measurement ends: parts of error=0.5%,samples=10,min=0.5s,max=15s (relative standard error, "
      "least samples, least and most time), a number of samples, or a time such as 50ms")
      ->capture_default_str();
}

CLI::Option* Command::add_json(const std::string& about) {
  return add("--json", json_path_, about)->type_name("FILE");
}

CLI::Option* Command::add_files(const std::string& about) {
  json_indent_ = 1;
  CLI::Option* json = add_json(about);
  add("--csv", csv_path_, "The same as CSV")->type_name("FILE");
  add("--markdown", markdown_path_, "The same as a Markdown table")->type_name("FILE");
  return json;
}

void Command::open() {
  stop_ = StopRule::parse(stop_text_);
  json_ = OutputFile(json_path_);
  csv_ = OutputFile(csv_path_);
  markdown_ = OutputFile(markdown_path_);
  if (threads_ > 0) set_host_threads(threads_);
}

std::string Command::line_text(const std::vector<std::string>& cells) const {
  std::string text;
  for (size_t i = 0; i < columns_.size(); ++i) {
    const Column& column = columns_[i];
    if (i > 0) text += column.gap;
    text += column.width > 0 ? fmt::format("{:>{}}", cells[i], column.width)
                             : fmt::format("{:<{}}", cells[i], -column.width);
  }
  return text;
}

void Command::print_heading() const {
  std::vector<std::string> cells;
  for (const Column& column : columns_) cells.emplace_back(column.heading);
  fmt::print("{}\n", line_text(cells));
  std::fflush(stdout);
}

void Command::add_row(Json row, const Json& shown) {
  std::vector<std::string> cells;
  for (const Column& column : columns_) {
    const Json& value = shown.contains(column.key) ? shown[column.key] : row.at(column.key);
    cells.push_back(value.is_null()     ? (column.width == 0 ? "" : "-")
                    : value.is_string() ? value.get<std::string>()
                    : column.digits < 0 ? value.dump()
                                        : fmt::format("{:.{}f}{}", value.get<double>() * column.scale,
                                                      column.digits, column.unit));
  }
  fmt::print("{}\n", line_text(cells));
  std::fflush(stdout);
  rows_.push_back(std::move(row));
  const auto begin = std::chrono::steady_clock::now();
  if (begin < next_save_) return;
  try {
    write_files(false);
    next_save_ = begin + 20 * (std::chrono::steady_clock::now() - begin);  // a long table, seldom
  } catch (const std::exception&) {  // the last write_files() reports it, after all rows are printed
    next_save_ = std::chrono::steady_clock::time_point::max();
  }
}

void Command::case_done(size_t done, size_t total) {
  const auto now = std::chrono::steady_clock::now();
  if (done == 1) {
    first_case_ = now;
    next_estimate_ = now + std::chrono::seconds(5);
  }
  if (now < next_estimate_) return;
  next_estimate_ = now + std::chrono::seconds(30);
  const double passed_s = std::chrono::duration<double>(now - first_case_).count();
  const double left_s = passed_s / static_cast<double>(done - 1) * static_cast<double>(total - done);
  if (left_s > 60) {
    fmt::print(stderr, "gradwire-bench: case {} of {}, about {} left\n", done, total, human_seconds(left_s));
  }
}

void Command::write_files(bool last) {
  auto write = [&](OutputFile& file, const auto& text_of) {
    if (file.path().empty() || !(last || file.is_regular())) return;
    const std::string part = file.path() + ".part";
    if (!last) return OutputFile(part).write(text_of(rows_));
    file.write(text_of(rows_));
    std::error_code none;
    if (file.is_regular()) std::filesystem::remove(part, none);
  };
  write(json_, [&](const Json& rows) { return rows.dump(json_indent_) + "\n"; });
  write(csv_, csv_text);
  write(markdown_, markdown_text);
  if (last && above_copy_ > 0) {
    fmt::print(
        "{} figures are over 110 % of copying: the machine was busy while the copies were timed, or the op\n"
        "mostly reads, or the caches held its memory. Repeat on an idle machine.\n",
        above_copy_);
  }
}

Json Command::timing_json(const Timing& t) const {
  return {{"n", t.n},
          {"min_us", t.min_us},
          {"q1_us", t.q1_us},
          {"median_us", t.median_us},
          {"q3_us", t.q3_us},
          {"iqr_us", t.q3_us - t.q1_us},
          {"noise", t.noise},
          {"stop", stop_.to_string()},
          {"stopped", t.stopped},
          {"sm_mhz", t.sm_mhz > 0 ? Json(t.sm_mhz) : Json(nullptr)},
          {"throttled", t.throttled.empty() ? Json(nullptr) : Json(t.throttled)}};
}

std::string last_line(int fd) {
  std::string text = read_from_start(fd, "a file in memory");
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);  // without a line break, the whole text, because npos + 1 is 0
}

std::string size_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"", "K", "M", "G", "T"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  return fmt::format("{:.4g}{}", value, kUnits[unit]);
}

int usual_per_node(int world) {
  for (int per_node = std::min(8, world / 2); per_node > 1; --per_node) {
    if (world % per_node == 0) return per_node;
  }
  return 0;
}

}  // namespace gradwire::bench
