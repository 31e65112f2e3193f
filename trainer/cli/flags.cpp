#include "trainer/cli/flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <regex>
#include <sstream>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {

std::string wrapped(const std::string& text, size_t width, size_t used, size_t indent, const char* end) {
  std::string out;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const bool fits = used + 1 + word.size() + std::string_view(end).size() <= width;
    const bool first = out.empty();
    out += first ? "" : fits ? " " : fmt::format("{}\n{:{}}", end, "", indent);
    used = (first || fits ? used + (first ? 0 : 1) : indent) + word.size();
    out += word;
  }
  return out;
}

size_t text_columns() {
  constexpr int kLeast = 40, kUsual = 100, kMost = 110;
  const char* given = environment("COLUMNS");
  const auto number = parse_number<int>(given != nullptr ? given : "", 1);
  return static_cast<size_t>(std::clamp(number ? *number : terminal_columns(stdout, kUsual), kLeast, kMost));
}

namespace {

// Splits a type of CLI11 with its validator, such as "UINT:INT in [1 - 64]", into our words: "N", "1 to 64".
std::pair<std::string, std::string> type_and_range(const std::string& text) {
  static const std::regex kChecked(
      R"((.*?):(?:from (.*)|\{(.*)\}|\w+ in \[(.*) - (.*)\]|(POSITIVE)|NONNEGATIVE))");
  const auto size = [](const std::string& number) {
    const auto bytes = parse_number<uint64_t>(number, 1);
    return bytes && *bytes % (1 << 30) == 0 ? fmt::format("{}G", *bytes >> 30) : number;
  };
  std::string type = text, range;
  if (std::smatch m; std::regex_match(text, m, kChecked)) {
    type = m[1];
    range = m[2].matched   ? m[2].str()
            : m[3].matched ? std::regex_replace(m[3].str(), std::regex(","), ", ")
            : m[4].matched ? size(m[4]) + " to " + size(m[5])
            : m[6].matched ? "more than 0"
                           : "at least 0";
  }
  if (type == "UINT" || type == "INT") type = "N";
  return {type == "FLOAT" ? "NUMBER" : type, range};
}

class HelpFormatter final : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    return CLI::detail::find_and_replace(Formatter::make_help(app, std::move(name), mode), "\n\n\n", "\n\n");
  }
  std::string make_description(const CLI::App* app) const override {
    return wrapped(app->get_description(), width_, 0, 0) + "\n\n";
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return row(command->get_name(), command->get_description(), 12);
  }
  // Writes each line of the examples as a command, which stays one if a shell gets it.
  std::string make_footer(const CLI::App* app) const override {
    const CLI::App* parent = app->get_parent();  // whose footer is the default
    const bool own =
        !app->get_footer().empty() && (parent == nullptr || app->get_footer() != parent->get_footer());
    if (!own) return "";
    std::string text = "Examples:\n";
    for (const std::string& line : CLI::detail::split(app->get_footer(), '\n'))
      if (!line.empty()) text += "  " + wrapped(line, width_, 2, 6, " \\") + "\n";
    return text;
  }
  std::string make_option(const CLI::Option* option, bool positional) const override {
    const auto [type, range] = type_and_range(option->get_type_name());
    std::string name = make_option_name(option, positional);
    if (!positional && option->get_type_size() != 0 && !type.empty()) name += " " + type;
    return row(name, about(option, range), 26);
  }

 private:
  // Returns an option's text with its facts: range, default, options that it needs or excludes.
  static std::string about(const CLI::Option* option, const std::string& range) {
    std::string text = option->get_description();
    std::vector<std::string> facts;
    if (option->get_required()) facts.emplace_back("required");
    // A text may explain each word of a choice.
    const bool listed = text.find(range.substr(0, range.find(','))) != text.npos;
    if (!listed) facts.push_back(range);
    if (!option->get_default_str().empty() && text.find("(default") == text.npos)
      facts.push_back("default: " + option->get_default_str());
    for (const auto& [what, others] :
         {std::pair{"needs", option->get_needs()}, {"not with", option->get_excludes()}}) {
      std::vector<std::string> names;
      for (const CLI::Option* other : others) names.push_back(other->get_name());
      std::ranges::sort(names);
      if (!names.empty()) facts.push_back(fmt::format("{} {}", what, fmt::join(names, ", ")));
    }
    if (facts.empty()) return text;
    // The text may end with its own "(default: ...)".
    const size_t open = text.rfind(" (default");
    const bool joins = open != text.npos && text.find(')', open) == text.size() - 1;
    if (joins) text.pop_back();
    return fmt::format("{}{}{})", text, joins ? "; " : " (", fmt::join(facts, "; "));
  }
  std::string row(const std::string& name, const std::string& text, size_t column) const {
    constexpr size_t kNarrow = 80;
    if (width_ < kNarrow) column = 8;
    std::string line = "  " + name;
    const bool below = line.size() + 2 > column;
    line += below ? fmt::format("\n{:{}}", "", column) : std::string(column - line.size(), ' ');
    return line + wrapped(text, width_, column, column) + "\n";
  }

  const size_t width_ = text_columns();
};

