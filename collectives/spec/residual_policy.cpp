#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "collectives/spec/spec.h"

namespace gradwire {

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
