// gradwire-bench formats: the cost and error of each wire format, on random values or on real gradients.
//
// For each spec: bytes per element; squared error over squared norm of one encode and decode, without error
// feedback; bias; the host's speed relative to copying. --list prints the table of formats in
// docs/formats.md.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>

#include "bench/cases/kernel_cases.h"
#include "bench/harness/command.h"
#include "collectives/codec/codec.h"
#include "runtime/util/error.h"
#include "trainer/data/safetensors.h"

namespace gradwire::bench {
namespace {

namespace fs = std::filesystem;

struct Row {
  std::string name;  // name of a tensor; "" for random values
  std::vector<float> values;
  double squared_norm = 0;

  // Measured with one spec. error: squared error of an encode and decode / squared norm of the row. bias:
  // norm of the mean error over many draws / norm of the row. by_chance: the expected bias of an unbiased
  // format; 0 for round to nearest, whose draws are all equal. random: true if the draws differ.
  double error = 0, bias = 0, by_chance = 0, bytes_per_element = 0;
  bool random = false;

  Row(std::string tensor, int64_t elements)
      : name(std::move(tensor)), values(static_cast<size_t>(elements)) {}
  void sum_squares() {
    squared_norm = std::transform_reduce(values.begin(), values.end(), 0.0, std::plus<>(),
                                         [](float v) { return static_cast<double>(v) * v; });
  }
};

struct RowSet {
  std::string name;  // "gaussian", "gradients", ...
  std::vector<Row> rows = {};

