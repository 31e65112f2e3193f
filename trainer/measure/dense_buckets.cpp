#include "trainer/measure/dense_buckets.h"

#include <algorithm>
#include <set>

namespace gradwire {
namespace {

// The share of backward that must suffice: ranks that wait for each other take longer than their messages.
constexpr double kSafety = 0.4;
constexpr int64_t kRunAlignment = 4;  // of the run's reducer (ReducerOptions)

// Returns the spec with more dense tensors.
std::string with_dense(const std::string& text, const std::vector<std::string>& names) {
  CompressionSpec spec = CompressionSpec::parse(text);
  spec.dense.insert(spec.dense.end(), names.begin(), names.end());
  return CompressionSpec::parse(spec.to_string()).to_string();  // in order
}

}  // namespace

std::vector<std::string> name_patterns(const std::vector<std::string>& all,
                                       const std::vector<std::string>& some) {
  const std::set<std::string> wanted(some.begin(), some.end());
  const auto wants = [&](const std::string& name) { return wanted.contains(name); };
  std::vector<std::string> patterns;
  std::set<std::string> covered;
  for (const std::string& name : some) {
    if (covered.contains(name)) continue;
    std::string pattern = name;
    for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
      const std::string prefix = name.substr(0, dot + 1);
      const auto outside = [&](const std::string& other) {
        return other.starts_with(prefix) && !wants(other);
      };
      if (std::ranges::any_of(all, outside)) continue;
      pattern = prefix + "*";
      for (const std::string& other : some) {
        if (other.starts_with(prefix)) covered.insert(other);
      }
      break;
    }
    patterns.push_back(pattern);
  }
  return patterns;
}

std::string with_dense_buckets(StepCosts costs, const Prediction& choice) {
  costs.compute_ms *= kSafety;
  const double limit = predict_step(costs, choice.spec, choice.bucket_mb).step_ms;
  std::vector<std::string> all, first;
  for (const GradientTensor& tensor : costs.tensors) all.push_back(tensor.name);
  std::string best;
  for (const BucketRange& bucket : lay_out(costs.tensors, kRunAlignment, choice.bucket_mb << 20).buckets) {
    first.insert(first.end(), all.begin() + bucket.first_tensor, all.begin() + bucket.last_tensor);
    const std::string text = with_dense(choice.spec, name_patterns(all, first));
    copy_kernel_costs(choice.spec, text, costs);
    if (first.size() == all.size() || predict_step(costs, text, choice.bucket_mb).step_ms > limit) break;
    best = text;
  }
  return best;
}

}  // namespace gradwire