// Parses a number strictly. CLI11's parser reads "" as 0 and 010 as octal, and wraps -1 to an unsigned
// number. A whole number may be written as 1e3, 1k or 2.5M if its value is exact.
template <typename T>
std::optional<T> parse_value(std::string_view text, T least, T most) {
  const auto plain = parse_number(text, least, most);
  if (plain || std::is_floating_point_v<T>) return plain;
  const double unit = text.ends_with('k') ? 1e3 : text.ends_with('M') ? 1e6 : 1;
  if (unit > 1) text.remove_suffix(1);
  constexpr double kExact = 1e15;
  const double value = parse_number(text, 0.0, kExact).value_or(-1) * unit;
  if (value < 0 || value > kExact || value != std::floor(value)) return {};
  return parse_number(fmt::format("{:.0f}", value), least, most);
}

template <typename T>
CLI::Validator number_within(T least, T most) {
  const std::string range = fmt::format(" from {} to {}", least, most);
  const char* kind = std::is_floating_point_v<T> ? "a number" : "a whole number";
  return CLI::Validator(
      [=](std::string& text) {
        return parse_value(text, least, most) ? "" : fmt::format("'{}' is not {}{}", text, kind, range);
      },
      range.substr(1));
}

// Adds a flag with a number, whose default is shown if it is in the flag's range.
template <typename T, typename Target>
CLI::Option* add_number(CLI::App& command, const char* flag, Target& target, const std::string& about,
                        T least, T most) {
  auto set = [=, &target](const std::string& text) { target = *parse_value(text, least, most); };
  CLI::Option* option = command.add_option_function<std::string>(flag, set, about)
                            ->type_name(std::is_floating_point_v<T> ? "NUMBER" : "N")
                            ->check(number_within(least, most));
  if constexpr (std::is_same_v<T, Target>) {
    if (target >= least && target <= most) option->default_str(fmt::format("{}", target));
  }
  return option;
}

template <typename Target>
CLI::Option* add_text(CLI::App& command, const char* flag, Target& target, const char* type,
                      const std::string& about) {
  auto set = [&target](const std::string& text) { target = text; };
  CLI::Option* option = command.add_option_function<std::string>(flag, set, about)->type_name(type);
  if constexpr (std::is_same_v<Target, std::string>) option->default_str(target);
  return option;
}

// Adds a flag for one of several words, whose values are 0, 1, ...
template <typename T>
void add_choice(CLI::App& command, const char* flag, T& target, const std::string& words,
                const std::string& about) {
  const std::vector<std::string> all = CLI::detail::split(words, '|');
  auto set = [&target, all](const std::string& text) {
    target = static_cast<T>(std::ranges::find(all, text) - all.begin());
  };
  command.add_option_function<std::string>(flag, set, about)
      ->type_name("WORD")
      ->default_str(all[static_cast<size_t>(target)])
      ->check(CLI::IsMember(all));
}