  // Measured with one spec: the statistics of `error` over the rows, standard_error NaN for a single row; the
  // sum of squared errors / sum of squared norms; the bias of all rows combined; and the largest error.
  double mean = 0, standard_error = 0, total = 0, bias = 0, by_chance = 0, bytes_per_element = 0, worst = 0;
  bool random = false;
};

// Returns `rows` of `elements` values each. The same seed gives the same values.
template <typename Draw>
RowSet drawn(const char* name, int64_t rows, int64_t elements, uint64_t seed, Draw draw) {
  RowSet set{.name = name};
  for (int64_t r = 0; r < rows; ++r) {
    std::mt19937_64 generator(seed * 1'000'003 + static_cast<uint64_t>(r));
    Row& row = set.rows.emplace_back("", elements);
    auto fresh = draw;  // use a copy for each row, because distributions store a spare value
    for (float& v : row.values) v = fresh(generator);
    row.sum_squares();
  }
  return set;
}

std::vector<std::string> safetensors_files(const std::string& directory) {
  std::error_code error;
  auto refuse = [&](const std::string& why) { throw BadInput("--gradients {}: {}", directory, why); };
  if (!fs::is_directory(directory, error))
    refuse(fs::exists(directory, error) ? "not a folder" : "no such folder");
  std::vector<std::string> paths;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") paths.push_back(it->path().string());
  }
  if (error) refuse(error.message());
  if (paths.empty()) {
    refuse(
        fmt::format("no *.safetensors in it; gradwire train --dump-gradients STEP:{} writes one", directory));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Returns the tensors of all *.safetensors files in a folder, such as the output of gradwire train
// --dump-gradients. Omits empty and all-zero tensors, which have no relative error. Throws BadInput, which
// names the file, if a tensor is not F32 and finite, or if no tensor remains.
RowSet gradient_rows(const std::string& directory) {
  RowSet set{.name = "gradients"};
  const std::vector<std::string> paths = safetensors_files(directory);
  for (const std::string& path : paths) {
    const SafetensorsReader file(path);
    file.verify(false);
    const std::string prefix = paths.size() == 1 ? "" : fs::path(path).stem().string() + ":";
    for (const SafetensorsReader::Tensor& tensor : file.tensors()) {
      Row row(prefix + tensor.name, tensor.elements);
      file.read(tensor, 0, row.values);
      row.sum_squares();
      if (!std::isfinite(row.squared_norm)) {
        throw BadInput("{}: '{}' has values that are not finite; dump a step in which the loss is",
                       file.path(), tensor.name);
      }
      if (row.squared_norm > 0) set.rows.push_back(std::move(row));
    }
  }
  if (set.rows.empty()) {
    throw BadInput("--gradients {}: the tensors are empty or all values are zero; dump a later step",
                   directory);
  }
  return set;
}

// Measures the error of a row, on the host. `draws`, at least 2: number of encodes for formats that round
// stochastically. Each draw uses a different step.
void measure_row(const CompressionSpec& spec, Row& row, int draws, uint64_t seed) {
  const auto count = static_cast<int64_t>(row.values.size());
  const Stream stream = Stream::immediate_host();
  const Buffer wire(Device::host(), static_cast<size_t>(spec.wire->bytes(count)));
  std::vector<float> decoded = row.values;
  std::vector<double> sums(row.values.size());
  double squares = 0;
  auto draw = [&](uint64_t step) {
    if (spec.wire->exact) return;
    spec.wire->reduce_encode(stream, {.own = row.values.data(),
                                      .wire = wire.data(),
                                      .count = count,
                                      .rounding = {.mode = spec.rounding, .seed = seed, .step = &step}});
    spec.wire->decode(stream, {.wire = wire.data(), .out = decoded.data(), .count = count});
  };
  auto add_errors = [&] {
    double added = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      const double error = static_cast<double>(decoded[i]) - row.values[i];
      sums[i] += error;
      added += error * error;
    }
    squares += added;
  };
  draw(0);
  add_errors();
  row.error = squares / row.squared_norm;
  row.bias = std::sqrt(row.error);
  row.by_chance = 0;
  row.bytes_per_element = static_cast<double>(spec.wire->bytes(count)) / static_cast<double>(count);
  const std::vector<float> first = decoded;
  draw(1);
  row.random = std::memcmp(first.data(), decoded.data(), first.size() * sizeof(float)) != 0;
  if (!row.random) return;
  add_errors();
  for (int k = 2; k < draws; ++k) {
    draw(static_cast<uint64_t>(k));
    add_errors();
  }
  double of_mean = 0;
  for (double sum : sums) of_mean += sum * sum / draws / draws;
  // E |mean error|^2 = |bias|^2 + variance / draws. `noise` is an unbiased estimate of the second term.
  const double noise = std::max(0.0, squares / draws - of_mean) / (draws - 1);
  row.bias = std::sqrt(of_mean / row.squared_norm);
  row.by_chance = std::sqrt(noise / row.squared_norm);
}

void measure_set(const CompressionSpec& spec, RowSet& set, int draws, uint64_t seed) {
  const auto rows = static_cast<double>(set.rows.size());
  double norms = 0, elements = 0, bias = 0, by_chance = 0, spread = 0;
  set.mean = set.total = set.bytes_per_element = set.worst = 0;
  set.random = false;
  for (Row& row : set.rows) {
    measure_row(spec, row, draws, seed);
    const auto count = static_cast<double>(row.values.size());
    norms += row.squared_norm;
    elements += count;
    set.mean += row.error / rows;
    set.total += row.error * row.squared_norm;
    bias += row.bias * row.bias * row.squared_norm;
    by_chance += row.by_chance * row.by_chance * row.squared_norm;
    set.random = set.random || row.random;
    set.bytes_per_element += row.bytes_per_element * count;
    set.worst = std::max(set.worst, row.error);
  }
  set.total /= norms;
  set.bias = std::sqrt(bias / norms);
  set.by_chance = std::sqrt(by_chance / norms);
  set.bytes_per_element /= elements;
  for (const Row& row : set.rows) spread += (row.error - set.mean) * (row.error - set.mean);
  set.standard_error =
      rows < 2 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(spread / (rows - 1) / rows);
}

// Prints the table of docs/formats.md, with the options that a spec of each format may set.
void list_formats() {
  fmt::print(
      "| format | bytes per element | error | on the wire | options and their defaults | source |\n"
      "|---|---|---|---|---|---|\n");
  for (Wire wire : wire_formats()) {
    std::vector<std::string> options;
    for (const auto& [option, values] : option_texts(wire))
      options.push_back(fmt::format("`{}` ({})", option, CLI::detail::find_and_replace(values, "|", "\\|")));
    fmt::print("| `{}` | {:.4g} | {} | {} | {} | {} |\n", wire->name, wire->bytes_per_value(),
               wire->exact ? "0" : fmt::format("{:.2g}", wire->gaussian_error), wire->summary,
               fmt::join(options, ", "), wire->source);
  }
}

std::string figure(double value) {
  return value == 0 ? "0" : fmt::format("{:.2e}", value);
}

std::string mean_text(const RowSet& e) {
  if (e.mean == 0 || std::isnan(e.standard_error)) return figure(e.mean);
  return fmt::format("{} +-{:.1f} %", figure(e.mean), 100 * e.standard_error / e.mean);
}

class Formats final : public Command {
 public:
  explicit Formats(CLI::App& app)
      : Command(app, "formats",
                "Bytes, error, bias and host speed of each wire format, on random values or real gradients") {
    CLI::Option* list = add("--list", list_, "Print the table of docs/formats.md and exit");
    add_repeatable("--spec", specs_, "Only these; repeatable (default: every format)")->type_name("SPEC");
    CLI::Option* gradients =
        add("--gradients", gradients_,
            "Take the tensors of this folder's *.safetensors instead of random values; gradwire train "
            "--dump-gradients STEP:DIR writes them");
    gradients->type_name("DIR");
    add("--rows", row_count_, "Rows of random values", CLI::Range(1, 1 << 20))->excludes(gradients);
    add("--elements", elements_, "Values per row", CLI::Range(1, 1 << 28))->excludes(gradients);
    add("--draws", draws_, "Encodings of each row by formats that round stochastically",
        CLI::Range(2, 1 << 20));
    add("--seed", seed_, "Seed of values and rounding", CLI::NonNegativeNumber);
    add_size("--size", speed_bytes_, "Bytes of the gradient whose encoding and decoding is timed", 64,
             uint64_t{1} << 34);
    stop_text_ = "50ms";  // speeds to some percent; errors do not depend on it
    add_stop();
    add_files("Write all figures to FILE, for gradients of each tensor")->excludes(list);
  }

