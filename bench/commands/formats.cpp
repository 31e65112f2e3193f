// gradwire-bench formats: the cost and error of each wire format, on random values or on real gradients.
//
// For each spec: bytes per element; squared error over squared norm of one encode and decode, without error
// feedback; bias; the host's speed relative to copying. --list prints the table of formats in
// docs/formats.md.
#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/cases/collective_case.h"
#include "bench/cases/kernel_cases.h"
#include "bench/cases/test_rows.h"
#include "bench/commands/main.h"
#include "bench/harness/measure.h"
#include "bench/harness/result_files.h"
#include "collectives/codec/codec.h"
#include "runtime/util/error.h"
#include "trainer/cli/flags.h"
#include "trainer/log/summary.h"

namespace gradwire::bench {
namespace {

using Json = nlohmann::ordered_json;

struct FormatsOptions {
  bool list = false;
  std::vector<std::string> specs;
  std::string gradients;  // folder of gradients; if empty, random values
  int64_t rows = 16, elements = 1 << 16;
  int draws = 64;
  uint64_t seed = 1;
  uint64_t speed_bytes = 64 << 20;
  std::string stop = StopRule{}.to_string();
  ResultPaths results;
};

// Returns the options that a spec of the format may set, with their defaults.
std::string options_of(Wire wire) {
  std::vector<std::string> all;
  if (const auto format = wire->copy()) {
    for (const FormatOption& option : format->choices()) {
      const std::string legal = option.words.empty() ? fmt::format("{}..{}", option.least, option.most)
                                                     : fmt::to_string(fmt::join(option.words, "\\|"));
      all.push_back(fmt::format("`{}={}` ({})", option.key, option.text(), legal));
    }
  }
  if (wire->stochastic) {
    all.push_back(fmt::format("`round={}` (nearest\\|stochastic)",
                              wire->rounding == Rounding::nearest ? "nearest" : "stochastic"));
  }
  return fmt::to_string(fmt::join(all, ", "));
}

void list_formats() {
  fmt::print("| format | bytes per element | error | on the wire | options and their defaults | source |\n");
  fmt::print("|---|---|---|---|---|---|\n");
  for (Wire wire : wire_formats()) {
    fmt::print("| `{}` | {:.4g} | {} | {} | {} | {} |\n", wire->name, wire->bytes_per_value(),
               wire->exact ? "0" : fmt::format("{:.2g}", wire->gaussian_error), wire->summary,
               options_of(wire), wire->source);
  }
}

std::vector<CompressionSpec> formats_to_measure(const FormatsOptions& o) {
  std::vector<CompressionSpec> all;
  for (const std::string& text : o.specs.empty() ? format_specs() : o.specs) {
    all.push_back(CompressionSpec::parse(text));
    if (all.back().method != CompressionSpec::Method::wire) {
      throw BadInput(
          fmt::format("--spec {}: not a wire format; gradwire-bench hook measures its speed, gradwire "
                      "compare its accuracy",
                      text));
    }
  }
  return all;
}

// The bytes that an op reads and writes per second, relative to a copy in the same run.
struct OpSpeed {
  Timing timing;
  double copy_fraction = 0, copy_gbps = 0;
};

struct FormatSpeed {
  std::optional<OpSpeed> encode, decode;  // empty for an exact format, which is not encoded
};

OpSpeed speed_of(const Problem& problem, DeviceUnderTest& device) {
  const TimingWithCopy timed =
      device.time_with_copy(problem.launch, static_cast<int64_t>(problem.bytes), true);
  return {timed.work, problem.bytes / timed.work.median_us / 1e3 / timed.copy_gbps, timed.copy_gbps};
}

FormatSpeed speed_of(const CompressionSpec& spec, DeviceUnderTest& device, Arena& arena, int64_t size) {
  FormatSpeed speed;
  if (spec.wire->exact) return speed;
  arena.reset();
  speed.encode = speed_of(reduce_encode_problem(spec.wire, arena, size, 0, true, spec.rounding), device);
  arena.reset();
  speed.decode = speed_of(decode_problem(spec.wire, arena, size), device);
  return speed;
}

Json error_json(const RowSet& set, const RowSetError& e, int draws) {
  Json json{{"data", set.name},
            {"rows", set.rows.size()},
            {"bytes_per_element", e.bytes_per_element},
            {"error", e.mean},
            {"error_stderr", e.standard_error},
            {"total_error", e.total},
            {"bias", e.bias},
            {"bias_by_chance", e.random ? Json(e.by_chance) : Json(nullptr)},
            {"draws", e.random ? draws : 1}};
  if (set.rows.front().name.empty()) return json;
  for (size_t i = 0; i < set.rows.size(); ++i) {
    json["tensors"].push_back({{"name", set.rows[i].name},
                               {"elements", set.rows[i].values.size()},
                               {"bytes_per_element", e.rows[i].bytes_per_element},
                               {"error", e.rows[i].error},
                               {"bias", e.rows[i].bias}});
  }
  return json;
}

std::string figure(double value) {
  return value == 0 ? "0" : fmt::format("{:.2e}", value);
}

std::string mean_text(const RowSetError& e) {
  if (e.mean == 0) return "0";
  return figure(e.mean) +
         (std::isnan(e.standard_error) ? "" : fmt::format(" +-{:.1f} %", 100 * e.standard_error / e.mean));
}

std::vector<std::string> heading(const std::vector<RowSet>& sets) {
  std::vector<std::string> cells{"spec", "B/element"};
  if (!sets[0].rows[0].name.empty()) {
    cells.insert(cells.end(), {"all together", "mean of tensors", "worst"});
  } else {
    for (const RowSet& set : sets) cells.push_back(set.name);
  }
  cells.insert(cells.end(), {"bias", "by chance", "encode", "decode"});
  return cells;
}

// Returns the spec's line of the table. Shows only the bias of the first set.
std::vector<std::string> line_of(const CompressionSpec& spec, const std::vector<RowSet>& sets,
                                 const std::vector<RowSetError>& errors, const FormatSpeed& speed) {
  const RowSetError& first = errors[0];
  std::vector<std::string> cells{spec.to_string(), fmt::format("{:.4g}", first.bytes_per_element)};
  if (!sets[0].rows[0].name.empty()) {
    cells.insert(cells.end(), {figure(first.total), mean_text(first), figure(first.rows[first.worst].error)});
  } else {
    for (const RowSetError& e : errors) cells.push_back(mean_text(e));
  }
  auto percent = [](const std::optional<OpSpeed>& speed) {
    return speed ? fmt::format("{:.0f} %", 100 * speed->copy_fraction) : "-";
  };
  cells.insert(cells.end(), {figure(first.bias), first.random ? figure(first.by_chance) : "-",
                             percent(speed.encode), percent(speed.decode)});
  return cells;
}

void say_values(const FormatsOptions& o, const std::vector<RowSet>& sets) {
  if (o.gradients.empty()) {
    fmt::print("{} rows of {} values each, seed {}. ", o.rows, o.elements, o.seed);
  } else {
    fmt::print("{} tensors of {} that are not zero. ", sets[0].rows.size(), o.gradients);
  }
  fmt::print(
      "Errors: squared, over the squared norm, of one encode and decode; mean over\n"
      "rows with its standard error. Bias: norm of the mean error of {} draws over the norm ({}); by chance: "
      "the\n"
      "bias of an unbiased rounding. Encode with residual, decode: bytes per second on the host, as a share "
      "of "
      "copying.\n\n",
      o.draws, sets[0].name);
  std::fflush(stdout);
}

void measure_formats(const FormatsOptions& o) {
  const StopRule stop = StopRule::parse(o.stop);
  ResultFiles results(o.results);
  const std::vector<CompressionSpec> specs = formats_to_measure(o);
  std::vector<RowSet> sets;
  if (o.gradients.empty()) {
    sets = random_rows(o.rows, o.elements, o.seed);
  } else {
    sets.push_back(gradient_rows(o.gradients));
  }
  say_values(o, sets);
  DeviceUnderTest device(Device::host(), stop);
  const auto size = static_cast<int64_t>(o.speed_bytes);
  Arena arena(device.stream(), kArenaPerSize * size + (int64_t{16} << 20));
  Json document = Json::array();
  Table table{heading(sets)};
  const bool terminal = isatty(STDERR_FILENO) == 1;  // show progress
  for (size_t i = 0; i < specs.size(); ++i) {
    if (terminal) fmt::print(stderr, "\r\033[K[{}/{}] {}", i + 1, specs.size(), specs[i].to_string());
    std::vector<RowSetError> errors;
    Json on = Json::array();
    for (const RowSet& set : sets) {
      errors.push_back(round_trip_error(specs[i], set, o.draws, o.seed));
      on.push_back(error_json(set, errors.back(), o.draws));
    }
    const FormatSpeed speed = speed_of(specs[i], device, arena, size);
    table.push_back(line_of(specs[i], sets, errors, speed));
    auto fraction = [](const auto& op) { return op ? Json(op->copy_fraction) : Json(nullptr); };
    auto times = [&](const auto& op) {
      return op ? timing_json(op->timing, stop.to_string()) : Json(nullptr);
    };
    document.push_back({{"spec", specs[i].to_string()},
                        {"bytes_per_element", specs[i].wire->bytes_per_value()},
                        {"stated_error", specs[i].wire->gaussian_error},
                        {"on", std::move(on)},
                        {"device", device.description()},
                        {"speed_bytes", size},
                        {"encode_copy_fraction", fraction(speed.encode)},
                        {"decode_copy_fraction", fraction(speed.decode)},
                        {"copy_gbps", speed.decode ? Json(speed.decode->copy_gbps) : Json(nullptr)},
                        {"encode", times(speed.encode)},
                        {"decode", times(speed.decode)}});
  }
  if (terminal) fmt::print(stderr, "\r\033[K");
  fmt::print("{}", table_text(table, "", true));
  results.write(document);
}

}  // namespace

void add_formats(CLI::App& app, int&) {
  auto o = std::make_shared<FormatsOptions>();
  CLI::App* command = app.add_subcommand(
      "formats", "Bytes, error, bias and host speed of each wire format, on random values or real gradients");
  CLI::Option* list = command->add_flag("--list", o->list, "Print the table of docs/formats.md and exit");
  command->add_option("--spec", o->specs, "Only these; repeatable (default: every format)")
      ->expected(1)
      ->take_all();
  CLI::Option* gradients = command->add_option(
      "--gradients", o->gradients,
      "Take the tensors of this folder's *.safetensors instead of random values; gradwire train "
      "--dump-gradients STEP:DIR writes them");
  gradients->type_name("DIR");
  command->add_option("--rows", o->rows, "Rows of random values")
      ->check(CLI::Range(1, 1 << 20))
      ->excludes(gradients);
  command->add_option("--elements", o->elements, "Values per row")
      ->check(CLI::Range(1, 1 << 28))
      ->excludes(gradients);
  command->add_option("--draws", o->draws, "Encodings of each row by formats that round stochastically")
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--seed", o->seed, "Seed of values and rounding")->check(CLI::NonNegativeNumber);
  command->add_option("--size", o->speed_bytes, "Bytes of the gradient whose encoding and decoding is timed")
      ->transform(size_value(false))
      ->check(CLI::Range(uint64_t{64}, uint64_t{1} << 34));
  add_stop(*command, o->stop);
  add_result_files(*command, o->results, "Write all figures to FILE, for gradients of each tensor")
      ->excludes(list);
  command->callback([o] {
    if (o->list) return list_formats();
    measure_formats(*o);
  });
}

}  // namespace gradwire::bench