// Adds --compression or --bucket-mb. `several`: the user may give the flag more than once.
template <typename T>
void add_list(CLI::App& command, const char* flag, std::vector<T>& target, const std::string& about,
              bool several) {
  auto set = [&target](const std::vector<std::string>& texts) {
    target.clear();
    for (const std::string& text : texts) {
      if constexpr (std::is_same_v<T, double>) target.push_back(*parse_number<double>(text));
      if constexpr (std::is_same_v<T, std::string>) target.push_back(text);
    }
  };
  CLI::Option* option = command.add_option_function<std::vector<std::string>>(flag, set, about)->expected(1);
  if (several) option->take_all();
  if constexpr (std::is_same_v<T, double>) {
    option->type_name("NUMBER")
        ->default_str(fmt::format("{}", kDefaultBucketMb))
        ->check(number_within(kBucketMb.least, kBucketMb.most));
  } else {
    option->type_name("SPEC");
  }
}

// Adds the flag of a row, whose value is `target`.
template <typename T>
void add_flag(CLI::App& command, const Setting& row, T& target) {
  const char* words = row.values.words;
  if constexpr (std::is_same_v<T, bool>) {
    if (*words == '\0') {
      command.add_flag(row.flag, target, row.about);
      return;
    }
  }
  if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>) {
    add_choice(command, row.flag, target, words, row.about);
  } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, std::optional<std::string>>) {
    add_text(command, row.flag, target, words, row.about);
  } else if constexpr (std::is_same_v<T, std::vector<std::string>> ||
                       std::is_same_v<T, std::vector<double>>) {
    add_list(command, row.flag, target, row.about, (row.commands & Setting::kTrain) == 0);
  } else if constexpr (std::is_same_v<T, std::optional<double>>) {
    add_number(command, row.flag, target, row.about, row.values.least, row.values.most);
  } else {
    constexpr T kMax = std::numeric_limits<T>::max();
    const bool any = row.values.most >= static_cast<double>(kMax);
    if constexpr (std::is_same_v<T, int64_t>) {
      if (std::string_view(words) == "SIZE") {
        auto set = [&target](uint64_t n) { target = static_cast<int64_t>(std::min(n, uint64_t{1} << 60)); };
        command.add_option_function<uint64_t>(row.flag, set, row.about)
            ->transform(size_value(true))
            ->type_name("SIZE");
        return;
      }
    }
    add_number(command, row.flag, target, row.about, static_cast<T>(row.values.least),
               any ? kMax : static_cast<T>(row.values.most));
  }
}

// Pairs of flags: the first needs the second, or excludes it. A graph's steps run without the host, so the
// host cannot copy each gradient before communication.
constexpr std::pair<const char*, const char*> kNeeds[] = {{"--members", "--elastic"},
                                                          {"--join", "--elastic"},
                                                          {"--checkpoint-every", "--checkpoint"},
                                                          {"--checkpoint-keep", "--checkpoint"}},
                                              kExcludes[] = {{"--steps", "--epochs"},
                                                             {"--join", "--members"},
                                                             {"--resume", "--init"},
                                                             {"--dump-gradients", "--graph"}};

}  // namespace

std::shared_ptr<CLI::FormatterBase> help_formatter() {
  auto formatter = std::make_shared<HelpFormatter>();
  formatter->label("SUBCOMMAND", "COMMAND");
  return formatter;
}