  int run() override {
    if (list_) {
      list_formats();
      return 0;
    }
    open();
    std::vector<CompressionSpec> specs;
    for (const std::string& text : specs_.empty() ? format_specs() : specs_) {
      specs.push_back(CompressionSpec::parse(text));
      if (specs.back().method != CompressionSpec::Method::wire) {
        throw BadInput(
            "--spec {}: not a wire format; gradwire-bench hook measures its speed, gradwire "
            "compare its accuracy",
            text);
      }
    }
    prepare_sets(specs);
    DeviceUnderTest device(Device::host(), stop_);
    Arena arena(device.stream, kArenaPerSize * static_cast<int64_t>(speed_bytes_) + (int64_t{16} << 20));
    print_heading();
    for (size_t i = 0; i < specs.size(); ++i) {
      measure(specs[i], device, arena);
      case_done(i + 1, specs.size());
    }
    write_files();
    return 0;
  }

 private:
  // Fills sets_ and columns_, and prints the units.
  void prepare_sets(const std::vector<CompressionSpec>& specs) {
    size_t longest = 4;
    for (const CompressionSpec& spec : specs) longest = std::max(longest, spec.to_string().size());
    columns_ = {{"spec", "spec", -static_cast<int>(longest)}, {"B/element", "bytes", 9}};
    auto add_error = [&](const char* heading) {
      columns_.push_back({heading, heading, 17, -1, "", 1, "  "});
    };
    if (gradients_.empty()) {
      // Increasingly heavy tails. Log-normal: the exponential of a standard normal value, with a random sign.
      auto log_normal = [normal = std::normal_distribution<float>()](std::mt19937_64& generator) mutable {
        const float magnitude = std::exp(normal(generator));
        return (generator() >> 63) != 0 ? -magnitude : magnitude;
      };
      sets_ = {drawn("gaussian", row_count_, elements_, seed_, std::normal_distribution<float>()),
               drawn("student-t3", row_count_, elements_, seed_, std::student_t_distribution<float>(3)),
               drawn("log-normal", row_count_, elements_, seed_, log_normal)};
      for (const RowSet& set : sets_) add_error(set.name.c_str());
      fmt::print("{} rows of {} values each, seed {}. ", row_count_, elements_, seed_);
    } else {
      sets_.push_back(gradient_rows(gradients_));
      for (const char* heading : {"all together", "mean of tensors", "worst"}) add_error(heading);
      fmt::print("{} tensors of {} that are not zero. ", sets_[0].rows.size(), gradients_);
    }
    for (const char* heading : {"bias", "by chance", "encode", "decode"})
      columns_.push_back({heading, heading, 9});
    fmt::print(
        "Errors: squared, over the squared norm, of one encode and decode; mean over\n"
        "rows with its standard error. Bias: norm of the mean error of {} draws over the norm ({}); by "
        "chance: the\n"
        "bias of an unbiased rounding. Encode with residual, decode: bytes per second on the host, as a "
        "share "
        "of copying.\n\n",
        draws_, sets_[0].name);
    std::fflush(stdout);
  }

