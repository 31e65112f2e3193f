#include "collectives/spec/spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/powersgd/powersgd.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

[[noreturn]] void bad(std::string_view text, const std::string& why, bool points_to_list = false) {
  throw BadInput("compression spec '{}': {}{}", text, why,
                 points_to_list ? "; gradwire formats and docs/formats.md list every spec" : "");
}

// Returns the words joined as "a|b|c".
template <typename T>
std::string words(const std::vector<std::pair<std::string_view, T>>& choices) {
  std::string all;
  for (const auto& [word, value] : choices) {
    if (!all.empty()) all += '|';
    all += word;
  }
  return all;
}

const std::vector<std::pair<std::string_view, bool>> kOnOff{{"on", true}, {"off", false}};
using Feedback = ResidualPolicy::Feedback;
const std::vector<std::pair<std::string_view, Feedback>> kFeedbacks{
    {"on", Feedback::on}, {"off", Feedback::off}, {"ef21", Feedback::ef21}};
const std::vector<std::pair<std::string_view, bool>> kIntraNode{{"wire", false}, {"fp32", true}};
const std::vector<std::pair<std::string_view, Rounding>> kRoundings{{"nearest", Rounding::nearest},
                                                                    {"stochastic", Rounding::stochastic}};

std::vector<std::string_view> format_names() {
  std::vector<std::string_view> all;
  for (Wire wire : wire_formats()) all.emplace_back(wire->name);
  return all;
}

// Returns the formats that residual= accepts. The blocks of these formats are contiguous, so that parts of a
// residual can be read and written.
std::vector<std::pair<std::string_view, Wire>> residuals() {
  std::vector<std::pair<std::string_view, Wire>> all;
  for (const char* name : {"fp32", "bf16", "int8"}) all.emplace_back(name, find_wire_format(name));
  return all;
}

// Parses "off", or names joined by '+'. A '+' before the first name adds the names to `defaults`. Returns the
// names in the order in which a spec stores names.
std::vector<std::string> dense_names(std::string_view text, std::string_view value,
                                     const std::vector<std::string>& defaults) {
  if (value == "off") return {};
  std::vector<std::string> names;
  if (value.starts_with('+')) {
    names = defaults;
    value.remove_prefix(1);
  }
  for (std::string_view rest = value;;) {
    const size_t plus = rest.find('+');
    const std::string_view item = rest.substr(0, plus);
    if (item.empty() || item == "off") {
      bad(text, fmt::format("dense='{}': '{}' is not a tensor's name; write off, or names such as "
                            "auto+*.bias, joined by '+'",
                            value, item));
    }
    names.emplace_back(item);
    if (plus == std::string_view::npos) break;
    rest = rest.substr(plus + 1);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// Returns the default of dense=. Below 8 bits per element, compressing a vector saves few bytes and causes a
// large error.
std::vector<std::string> default_dense(Wire wire) {
  if (wire->bytes_per_value() < 1) return {kDenseAuto};
  return {};
}

std::vector<std::pair<std::string_view, ScheduleKind>> schedules() {
  std::vector<std::pair<std::string_view, ScheduleKind>> all = {{"auto", ScheduleKind::automatic}};
  for (ScheduleKind kind : all_schedules()) all.emplace_back(name(kind), kind);
  all.emplace_back("nccl", ScheduleKind::nccl);
  return all;
}

template <typename T>
const char* word_for(const std::vector<std::pair<std::string_view, T>>& choices, T value) {
  for (const auto& [word, result] : choices) {
    if (result == value) return word.data();
  }
  return "?";
}

std::string shortest(double value) {
  char buffer[32];
  auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return std::string(buffer, end);
}

}  // namespace

std::string CompressionSpec::grammar() {
  return fmt::format(
      "FORMAT, "
      "powersgd:rank=R[,wire=FORMAT][,warm=on|off][,alternate=on|off][,min_ratio=X][,seed=S], "
      "randk:ratio=X[,wire=FORMAT][,seed=S] or dion:rank=R[,mu=X][,orth=on|off][,wire=FORMAT][,seed=S], "
      "where "
      "FORMAT is {}, with ,ef={} and ,schedule={} and ,intra_node={} on any of them, "
      ",residual={} and ,ef_decay=X and ,start=N and ,max_norm=X and "
      ",dense=off|auto|[+]NAME+NAME... on any but fp32, ,ramp=N on any but fp32 and powersgd, ,momentum=X on "
      "topk and randk, and the format's own options (docs/formats.md)",
      fmt::join(format_names(), "|"), words(kFeedbacks), words(schedules()), words(kIntraNode),
      words(residuals()));
}

namespace {

// Returns whether a format's specs choose the number of values that it sends.
bool has_k(Wire wire) {
  const auto copy = wire->selects ? wire->copy() : nullptr;
  if (copy == nullptr) return false;
  return std::ranges::any_of(copy->choices(),
                             [](const FormatOption& o) { return o.key == std::string_view("k"); });
}

// Returns the key=value pairs after the name, in order.
std::vector<std::pair<std::string_view, std::string_view>> items_of(std::string_view text, size_t separator) {
  std::vector<std::pair<std::string_view, std::string_view>> items;
  if (separator == std::string_view::npos) return items;
  std::string_view rest = text.substr(separator + 1);
  if (rest.empty()) bad(text, fmt::format("nothing after '{}'", text[separator]), true);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    if (comma + 1 == rest.size()) bad(text, "ends in ','", true);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      const std::string_view name = item.substr(0, item.find(':'));
      const bool is_spec = find_wire_format(name) != nullptr || CompressionSpec::is_codec(name);
      if (is_spec) {
        bad(text,
            fmt::format("'{}' is another spec; {}", item,
                        text.starts_with("auto")
                            ? "write allow=SPEC+SPEC"
                            : "give one at a time (gradwire compare: repeat --compression)"),
            true);
      }
      const bool ranked = text.starts_with("powersgd:") || text.starts_with("dion:");
      bad(text,
          fmt::format("'{}' is not key=value{}", item, ranked ? fmt::format(", such as rank={}", item) : ""),
          true);
    }
    const std::string_view key = item.substr(0, equals), value = item.substr(equals + 1);
    for (const auto& [before, other] : items) {
      if (before == key) bad(text, fmt::format("'{}' is given twice", key));
    }
    items.emplace_back(key, value);
  }
  return items;
}

