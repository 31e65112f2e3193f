// The flags of each command: ranges, choices, conflicts. Parsing throws CLI::ParseError if a flag is invalid.
#pragma once

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/config/settings.h"
#include "trainer/data/dataset.h"
#include "trainer/measure/recommend.h"

namespace gradwire {

struct Resolved {
  TrainConfig config;                         // settings with the first compression and bucket size
  std::vector<CompressionSpec> compressions;  // with `automatic`, its candidates
  std::optional<AutoCompression> automatic;   // --compression auto; config.compression is FP32 until chosen
  bool chosen = false;                        // config.compression is the resumed checkpoint's choice
  std::vector<double> buckets_mb;
  DataSplits data;
  std::string device_line;         // names the device, the number of ranks, and the reason for the device
  std::vector<std::string> notes;  // further notes for the user
};

// Resolves the options that concern only the machine and the model: ranks, devices, model, compression,
// precision. Throws BadInput.
Resolved resolve_machine(const RunOptions& options);

// Checks everything that can be checked without running, and loads the data. Throws BadInput.
Resolved resolve(const RunOptions& options);

// The options of the commands that only read files.
struct FileOptions {
  std::string log;                 // top: of the run
  bool prometheus = false;         // top
  std::vector<std::string> files;  // report and export: logs and results
  std::string page = "report.html", tensorboard,
              csv;  // the output of report, and of export: a folder or a file
};

// Returns the formatter of --help: wrapped at words to the terminal's width, at most 110 columns, with ranges
// and defaults behind each flag's text. A command's footer has an example in each line.
std::shared_ptr<CLI::FormatterBase> help_formatter();
// Returns the columns of texts for the terminal: those of the terminal or of COLUMNS, from 40 to 110.
size_t text_columns();
// Adds the flags of Setting::kTrain, kCompare, kDoctor or kPlan.
void add_run_flags(CLI::App& command, int which, RunOptions& options);
// Wraps a text at blanks to at most `width` columns, of which the first line has used `used`. Further lines
// begin with `indent` blanks; `end` ends all lines but the last.
std::string wrapped(const std::string& text, size_t width, size_t used, size_t indent, const char* end = "");

// Returns the given flags of a command, such as "--lr=0.01", with which `train` repeats the run: those of
// train, without those that write files.
std::vector<std::string> repeatable_flags(const CLI::App& command);
// Returns the flags of the run of a log which are not given to `train` and which no given flag excludes.
// `launched`: a launcher sets the number of ranks. Throws BadInput for a file that is not the log of a run.
std::vector<std::string> flags_like(const std::string& log, const CLI::App& train, bool launched);
// Adds top, report, export and formats.
void add_file_commands(CLI::App& app, FileOptions& options);

// Throws BadInput if the first word of a command line is neither a flag nor a command.
void check_command(const CLI::App& app, const std::string& word);
// Returns the message of an error of app.parse(): the flag or word that is wrong, and the remedy.
std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error);

// Validators of flag values, for all commands.

// Makes every flag and argument that holds a path reject texts that name no file (path_problem()). The type
// of a flag says where its path begins; every positional argument is a path. '-' is standard output for the
// flags that write a result. No result may be another of a command's files. Call after adding all commands.
inline void check_paths(CLI::App& app) {
  constexpr std::array<std::string_view, 6> kResults{"--json", "--csv",   "--markdown",
                                                     "--log",  "--trace", "--output"};
  for (CLI::App* command : app.get_subcommands([](CLI::App*) { return true; })) {
    command->group("Commands");
    command->parse_complete_callback([=] {
      std::vector<NamedFile> files;
      for (const CLI::Option* option : command->get_options([](const CLI::Option*) { return true; })) {
        const std::string type = option->get_type_name(), name = option->get_name();
        const bool after_colon = type == "DATA" || type == "STEP:DIR", url = type == "URL";
        if (!after_colon && !url && type != "FILE" && type != "DIR" && option->nonpositional()) continue;
        const bool result = std::ranges::find(kResults, name) != kResults.end();
        const std::vector<std::string>& given = option->results();
        for (const std::string& text : given.empty() ? std::vector{option->get_default_str()} : given) {
          const std::string path = text.substr(url           ? 7 * text.starts_with("file://")
                                               : after_colon ? text.find(':') + 1
                                                             : 0);
          const std::string problem =
              (result && path == "-") || (url && path == text) ? "" : path_problem(path);
          if (!problem.empty()) throw BadInput(name + ": " + problem);
          if (!after_colon) files.push_back({name, path, result || name == "--members"});
        }
      }
      check_all_different(files);
    });
  }
}

// Checks a size in bytes: a number, with or without a unit. kb_is_1000: K is 1000 and KiB is 1024. Otherwise
// K and KiB are 1024. CLI11's validator accepts -1 as 2^64 - 1.
inline CLI::Validator size_value(bool kb_is_1000) {
  const CLI::AsSizeValue units(kb_is_1000);
  return CLI::Validator(
      [=](std::string& text) {
        const std::string given = text;
        try {
          const bool number = !text.empty() && text[0] >= '0' && text[0] <= '9';
          if (number && units(text).empty()) return std::string();
        } catch (const CLI::ValidationError&) {  // an unknown unit
        }
        return "'" + given + "' is not a size; write bytes, or a number with a unit, such as 500M or 8GiB: " +
               (kb_is_1000 ? "k, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024"
                           : "K, M, G and T are powers of 1024");
      },
      "");
}

// Returns whether --optimizer's text names one of these optimizers.
bool is_matrix_optimizer(const std::string& text);
// Applies --optimizer's text to the run's settings and to the compressions. `automatic`: --compression is
// auto. Throws BadInput for an unknown option or a compression that does not fit.
void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions);

// Throws BadInput if Muon and a flag that divides or defers the update are combined.
void check_muon(const TrainConfig& config);

}  // namespace gradwire
