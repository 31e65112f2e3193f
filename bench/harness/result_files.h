// The files of a result: rows as JSON, CSV and Markdown.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

#include "bench/harness/measure.h"
#include "runtime/util/file.h"

namespace gradwire::bench {

struct ResultPaths {
  std::string json, csv, markdown;
};

// Adds --json, --csv and --markdown. Returns the option --json.
CLI::Option* add_result_files(CLI::App& command, ResultPaths& paths,
                              const std::string& about = "Write the table to FILE");

class ResultFiles {
 public:
  ResultFiles() = default;
  // Throws BadInput if a file cannot be written.
  explicit ResultFiles(const ResultPaths& paths);
  // Writes an array of rows. CSV and Markdown have a column per field: fields of an object within a row have
  // the object's name before theirs ("encode.n"), and arrays are only in the JSON file.
  void write(const nlohmann::ordered_json& rows);

 private:
  OutputFile json_, csv_, markdown_;
};

// Appends the fields of a measurement to a row: n, min_us, q1_us, median_us, q3_us, iqr_us, noise, stop,
// stopped, sm_mhz, throttled.
void add_timing(nlohmann::ordered_json& row, const Timing& timing, const std::string& stop);
// Returns these fields alone.
nlohmann::ordered_json timing_json(const Timing& timing, const std::string& stop);

// Adds --stop, with `stop` as its default. StopRule::parse() reads the value.
CLI::Option* add_stop(CLI::App& command, std::string& stop);

// Sizes in the format of the benchmarks' tables.

// Returns a size as text, in powers of 1024: "4K", "1.5M", "1G".
std::string size_text(int64_t bytes);

// Compares two measurements of the same work: whether the second is faster, by intervals [min, Q3].
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

enum class Verdict { same, faster, slower, unsure };
const char* name(Verdict verdict);

struct Comparison {
  Verdict verdict = Verdict::unsure, time = Verdict::unsure;
  bool has_cycles = false;
  Verdict cycles = Verdict::unsure;
  std::string why;  // of UNSURE
};

// Reads n, min_us, q1_us, median_us, q3_us and sm_mhz.
Comparison compare(const Timing& before, const Timing& after);

}  // namespace gradwire::bench