void add_run_flags(CLI::App& command, int which, RunOptions& o) {
  for (const Setting& row : settings()) {
    if ((row.commands & which) == 0) continue;
    command.option_defaults()->group(row.group);
    std::visit(
        [&](auto field) {
          if constexpr (std::is_invocable_v<decltype(field), VitConfig>)
            add_flag(command, row, o.model.*field);
          else if constexpr (std::is_invocable_v<decltype(field), RunOptions>)
            add_flag(command, row, o.*field);
        },
        row.field);
  }
  const auto named = [&](const char* flag) { return command.get_option_no_throw(flag); };
  for (const auto& [flag, other] : kNeeds) {
    if (named(flag) != nullptr) named(flag)->needs(named(other));
  }
  for (const auto& [flag, other] : kExcludes) {
    if (named(flag) != nullptr) named(flag)->excludes(named(other));
  }
  if (which == Setting::kPlan) {
    for (const char* flag : {"--cluster", "--ranks"}) named(flag)->required();
  }
  if (named("--optimizer") == nullptr) return;
  const auto check = [](const std::string& text) -> std::string {
    if (text == "sgd" || text == "adamw" || is_matrix_optimizer(text)) return {};
    return fmt::format("'{}' is not one of sgd, adamw, {}{}", text, kMatrixOptimizers,
                       suggestion(text, {"sgd", "adamw", "dion:rank=64", "muon"}));
  };
  named("--optimizer")->check(CLI::Validator(check, "{sgd,adamw,dion:rank=64,muon}"));
}

std::vector<std::string> repeatable_flags(const CLI::App& command) {
  std::vector<std::string> words;
  for (const Setting& row : settings()) {
    const std::string_view group = row.group, flag = row.flag != nullptr ? row.flag : "";
    const bool writes = group == "Output" || (group == "Checkpoints" && flag != "--init");
    if ((row.commands & Setting::kTrain) == 0 || row.key == nullptr || writes) continue;
    const CLI::Option* option = command.get_option_no_throw(row.flag);
    if (option != nullptr && option->count() == 1)
      words.push_back(fmt::format("{}={}", flag, option->results()[0]));
  }
  return words;
}

std::vector<std::string> flags_like(const std::string& log, const CLI::App& train, bool launched) {
  std::string first;
  std::getline(std::istringstream(read_regular_file(log)), first);
  if (!is_run_record(first))
    throw BadInput("--like {}: not the log of a run; name the file of `gradwire train --log`", log);
  const auto given = [](const CLI::Option* option) { return option->count() > 0; };
  std::vector<std::string> words;
  try {
    const Json record = parse_json(first);
    // A launcher sets the number of ranks, which is a flag only where ranks are threads.
    std::vector<std::string> flags{fmt::format("--ranks={}", record.at("ranks").get<int>())};
    for (const Json& flag : record.at("flags"))
      if (!flag.get<std::string>().starts_with("--ranks=")) flags.push_back(flag);
    if (launched) flags.erase(flags.begin());
    for (const std::string& word : flags) {
      const CLI::Option* option = train.get_option(word.substr(0, word.find('=')));
      if (!given(option) && std::ranges::none_of(option->get_excludes(), given)) words.push_back(word);
    }
  } catch (const Json::exception&) {
    throw BadInput("--like {}: its first line lacks the flags of a run, or is damaged", log);
  } catch (const CLI::OptionNotFound& error) {
    throw BadInput("--like {}: {}", log, error.what());
  }
  return words;
}

void add_file_commands(CLI::App& app, FileOptions& o) {
  CLI::App* top_command = app.add_subcommand(
      "top", "Follow a run by its log (train --log): progress, and which rank is the straggler");
  top_command->footer(
      "gradwire top run.jsonl\n"
      "gradwire top run.jsonl --prometheus > /var/lib/prometheus/node-exporter/gradwire.prom\n"
      "gradwire top run.jsonl | head -2");
  top_command->add_option("RUN", o.log, "The run's log")->required();
  top_command->add_flag(
      "--prometheus", o.prometheus,
      "Print the figures once in Prometheus's text format, for node_exporter's textfile collector");
  CLI::App* report_command = app.add_subcommand(
      "report", "Write one page, for a browser, about comparisons, run logs and results of gradwire-bench");
  report_command
      ->add_option("FILE", o.files,
                   "Results of compare --json, whose logs are next to them; logs of train --log; results of "
                   "gradwire-bench --json")
      ->type_name("")
      ->required();
  report_command->footer(
      "gradwire report run.jsonl\n"
      "gradwire report result.json -o comparison.html\n"
      "gradwire report fp32.jsonl int8.jsonl kernels.json");
  add_text(*report_command, "-o,--output", o.page, "FILE", "The page, one file that needs no network");
  CLI::App* export_command =
      app.add_subcommand("export", "Convert run logs for another program (--tensorboard or --csv)");
  export_command->footer(
      "gradwire export run.jsonl --tensorboard events\n"
      "gradwire export result.0.jsonl result.1.jsonl --tensorboard events\n"
      "gradwire export run.jsonl --csv steps.csv");
  export_command->add_option("LOG", o.files, "Logs of train --log")->type_name("")->required();
  add_text(*export_command, "--tensorboard", o.tensorboard, "DIR",
           "Write TensorBoard's event files into DIR, a folder for each log");
  add_text(*export_command, "--csv", o.csv, "FILE", "Write a table: a row for each step of each log")
      ->excludes("--tensorboard");
  app.add_subcommand("formats", "List every compression spec: bytes, error and options")
      ->footer(
          "gradwire formats\n"
          "gradwire train --data synthetic --steps 100 --ranks 2 --compression int4:block=64\n"
          "gradwire-bench formats --spec int4:block=64 --stop 50ms");
}

