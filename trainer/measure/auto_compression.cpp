#include "trainer/measure/auto_compression.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "collectives/reducer/choose.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

constexpr std::string_view kName = "auto", kError = "error=", kReplanOff = "replan=off",
                           kPlan = "plan=", kAllow = "allow=";
// Formats within this factor of the shortest step count as a tie: about the error of a prediction.
constexpr double kTie = 1.05;

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw BadInput(fmt::format("--compression {}: {}; write {}", text, why, AutoCompression::grammar()));
}

// Parses SPEC+SPEC... Returns each spec's shortest text.
std::vector<std::string> allowed_specs(std::string_view text, std::string_view list) {
  std::vector<std::string> specs;
  for (bool more = true; more;) {
    const size_t plus = list.find('+');
    const std::string_view item = list.substr(0, plus);
    more = plus != std::string_view::npos;
    if (more) list.remove_prefix(plus + 1);
    if (item.empty()) refuse(text, "allow= has an empty spec");
    const CompressionSpec spec = CompressionSpec::parse(item);
    if (const std::string why = choice_obstacle(spec); !why.empty())
      refuse(text, fmt::format("{}: {}", item, why));
    const std::string shortest = spec.to_string();
    if (std::find(specs.begin(), specs.end(), shortest) != specs.end())
      refuse(text, fmt::format("{} is allowed twice", item));
    specs.push_back(shortest);
  }
  return specs;
}

}  // namespace

bool AutoCompression::is_request(std::string_view text) {
  return text == kName || text.starts_with("auto:");
}

AutoCompression AutoCompression::parse(std::string_view text) {
  AutoCompression request;
  if (text == kName) return request;
  std::string_view rest = text.substr(std::min(kName.size() + 1, text.size()));
  std::vector<std::string_view> keys;
  for (bool more = true; more;) {
    if (rest.starts_with(kAllow)) {
      request.allow = allowed_specs(text, rest.substr(kAllow.size()));
      break;
    }
    const size_t comma = rest.find(',');
    const std::string_view option = rest.substr(0, comma), key = option.substr(0, option.find('='));
    request.set_option(text, option);
    if (std::ranges::find(keys, key) != keys.end()) refuse(text, fmt::format("'{}' is given twice", key));
    keys.push_back(key);
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return request;
}

void AutoCompression::set_option(std::string_view text, std::string_view option) {
  if (option == kReplanOff) {
    replan = false;
  } else if (option.starts_with(kError)) {
    const std::string_view value = option.substr(kError.size());
    const auto number = parse_number(value, 0.0, 1e6);
    if (!number) refuse(text, fmt::format("error='{}' is not a number from 0 to 1e6", value));
    error = *number;
  } else if (option.starts_with(kPlan) && option.size() > kPlan.size()) {
    plan = option.substr(kPlan.size());
    if (const std::string problem = path_problem(plan); !problem.empty()) refuse(text, problem);
  } else {
    refuse(text, fmt::format("'{}' is not an option of auto", option));
  }
}

std::string AutoCompression::to_string() const {
  return fmt::format("{}:{}{}{}{}{}", kName, kError, error, replan ? "" : fmt::format(",{}", kReplanOff),
                     plan.empty() ? "" : fmt::format(",{}{}", kPlan, plan),
                     allow.empty() ? "" : fmt::format(",{}{}", kAllow, fmt::join(allow, "+")));
}

std::vector<CompressionSpec> AutoCompression::candidates() const {
  std::vector<CompressionSpec> all;
  for (const std::string& spec : choices({}).specs) all.push_back(CompressionSpec::parse(spec));
  return all;
}

std::string AutoCompression::candidate_of(const std::string& text) const {
  CompressionSpec spec = CompressionSpec::parse(text);
  for (const CompressionSpec& candidate : candidates()) {
    if (std::ranges::includes(spec.dense, candidate.dense)) {
      CompressionSpec same = spec;
      same.dense = candidate.dense;
      if (same == candidate) return candidate.to_string();
    }
  }
  return {};
}

Choices AutoCompression::choices(std::vector<int64_t> bucket_mb) const {
  Choices choices{.bucket_mb = std::move(bucket_mb), .error = error, .tie = kTie};
  if (allow.empty()) return choices;
  choices.specs = {"fp32"};
  for (const std::string& spec : allow) {
    if (spec != choices.specs[0]) choices.specs.push_back(spec);
  }
  return choices;
}

}  // namespace gradwire