// Legal values of the residual's policies. ef_decay=0 would be ef=off, and momentum=1 would never forget.
constexpr double kMinDecay = 1e-6, kMaxMomentum = 0.9999, kMinNorm = 1e-9, kMaxNorm = 1e9;
constexpr int64_t kMaxSteps = int64_t{1} << 40;

using Options = std::map<std::string_view, std::function<void(std::string_view)>>;

// Returns the spec's options except those of its wire format.
Options options_of(CompressionSpec& spec, std::string_view text, std::optional<Rounding>& rounding,
                   std::optional<std::string_view>& dense) {
  Options options;
  const auto word = [&](const char* key, auto& field, const auto& choices) {
    options[key] = [text, key, &field, choices](std::string_view v) {
      const auto found = std::ranges::find(choices, v, [](const auto& choice) { return choice.first; });
      if (found == choices.end()) bad(text, fmt::format("{}='{}' is not one of {}", key, v, words(choices)));
      field = found->second;
    };
  };
  const auto numeric = [&](const char* key, auto& field, auto least, auto most) {
    using Number = std::decay_t<decltype(field)>;
    options[key] = [text, key, &field, least = Number{least}, most = Number{most}](std::string_view v) {
      const auto number = parse_number(v, least, most);
      if (!number) bad(text, fmt::format("{}='{}' is not a number from {} to {}", key, v, least, most));
      field = *number;
    };
  };
  ResidualPolicy& policy = spec.policy;
  word("ef", policy.feedback, kFeedbacks);
  word("schedule", spec.schedule, schedules());
  word("intra_node", spec.fp32_intra_node, kIntraNode);
  const bool codec = spec.method != CompressionSpec::Method::wire;
  const bool dion = spec.method == CompressionSpec::Method::dion;
  if (codec || !spec.wire->exact) {
    word("residual", spec.residual, residuals());
    options["dense"] = [&dense](std::string_view v) { dense = v; };
    if (!dion) numeric("ef_decay", policy.decay, kMinDecay, 1.0);
    if (!dion) numeric("start", policy.start, int64_t{0}, kMaxSteps);
    if (!dion) numeric("max_norm", policy.max_norm, kMinNorm, kMaxNorm);
    const bool randk = spec.method == CompressionSpec::Method::randk;
    if (!codec || randk) numeric("ramp", policy.ramp, int64_t{0}, kMaxSteps);
    if (randk || (!codec && has_k(spec.wire))) numeric("momentum", policy.momentum, 0.0, kMaxMomentum);
  }
  if (codec || spec.wire->stochastic) word("round", rounding, kRoundings);
  if (!codec) return options;
  options["wire"] = [&spec, text](std::string_view v) {
    spec.wire = find_wire_format(v);
    if (spec.wire == nullptr) {
      bad(text, fmt::format("wire='{}' is not one of {}{}", v, fmt::join(format_names(), "|"),
                            suggestion(v, format_names())));
    }
  };
  numeric("seed", spec.seed, uint64_t{0}, ~uint64_t{0} >> 1);
  if (spec.method == CompressionSpec::Method::randk) {
    numeric("ratio", spec.ratio, 1e-6, 1.0);
    return options;
  }
  numeric("rank", spec.rank, 1, kMaxPowerSgdRank);
  if (dion) {
    numeric("mu", spec.mu, 0.0, 1.0);
    word("orth", spec.orth, kOnOff);
    return options;
  }
  word("warm", spec.warm, kOnOff);
  numeric("min_ratio", spec.min_ratio, 0.0, 1e6);
  word("alternate", spec.alternate, kOnOff);
  return options;
}

