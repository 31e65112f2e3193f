#include "collectives/spec/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "kernels/powersgd/powersgd.h"
#include "runtime/error.h"

namespace gradwire {
namespace {

[[noreturn]] void bad(std::string_view text, const std::string& why, bool with_grammar = false) {
  throw BadInput(fmt::format("compression spec '{}': {}{}", text, why,
                             with_grammar ? "; a spec is " + CompressionSpec::grammar() : ""));
}

// "a|b|c"
template <typename T>
std::string words(const std::vector<std::pair<std::string_view, T>>& choices) {
  std::string all;
  for (const auto& [word, value] : choices) {
    if (!all.empty()) all += '|';
    all += word;
  }
  return all;
}

// A choice among words, e.g. on|off.
template <typename T>
T choose(std::string_view text, std::string_view key, std::string_view value,
         const std::vector<std::pair<std::string_view, T>>& choices) {
  for (const auto& [word, result] : choices) {
    if (word == value) return result;
  }
  bad(text, fmt::format("{}='{}' is not one of {}", key, value, words(choices)));
}

template <typename T>
T number(std::string_view text, std::string_view key, std::string_view value, T least, T most) {
  T result{};
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || !(result >= least) || !(result <= most)) {
    bad(text, fmt::format("{}='{}' is not a number from {} to {}", key, value, least, most));
  }
  return result;
}

const std::vector<std::pair<std::string_view, bool>> kOnOff{{"on", true}, {"off", false}};
const std::vector<std::pair<std::string_view, bool>> kIntraNode{{"wire", false}, {"fp32", true}};
const std::vector<std::pair<std::string_view, Rounding>> kRoundings{{"nearest", Rounding::nearest},
                                                                    {"stochastic", Rounding::stochastic}};

std::vector<std::pair<std::string_view, Wire>> wires() {
  std::vector<std::pair<std::string_view, Wire>> all;
  for (Wire wire : wire_formats()) all.emplace_back(wire->name, wire);
  return all;
}

// Encoders whose blocks lie one after the other, so that parts of a residual can be read and written.
std::vector<std::pair<std::string_view, Wire>> residuals() {
  std::vector<std::pair<std::string_view, Wire>> all;
  for (const char* name : {"fp32", "bf16", "int8"}) all.emplace_back(name, find_wire_format(name));
  return all;
}

// "off", or names joined by '+', in the order in which a spec keeps them.
std::vector<std::string> dense_names(std::string_view text, std::string_view value) {
  if (value == "off") return {};
  std::vector<std::string> names;
  for (std::string_view rest = value;;) {
    const size_t plus = rest.find('+');
    const std::string_view item = rest.substr(0, plus);
    if (item.empty() || item == "off") {
      bad(text, fmt::format("dense='{}': '{}' is no tensor's name; write off, or names such as "
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

// Below 8 bits an element a vector's few bytes are not worth their error.
std::vector<std::string> default_dense(Wire wire) {
  if (wire->bytes_per_value() < 1) return {kDenseAuto};
  return {};
}

std::vector<std::pair<std::string_view, ScheduleKind>> schedules() {
  std::vector<std::pair<std::string_view, ScheduleKind>> all;
  for (ScheduleKind kind : {ScheduleKind::automatic, ScheduleKind::ring, ScheduleKind::tree,
                            ScheduleKind::two_shot, ScheduleKind::hierarchical}) {
    all.emplace_back(name(kind), kind);
  }
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
  std::string formats;
  for (Wire wire : wire_formats()) {
    formats += fmt::format("{}{} | ", wire->name, wire->stochastic ? "[:round=nearest|stochastic]" : "");
  }
  return fmt::format(
      "{}powersgd:rank=R[,wire={}][,start=N][,warm=on|off][,min_ratio=X][,seed=S], with ,ef=on|off and "
      ",schedule={} and ,intra_node={} on any of them, and ,residual={} and "
      ",dense=off|auto|NAME+NAME... on any but fp32",
      formats, words(wires()), words(schedules()), words(kIntraNode), words(residuals()));
}

CompressionSpec CompressionSpec::parse(std::string_view text) {
  CompressionSpec spec;
  // A comma after the name is accepted too: grammars in docs read "bf16[,schedule=...]".
  const size_t separator = text.find_first_of(":,");
  std::string_view method = text.substr(0, separator);
  if (Wire wire = find_wire_format(method)) {
    spec.wire = wire;
  } else if (method == "powersgd") {
    spec.method = Method::powersgd;
  } else {
    bad(text, fmt::format("unknown method '{}'", method), true);
  }
  bool powersgd = spec.method == Method::powersgd;

  std::map<std::string_view, std::function<void(std::string_view)>> options;
  options["ef"] = [&](std::string_view v) { spec.error_feedback = choose(text, "ef", v, kOnOff); };
  options["schedule"] = [&](std::string_view v) { spec.schedule = choose(text, "schedule", v, schedules()); };
  options["intra_node"] = [&](std::string_view v) {
    spec.fp32_intra_node = choose(text, "intra_node", v, kIntraNode);
  };
  if (powersgd || !spec.wire->exact) {
    options["residual"] = [&](std::string_view v) {
      spec.residual = choose(text, "residual", v, residuals());
    };
    options["dense"] = [&](std::string_view v) { spec.dense = dense_names(text, v); };
  }
  if (powersgd || spec.wire->stochastic) {
    options["round"] = [&](std::string_view v) { spec.rounding = choose(text, "round", v, kRoundings); };
  }
  if (powersgd) {
    options["rank"] = [&](std::string_view v) { spec.rank = number(text, "rank", v, 1, kMaxPowerSgdRank); };
    options["wire"] = [&](std::string_view v) { spec.wire = choose(text, "wire", v, wires()); };
    options["start"] = [&](std::string_view v) {
      spec.start = number<int64_t>(text, "start", v, 0, int64_t{1} << 40);
    };
    options["warm"] = [&](std::string_view v) { spec.warm = choose(text, "warm", v, kOnOff); };
    options["min_ratio"] = [&](std::string_view v) {
      spec.min_ratio = number(text, "min_ratio", v, 0.0, 1e6);
    };
    options["seed"] = [&](std::string_view v) {
      spec.seed = number<uint64_t>(text, "seed", v, 0, ~uint64_t{0} >> 1);
    };
  }

  std::map<std::string_view, bool> seen;
  std::string_view rest =
      separator == std::string_view::npos ? std::string_view() : text.substr(separator + 1);
  if (separator != std::string_view::npos && rest.empty()) {
    bad(text, fmt::format("nothing after '{}'", text[separator]), true);
  }
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    std::string_view item = rest.substr(0, comma);
    if (comma + 1 == rest.size()) bad(text, "ends in ','", true);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    size_t equals = item.find('=');
    std::string_view key = item.substr(0, equals);
    if (equals == std::string_view::npos) bad(text, fmt::format("'{}' is not key=value", item), true);
    std::string_view value = item.substr(equals + 1);
    if (key == "node_wire") {  // its original name
      key = "intra_node";
      if (value == "same") value = "wire";
    }
    auto option = options.find(key);
    if (option == options.end()) {
      std::string legal;
      for (const auto& [known, apply] : options)
        legal += fmt::format("{}{}", legal.empty() ? "" : ", ", known);
      bad(text, fmt::format("{} has no option '{}'; it has {}", method, key, legal));
    }
    if (std::exchange(seen[key], true)) bad(text, fmt::format("'{}' is given twice", key));
    option->second(value);
  }
  if (spec.rounding == Rounding::stochastic && !spec.wire->stochastic) {
    std::string others;
    for (Wire wire : wire_formats()) {
      if (wire->stochastic) others += fmt::format("{}wire={}", others.empty() ? "" : " or ", wire->name);
    }
    bad(text, fmt::format("round=stochastic does not apply to wire={}; add {}", spec.wire->name, others));
  }
  if (!spec.residual->exact && !spec.error_feedback) {
    bad(text, fmt::format("residual={} needs error feedback, and ef=off keeps no residual; drop one of them",
                          spec.residual->name));
  }
  if (!seen["dense"]) spec.dense = default_dense(spec.wire);
  if (spec.fp32_intra_node && spec.schedule != ScheduleKind::hierarchical &&
      spec.schedule != ScheduleKind::automatic) {
    bad(text,
        fmt::format("intra_node=fp32 needs schedule=hierarchical or auto; schedule={} has no notion of nodes",
                    name(spec.schedule)));
  }
  return spec;
}

std::string CompressionSpec::to_string() const {
  CompressionSpec defaults;
  std::string options;
  auto add = [&](bool differs, const std::string& item) {
    if (differs) options += (options.empty() ? ":" : ",") + item;
  };
  bool powersgd = method == Method::powersgd;
  if (powersgd) {
    add(true, fmt::format("rank={}", rank));
    add(wire != defaults.wire, fmt::format("wire={}", wire->name));
    add(start != defaults.start, fmt::format("start={}", start));
    add(warm != defaults.warm, warm ? "warm=on" : "warm=off");
    add(min_ratio != defaults.min_ratio, "min_ratio=" + shortest(min_ratio));
    add(seed != defaults.seed, fmt::format("seed={}", seed));
  }
  add(rounding != defaults.rounding, fmt::format("round={}", word_for(kRoundings, rounding)));
  add(error_feedback != defaults.error_feedback, error_feedback ? "ef=on" : "ef=off");
  add(residual != defaults.residual, fmt::format("residual={}", residual->name));
  add(dense != default_dense(wire),
      fmt::format("dense={}", dense.empty() ? "off" : fmt::to_string(fmt::join(dense, "+"))));
  add(schedule != defaults.schedule, fmt::format("schedule={}", name(schedule)));
  add(fp32_intra_node != defaults.fp32_intra_node, "intra_node=fp32");
  return (powersgd ? "powersgd" : std::string(wire->name)) + options;
}

bool CompressionSpec::loads_state_of(std::string_view text) const {
  CompressionSpec other = *this;
  for (const auto& [name, format] : residuals()) {
    other.residual = format;
    if (other.to_string() == text) return true;
  }
  return false;
}

}  // namespace gradwire