namespace {

// Removes the option `key` from a text such as "dion:rank=8,lr=0.1". Returns its value, if the text has it.
std::optional<double> take_number(std::string& text, const std::string& key, double most) {
  size_t at = text.find("," + key + "=");
  if (at == std::string::npos) at = text.find(":" + key + "=");
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + key.size() + 2, end = std::min(text.find(',', begin), text.size());
  const auto value = parse_number(std::string_view(text).substr(begin, end - begin), 0.0, most);
  if (!value) throw BadInput("--optimizer {}: {}= is not a number from 0 to {:g}", text, key, most);
  const bool others = end < text.size();
  text = text.substr(0, at) + (others ? text[at] + text.substr(end + 1) : "");
  return value;
}

}  // namespace

bool is_matrix_optimizer(const std::string& text) {
  return text.starts_with("dion:") || text == "muon" || text.starts_with("muon:");
}

void resolve_matrix_optimizer(const std::string& text, bool automatic, TrainConfig& config,
                              std::vector<CompressionSpec>& compressions) {
  std::string rest = text;
  const bool muon = text.starts_with("muon");
  config.dion_lr = take_number(rest, "lr", 1e6).value_or(config.dion_lr);
  if (config.lr == 0) throw BadInput("--lr 0: with --optimizer " + text + " it must be more than 0");
  if (muon) {
    config.muon = true;
    config.muon_mu = take_number(rest, "mu", 1).value_or(config.muon_mu);
    if (rest != "muon") throw BadInput("--optimizer " + text + ": muon takes mu= and lr=; drop the rest");
    return;
  }
  if (automatic) {
    throw BadInput(
        "--compression auto and --optimizer dion cannot be combined: the factors' format is not predicted; "
        "name a spec, such as int8");
  }
  const CompressionSpec codec = CompressionSpec::parse(rest);
  CompressionSpec known;
  known.method = codec.method, known.rank = codec.rank, known.mu = codec.mu, known.orth = codec.orth;
  if (!(codec == known))
    throw BadInput("--optimizer " + text +
                   ": dion takes rank=, mu=, orth= and lr=; give the other options to --compression");
  for (CompressionSpec& wire : compressions) {  // the format in which the factors travel
    if (wire.method != CompressionSpec::Method::wire || wire.policy != ResidualPolicy()) {
      throw BadInput(
          "--optimizer dion: its factors need a wire format with plain error feedback, not "
          "--compression {}; use a format such as int8",
          wire.to_string());
    }
    wire.method = codec.method, wire.rank = codec.rank, wire.mu = codec.mu, wire.orth = codec.orth;
    // The embedding of patches and the classifier are dense, because Dion is for the matrices between them.
    for (const char* name : kOuterMatrices) wire.dense.emplace_back(name);
    std::sort(wire.dense.begin(), wire.dense.end());
    wire.dense.erase(std::unique(wire.dense.begin(), wire.dense.end()), wire.dense.end());
  }
}