// Applies the items to the spec's options and to the wire format's options. Stores the format in spec.wire.
void apply(CompressionSpec& spec, std::string_view text, std::string_view method, const Options& options,
           const std::vector<std::pair<std::string_view, std::string_view>>& items) {
  // Apply the option `wire` first, because options of the wire format may precede `wire` in the text.
  for (const auto& [key, value] : items) {
    if (key == "wire" && options.contains(key)) options.at(key)(value);
  }
  const auto variant = spec.wire->copy();
  const auto choices = variant != nullptr ? variant->choices() : std::vector<FormatOption>();
  for (const auto& [key, value] : items) {
    if (const auto option = options.find(key); option != options.end()) {
      option->second(value);
      continue;
    }
    const auto choice =
        std::ranges::find(choices, key, [](const FormatOption& o) { return std::string_view(o.key); });
    if (choice == choices.end()) {
      std::vector<std::string_view> legal;
      for (const auto& [known, set] : options) legal.push_back(known);
      for (const FormatOption& o : choices) legal.emplace_back(o.key);
      const bool ratio = key == "ratio" && has_k(spec.wire);
      bad(text, fmt::format("{} has no option '{}'{}; it has {}", method, key,
                            ratio ? "; k=64,of=4096 is the ratio 64 / 4096" : suggestion(key, legal),
                            fmt::join(legal, ", ")));
    }
    if (!choice->set(value)) bad(text, fmt::format("{}='{}' is not {}", key, value, choice->legal()));
  }
  if (variant == nullptr) return;
  if (const std::string problem = variant->problem(); !problem.empty()) bad(text, problem);
  spec.wire = intern_wire_format(*variant);
}

// Throws BadInput if rounding, error feedback, schedule and format do not fit together.
void check(const CompressionSpec& spec, std::string_view text, bool fed_back) {
  if (spec.rounding == Rounding::stochastic && !spec.wire->stochastic) {
    std::vector<std::string> others;
    for (Wire wire : wire_formats()) {
      if (wire->stochastic) others.push_back(fmt::format("wire={}", wire->name));
    }
    bad(text, fmt::format("round=stochastic does not apply to wire={}; add {}", spec.wire->name,
                          fmt::join(others, " or ")));
  }
  if (const std::string why = spec.divergence(); fed_back && spec.policy.keeps_errors() && !why.empty()) {
    bad(text, why + "or ef=off for no error feedback");
  }
  if (spec.method == CompressionSpec::Method::dion && spec.policy.feedback != Feedback::on) {
    bad(text, "dion's momentum is the residual of error feedback; drop ef=");
  }
  if (!spec.residual->exact && !spec.policy.keeps_errors()) {
    bad(text, fmt::format("residual={} needs error feedback, and ef=off keeps no residual; drop one of them",
                          spec.residual->name));
  }
  if (const std::string problem = spec.policy_problem(); !problem.empty()) bad(text, problem);
  if (spec.alternate && !spec.warm) {
    bad(text, "alternate=on needs warm=on: a step projects with the factor that the previous step summed");
  }
  if (spec.schedule == ScheduleKind::nccl && !spec.wire->exact) {
    bad(text,
        fmt::format("schedule=nccl adds FP32, not {}: NCCL would add rounded values and round each partial "
                    "sum, without error feedback; use wire format fp32, or another schedule",
                    spec.wire->name));
  }
  if (spec.fp32_intra_node && spec.schedule != ScheduleKind::hierarchical &&
      spec.schedule != ScheduleKind::automatic) {
    bad(text, fmt::format("intra_node=fp32 needs schedule=hierarchical or auto; schedule={} ignores nodes",
                          name(spec.schedule)));
  }
}

}  // namespace