  // Adds a spec's row. The text shows only the bias of the first set.
  void measure(const CompressionSpec& spec, DeviceUnderTest& device, Arena& arena) {
    Json on = Json::array();
    for (RowSet& set : sets_) {
      measure_set(spec, set, draws_, seed_);
      on.push_back(error_json(set));
    }
    const auto size = static_cast<int64_t>(speed_bytes_);
    Json row = {{"spec", spec.to_string()},
                {"bytes_per_element", spec.wire->bytes_per_value()},
                {"stated_error", spec.wire->gaussian_error},
                {"on", std::move(on)},
                {"device", device.description},
                {"speed_bytes", size},
                {"encode_copy_fraction", nullptr},
                {"decode_copy_fraction", nullptr},
                {"copy_gbps", nullptr},
                {"encode", nullptr},
                {"decode", nullptr}};
    const RowSet& first = sets_[0];
    Json shown = {{"bytes", fmt::format("{:.4g}", first.bytes_per_element)},
                  {"all together", figure(first.total)},
                  {"mean of tensors", mean_text(first)},
                  {"worst", figure(first.worst)},
                  {"bias", figure(first.bias)},
                  {"by chance", first.random ? figure(first.by_chance) : "-"},
                  {"encode", nullptr},
                  {"decode", nullptr}};
    for (const RowSet& set : sets_) shown[set.name] = mean_text(set);
    for (const std::string op : {"encode", "decode"}) {
      if (spec.wire->exact) continue;  // not encoded
      arena.reset();
      const Problem problem = op == "encode"
                                  ? reduce_encode_problem(spec.wire, arena, size, 0, true, spec.rounding)
                                  : decode_problem(spec.wire, arena, size);
      const auto [timing, copy_gbps] =
          device.time_with_copy(problem.launch, static_cast<int64_t>(problem.bytes), true);
      const double fraction = problem.bytes / timing.median_us / 1e3 / copy_gbps;
      row[op + "_copy_fraction"] = fraction;
      row["copy_gbps"] = copy_gbps;
      row[op] = timing_json(timing);
      shown[op] = fmt::format("{:.0f} %", 100 * fraction);
      above_copy_ += fraction > 1.1 ? 1 : 0;
    }
    add_row(std::move(row), shown);
  }

  Json error_json(const RowSet& set) const {
    Json json{{"data", set.name},
              {"rows", set.rows.size()},
              {"bytes_per_element", set.bytes_per_element},
              {"error", set.mean},
              {"error_stderr", set.standard_error},
              {"total_error", set.total},
              {"bias", set.bias},
              {"bias_by_chance", set.random ? Json(set.by_chance) : Json(nullptr)},
              {"draws", set.random ? draws_ : 1}};
    for (const Row& row : set.rows) {
      if (gradients_.empty()) break;
      json["tensors"].push_back({{"name", row.name},
                                 {"elements", row.values.size()},
                                 {"bytes_per_element", row.bytes_per_element},
                                 {"error", row.error},
                                 {"bias", row.bias}});
    }
    return json;
  }

  bool list_ = false;
  std::vector<std::string> specs_;
  std::string gradients_;  // folder of gradients; if empty, random values
  int64_t row_count_ = 16, elements_ = 1 << 16;
  int draws_ = 64;
  uint64_t seed_ = 1, speed_bytes_ = 64 << 20;
  std::vector<RowSet> sets_;
};

}  // namespace

std::unique_ptr<Command> make_formats(CLI::App& app) {
  return std::make_unique<Formats>(app);
}

}  // namespace gradwire::bench
