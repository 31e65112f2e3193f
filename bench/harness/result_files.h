// The files of a result: rows as JSON, CSV and Markdown.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/harness/timing.h"
#include "runtime/util/output_file.h"

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

}  // namespace gradwire::bench