bool CompressionSpec::is_codec(std::string_view name) {
  return name == "powersgd" || name == "randk" || name == "dion";
}

CompressionSpec CompressionSpec::parse(std::string_view text, bool fed_back) {
  CompressionSpec spec;
  // A comma may also follow the name, as in "bf16,schedule=ring".
  const size_t separator = text.find_first_of(":,");
  const std::string_view method = text.substr(0, separator);
  if (const Wire wire = find_wire_format(method)) {
    spec.wire = wire;
  } else if (method == "powersgd") {
    spec.method = Method::powersgd;
  } else if (method == "randk") {
    spec.method = Method::randk;
  } else if (method == "dion") {
    spec.method = Method::dion;
  } else {
    if (method == "fp16" || method == "half" || method == "float16")
      bad(text, fmt::format("{} is not a wire format; bf16 sends as many bytes", method), true);
    auto known = format_names();
    known.insert(known.end(), {"powersgd", "randk", "dion"});
    bad(text, fmt::format("unknown method '{}'{}", method, suggestion(method, known)), true);
  }
  std::optional<Rounding> rounding;
  std::optional<std::string_view> dense;
  apply(spec, text, method, options_of(spec, text, rounding, dense), items_of(text, separator));
  spec.dense = default_dense(spec.wire);
  if (dense) spec.dense = dense_names(text, *dense, spec.dense);
  spec.rounding = rounding.value_or(spec.wire->rounding);
  check(spec, text, fed_back);
  return spec;
}

std::string CompressionSpec::to_string() const {
  CompressionSpec defaults;
  std::string options;
  auto add = [&](bool differs, const std::string& item) {
    if (differs) options += (options.empty() ? ":" : ",") + item;
  };
  const bool powersgd = method == Method::powersgd, randk = method == Method::randk,
             dion = method == Method::dion, codec = powersgd || randk || dion;
  add(powersgd || dion, fmt::format("rank={}", rank));
  add(dion && mu != defaults.mu, "mu=" + shortest(mu));
  add(orth, "orth=on");
  add(randk, "ratio=" + shortest(ratio));
  if (codec) add(wire != defaults.wire, fmt::format("wire={}", wire->name));
  add(policy.start != 0, fmt::format("start={}", policy.start));
  if (powersgd) {
    add(warm != defaults.warm, warm ? "warm=on" : "warm=off");
    add(alternate != defaults.alternate, alternate ? "alternate=on" : "alternate=off");
    add(min_ratio != defaults.min_ratio, "min_ratio=" + shortest(min_ratio));
  }
  if (codec) add(seed != defaults.seed, fmt::format("seed={}", seed));
  add(*wire->options != 0, wire->options);
  add(rounding != wire->rounding, fmt::format("round={}", word_for(kRoundings, rounding)));
  add(policy.feedback != Feedback::on, fmt::format("ef={}", word_for(kFeedbacks, policy.feedback)));
  add(policy.decay != 1, "ef_decay=" + shortest(policy.decay));
  add(policy.ramp != 0, fmt::format("ramp={}", policy.ramp));
  add(policy.momentum != 0, "momentum=" + shortest(policy.momentum));
  add(policy.max_norm != 0, "max_norm=" + shortest(policy.max_norm));
  add(residual != defaults.residual, fmt::format("residual={}", residual->name));
  add(dense != default_dense(wire),
      fmt::format("dense={}", dense.empty() ? "off" : fmt::to_string(fmt::join(dense, "+"))));
  add(schedule != defaults.schedule, fmt::format("schedule={}", name(schedule)));
  add(fp32_intra_node != defaults.fp32_intra_node, "intra_node=fp32");
  return (powersgd ? "powersgd" : randk ? "randk" : dion ? "dion" : wire->name) + options;
}

bool CompressionSpec::sums_gradients() const {
  constexpr double kOneBit = 0.3;  // less than the error of one bit per value, 0.36
  const bool max_wait =
      method == Method::randk || (method == Method::wire && (has_k(wire) || wire->gaussian_error > kOneBit));
  return max_wait && policy.keeps_errors();
}