void check_muon(const TrainConfig& config) {
  const char* flag = config.shard_optimizer   ? "--shard"
                     : config.overlap_forward ? "--overlap-forward"
                                              : nullptr;
  if (!config.muon || flag == nullptr) return;
  throw BadInput(
      "--optimizer muon needs whole matrices on every rank at the end of the step; drop {}, or use dion",
      flag);
}

namespace {

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

std::string unexpected_text(const CLI::App& app, const CLI::App& command) {
  const std::vector<std::string> rest = app.remaining(true);
  const auto flag = std::ranges::find_if(rest, [](const std::string& word) { return word[0] == '-'; });
  if (flag == rest.end()) return fmt::format("unexpected argument '{}'", fmt::join(rest, " "));
  const std::string name = flag->substr(0, flag->find('='));
  std::vector<std::string_view> names;
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_lnames().empty()) names.emplace_back(option->get_lnames()[0]);
  }
  const bool is_long = name.starts_with("--") && name.size() > 3;
  std::string text = is_long ? suggestion(std::string_view(name).substr(2), names) : "";
  if (const size_t quote = text.find('\''); quote != std::string::npos) text.insert(quote + 1, "--");
  return fmt::format("unknown flag '{}'{}", name, text);
}

// Returns CLI11's message in our words.
std::string message_text(const CLI::App& app, const CLI::ParseError& error) {
  std::string text = error.what();
  // std::regex_match recurses once per character.
  constexpr size_t kMax = 1000;
  if (text.size() > kMax) return text.substr(0, kMax) + "...";
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::smatch found;
  const auto is = [&](const char* pattern) { return std::regex_match(text, found, std::regex(pattern)); };
  if (is("A subcommand is required"))
    return fmt::format("name a command: {}", fmt::join(command_names(app), ", "));
  if (is("(\\S+): At Most 1 required but received (\\d+)")) {
    return fmt::format("{} is given {} times; give it once", found.str(1), found.str(2));
  }
  if (is("(\\S+): 1 required ([^:]*):?(.*) missing")) {
    return fmt::format("{} needs a value: {} {}", found.str(1), found.str(2), found.str(3));
  }
  if (is("(\\S+): (.*) not in \\{([^{}]*)\\}")) {
    const std::vector<std::string> all = CLI::detail::split(found.str(3), ',');
    std::string other = found.str(2) == "gpu" ? "cuda" : found.str(2) == "cpu" ? "host" : found.str(2);
    return fmt::format("{}: '{}' is not one of {}{}", found.str(1), found.str(2), fmt::join(all, ", "),
                       suggestion(other, {all.begin(), all.end()}));
  }
  if (is("Could not convert: (\\S+) = (.*)")) {
    return fmt::format("{}: '{}' is not a value of this flag", found.str(1), found.str(2));
  }
  if (is("(\\S+) excludes (\\S+)")) {
    return fmt::format("{} and {} cannot be combined; drop one of them", found.str(1), found.str(2));
  }
  if (is("(\\S+) requires (\\S+)")) {
    return fmt::format("{} needs {}; add it", found.str(1), found.str(2));
  }
  return text;
}

}  // namespace

void check_command(const CLI::App& app, const std::string& word) {
  const std::vector<std::string> names = command_names(app);
  if (word.starts_with('-') || std::ranges::find(names, word) != names.end()) return;
  throw BadInput("unknown command '{}'{}; use {}; see {} --help", word,
                 suggestion(word, {names.begin(), names.end()}), fmt::join(names, ", "), app.get_name());
}

std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<const CLI::App*> parsed =
      app.get_subcommands([](const CLI::App* c) { return c->parsed(); });
  const CLI::App& command = parsed.empty() ? app : *parsed[0];
  const std::string path = parsed.empty() ? app.get_name() : app.get_name() + " " + command.get_name();
  const std::string text = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr
                               ? unexpected_text(app, command)
                               : message_text(app, error);
  return fmt::format("{}; see {} --help", text, path);
}

}  // namespace gradwire
