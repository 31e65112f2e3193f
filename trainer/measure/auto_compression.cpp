#include "trainer/measure/auto_compression.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire {
namespace {

constexpr std::string_view kName = "auto", kError = "error=", kAllow = "allow=";
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
    if (spec.policy.start > 0 || spec.policy.ramp > 0) {
      refuse(text, fmt::format("{}: the error is that of the first step, which start= and ramp= "
                               "compress less",
                               item));
    }
    if (spec.policy.momentum > 0) {
      refuse(text, fmt::format("{}: momentum= belongs to the optimizer, and FP32, which auto may choose, "
                               "would have none",
                               item));
    }
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
  if (rest.starts_with(kError)) {
    rest.remove_prefix(kError.size());
    const std::string_view value = rest.substr(0, rest.find(','));
    const auto error = parse_number(value, 0.0, 1e6);
    if (!error) refuse(text, fmt::format("error='{}' is not a number from 0 to 1e6", value));
    request.error = *error;
    if (value.size() == rest.size()) return request;
    rest.remove_prefix(value.size() + 1);
  }
  if (!rest.starts_with(kAllow)) refuse(text, fmt::format("'{}' is not an option of auto", rest));
  request.allow = allowed_specs(text, rest.substr(kAllow.size()));
  return request;
}

std::string AutoCompression::to_string() const {
  return fmt::format("{}:{}{}{}", kName, kError, error,
                     allow.empty() ? "" : fmt::format(",{}{}", kAllow, fmt::join(allow, "+")));
}

std::vector<CompressionSpec> AutoCompression::candidates() const {
  std::vector<CompressionSpec> all;
  for (const std::string& spec : choices({}).specs) all.push_back(CompressionSpec::parse(spec));
  return all;
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