std::string CompressionSpec::divergence() const {
  // A step keeps decay^2 times this share of the residual's square.
  const double bound = wire->error_bound(rounding) * policy.decay * policy.decay;
  if (bound < 1) return {};
  // Finds the first option, in the table's order, for which changing one value is enough.
  const auto variant = wire->copy();
  std::string remedy;
  for (const FormatOption& option : variant->choices()) {
    const int given = *option.value;
    for (int value = option.words.empty() ? option.most : static_cast<int>(option.words.size()) - 1;
         remedy.empty() && value >= option.least; value = option.words.empty() ? value / 2 : value - 1) {
      *option.value = value;
      variant->settle();
      if (variant->error_bound(rounding) < 1) remedy = fmt::format("{}={}, ", option.key, option.text());
    }
    *option.value = given;
  }
  return fmt::format(
      "an encode of {} with round={} may lose {:.2f} times the square of its input, so that the residual of "
      "error feedback could grow without bound; it needs {}",
      wire->spec(), word_for(kRoundings, rounding), bound, remedy);
}

size_t ResidualPolicy::stage(int64_t step, size_t stages) const {
  const auto wider = static_cast<int64_t>(stages) - 1;
  if (wider == 0 || step >= start + ramp) return static_cast<size_t>(wider);
  return static_cast<size_t>(std::max<int64_t>(step - start, 0) * wider / ramp);
}

bool CompressionSpec::needs_reducer() const {
  return method != Method::wire || policy.feedback == ResidualPolicy::Feedback::ef21 || policy.start > 0 ||
         policy.ramp > 0 || policy.momentum > 0 || policy.max_norm > 0;
}

// Formats that send some of the values send a quarter, a sixteenth, ... of the values, as in Deep Gradient
// Compression; other formats fall from 16 to 4 bits.
std::vector<Wire> CompressionSpec::ramp_formats() const {
  std::vector<Wire> all;
  if (policy.ramp > 0 && method == Method::wire) {
    const auto variant = wire->selects ? wire->copy() : nullptr;
    int *k = nullptr, of = 0;
    for (const FormatOption& option : variant != nullptr ? variant->choices() : std::vector<FormatOption>()) {
      if (option.key == std::string_view("k")) k = option.value;
      if (option.key == std::string_view("of")) of = *option.value;
    }
    const int last = k != nullptr ? *k : 0;
    for (int wider = of / 4; k != nullptr && wider > last; wider /= 4) {
      *k = wider;
      all.push_back(intern_wire_format(*variant));
    }
    for (const char* name : {"bf16", "int8", "int4"}) {
      const Wire wider = find_wire_format(name);
      if (k == nullptr && wider->bytes_per_value() > wire->bytes_per_value()) all.push_back(wider);
    }
  }
  all.push_back(wire);
  return all;
}

std::vector<double> CompressionSpec::ramp_ratios() const {
  std::vector<double> all;
  const bool ramps = policy.ramp > 0 && method == Method::randk;
  for (double wider = 0.25; ramps && wider > ratio; wider /= 4) all.push_back(wider);
  all.push_back(ratio);
  return all;
}

bool CompressionSpec::loads_state_of(std::string_view text) const {
  CompressionSpec other = *this;
  for (const char* name : {"fp32", "bf16", "int8"}) {
    other.residual = find_wire_format(name);
    if (other.to_string() == text) return true;
  }
  return false;
}

std::string CompressionSpec::policy_problem() const {
  const bool lossless = method == Method::wire && wire->exact;
  const bool ef21 = policy.feedback == ResidualPolicy::Feedback::ef21;
  if (ef21 && lossless) return "ef=ef21 needs a format with encoding errors, not fp32; drop ef=ef21";
  if (ef21 && !residual->exact) {
    return fmt::format("ef=ef21 needs residual=fp32, not {}: its estimates have no residual to round",
                       residual->name);
  }
  const std::string option = policy.decay != 1      ? fmt::format("ef_decay={}", policy.decay)
                             : policy.momentum != 0 ? fmt::format("momentum={}", policy.momentum)
                                                    : "";
  if (!option.empty() && policy.feedback != ResidualPolicy::Feedback::on) {
    return fmt::format("{} needs ef=on, not ef={}, which adds no residual to gradients; drop one of them",
                       option, ef21 ? "ef21" : "off");
  }
  if (policy.ramp > 0 && ramp_formats().size() + ramp_ratios().size() < 3) {
    return fmt::format("ramp={} has no step between FP32 and {}; drop ramp, or use start=N", policy.ramp,
                       method == Method::randk ? fmt::format("ratio={}", ratio) : wire->spec());
  }
  return {};
}

}  // namespace gradwire
