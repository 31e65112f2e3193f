// What the subcommands of gradwire-bench share: options, and rows, which they print as text and write to
// files.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "bench/harness/measure.h"
#include "runtime/util/file.h"

namespace gradwire::bench {

using Json = nlohmann::ordered_json;

// A column of the text: a field of the rows. Null is printed as "-", or as "" if the width is 0.
struct Column {
  const char* heading;
  const char* key;
  int width;              // negative: aligned left; 0: the text, of the last column
  int digits = -1;        // decimals of a number; -1: an integer or a text
  const char* unit = "";  // printed after a number
  double scale = 1;       // of the number
  const char* gap = " ";  // printed before the column
};

// A subcommand. The members of the derived class are the values of its options.
class Command {
 public:
  virtual ~Command() = default;
  Command(const Command&) = delete;
  bool chosen() const { return app_.parsed(); }
  // Returns the exit code: 0 for success, 1 for failure. Throws BadInput for bad input.
  virtual int run() = 0;

 protected:
  Command(CLI::App& app, const char* name, const char* about) : app_(*app.add_subcommand(name, about)) {}

  // Adds a flag if the value is a bool, otherwise an option.
  template <typename T, typename... Checks>
  CLI::Option* add(const char* flags, T& value, const std::string& about, const Checks&... checks) {
    CLI::Option* option;
    if constexpr (std::is_same_v<T, bool>) {
      option = app_.add_flag(flags, value, about);
    } else {
      option = app_.add_option(flags, value, about);
    }
    (option->check(checks), ...);
    return option;
  }
  // Adds an option that takes one value and can be repeated.
  CLI::Option* add_repeatable(const char* flags, std::vector<std::string>& values, const std::string& about) {
    return add(flags, values, about)->expected(1)->take_all();
  }
  CLI::Option* add_size(const char* flags, uint64_t& bytes, const std::string& about, uint64_t least,
                        uint64_t most = uint64_t{1} << 36);
  // Adds --device: "auto" selects all devices. devices_for() parses the value.
  CLI::Option* add_device();
  void add_threads(const std::string& about);
  void add_stop();
  CLI::Option* add_json(const std::string& about);
  // Adds --json, --csv and --markdown. Returns the option --json.
  CLI::Option* add_files(const std::string& about = "Write the table to FILE");

  // Parses --stop, sets the number of threads and opens the files. Throws BadInput if a value is wrong or a
  // file cannot be written.
  void open();
  // Returns the cells as a line with the widths of columns_.
  std::string line_text(const std::vector<std::string>& cells) const;
  void print_heading() const;
  // Prints a row as text, stores it for the files, and writes FILE.part for the regular ones, so that a
  // killed benchmark keeps its rows and the result before. `shown`: fields of the text that are not in the
  // files.
  void add_row(Json row, const Json& shown = Json::object());
  // Prints on standard error how long the other cases will take, if that is over a minute: after 5 s, then
  // every 30 s. done: from 1.
  void case_done(size_t done, size_t total);
  // Writes the rows to the files, and prints the note; or, unless `last`, to FILE.part. CSV and Markdown have
  // a column per field: fields of an object within a row have the object's name before theirs ("encode.n"),
  // and arrays are only in the JSON file.
  void write_files(bool last = true);
  // Returns the fields of a measurement: n, min_us, q1_us, median_us, q3_us, iqr_us, noise, stop, stopped,
  // sm_mhz, throttled.
  Json timing_json(const Timing& timing) const;

  CLI::App& app_;
  std::string device_ = "auto", stop_text_ = StopRule{}.to_string();
  int threads_ = 0;  // 0: GRADWIRE_THREADS, or all cores
  StopRule stop_;
  std::vector<Column> columns_;
  Json rows_ = Json::array();
  int json_indent_ = 2;
  int above_copy_ = 0;  // figures over 110 % of copying, for the note below the table

 private:
  std::string json_path_, csv_path_, markdown_path_;
  OutputFile json_, csv_, markdown_;
  std::chrono::steady_clock::time_point next_save_, first_case_, next_estimate_;
};

std::unique_ptr<Command> make_collectives(CLI::App& app);
std::unique_ptr<Command> make_compare(CLI::App& app);
std::unique_ptr<Command> make_formats(CLI::App& app);
std::unique_ptr<Command> make_hook(CLI::App& app);
std::unique_ptr<Command> make_kernels(CLI::App& app);
std::unique_ptr<Command> make_numerics(CLI::App& app);
std::unique_ptr<Command> make_orthonormalize(CLI::App& app);
std::unique_ptr<Command> make_schedules(CLI::App& app);
std::unique_ptr<Command> make_step(CLI::App& app);

// Returns the last line that a child has written to the file `fd`.
std::string last_line(int fd);

// Returns a size as text, in powers of 1024: "4K", "1.5M", "1G".
std::string size_text(int64_t bytes);

// Returns the default ranks per node of hierarchical schedules: the largest divisor up to 8 that gives more
// than one node; 0 if there is none.
int usual_per_node(int world);

}  // namespace gradwire::bench
