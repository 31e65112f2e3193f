#include "trainer/measure/recommend.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>

#include "collectives/codec/codec.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "collectives/reducer/choose.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "trainer/config/config.h"

namespace gradwire {
namespace {

constexpr double kDefaultIsAsGood = 1.02;

struct Bucket {
  int64_t elements = 0;
  // Transmitted floats: not compressed (dense=), not factored, and of the factors P and Q.
  int64_t aside = 0, whole = 0, p = 0, q = 0;
};

// Returns the reducer's buckets, without gaps between tensors.
std::vector<Bucket> cut(const StepCosts& costs, const CompressionSpec& spec, int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  for (const BucketRange& range : lay_out(costs.tensors, 1, bucket_bytes).buckets) {
    Bucket& bucket = buckets.emplace_back(Bucket{.elements = range.elements()});
    for (int i = range.first_tensor; i < range.last_tensor; ++i) {
      const GradientTensor& tensor = costs.tensors[static_cast<size_t>(i)];
      const auto [rows, cols] = matrix_of(tensor);
      if (is_dense(spec, {.name = tensor.name, .rows = rows, .cols = cols})) {
        bucket.aside += rows * cols;
        continue;
      }
      using Method = CompressionSpec::Method;
      const bool low_rank = spec.method == Method::powersgd || spec.method == Method::dion;
      const int rank = low_rank ? powersgd_rank(spec, rows, cols) : 0;
      const double share = spec.method == Method::randk ? spec.ratio : 1;
      bucket.whole += rank > 0 ? 0 : std::llround(share * static_cast<double>(rows * cols));
      bucket.p += rows * rank;
      bucket.q += cols * rank;
    }
  }
  return buckets;
}

// Returns the expected maximum of `n` independent standard normal variables: the integral of 1 - F^n over the
// positive numbers less that of F^n over the negative ones, for their distribution function F.
double expected_maximum(int n) {
  constexpr double kStep = 0.01, kEnd = 8;
  double sum = 0;
  for (double x = kStep / 2; x < kEnd; x += kStep) {
    const double below = 0.5 * std::erfc(-x / std::numbers::sqrt2);
    sum += kStep * (1 - std::pow(below, n) - std::pow(1 - below, n));
  }
  return sum;
}

}  // namespace

Prediction predict_step(const StepCosts& costs, const std::string& text, int64_t bucket_mb,
                        const AllreduceModel& model) {
  const CompressionSpec spec = CompressionSpec::parse(text);
  const auto codec = costs.codec_ns.find(text);
  if (codec == costs.codec_ns.end())
    throw BadInput("{}: its kernels were not measured (StepCosts::codec_ns)", text);
  const std::vector<Bucket> buckets = cut(costs, spec, bucket_mb << 20);
  Prediction out{.spec = text, .bucket_mb = bucket_mb, .buckets = static_cast<int>(buckets.size())};
  double elements = 0;
  for (const Bucket& bucket : buckets) elements += static_cast<double>(bucket.elements);
  out.dense_bytes = 4 * elements;

  int64_t largest = 0;
  double us = 0;
  auto allreduce = [&](int64_t count, Wire wire) {
    if (count == 0 || costs.world == 1) return;
    const AllreduceCost cost = model(count, wire);
    us += cost.us;
    out.sent_bytes += cost.sent_bytes;
    if (count > largest) out.schedule = cost.schedule;
    largest = std::max(largest, count);
  };
  const double forward = costs.compute_ms / 3, backward = costs.compute_ms - forward;
  const auto between = costs.sums.find(text);
  const double sums = between != costs.sums.end() ? between->second : 0;
  const auto fp32 = costs.codec_ns.find(kFp32->name);
  const double aside_ns = fp32 != costs.codec_ns.end() ? fp32->second : codec->second;
  double done = 0, ready = 0, delay = 0;
  double free = 0;  // time at which the reducer's stream becomes idle
  for (const Bucket& bucket : buckets) {
    const double ns = codec->second * static_cast<double>(bucket.elements - bucket.aside) +
                      aside_ns * static_cast<double>(bucket.aside);
    const double kernels = costs.world == 1 ? 0 : ns * 1e-6;
    us = 0;
    allreduce(bucket.whole + bucket.p, spec.wire);
    allreduce(bucket.q, spec.wire);
    allreduce(bucket.aside, kFp32);
    done += static_cast<double>(bucket.elements);
    ready = forward + backward * done / elements + delay;
    const bool during_backward = costs.shared_cores && &bucket != &buckets.back();
    const double busy = (during_backward ? 2 : 1) * kernels;
    free = std::max(free, ready) + busy + us * 1e-3;
    out.kernels_ms += (1 - sums) * busy;
    out.links_ms += sums * busy + us * 1e-3;
    out.codec_ms += kernels;
    out.comm_ms += us * 1e-3;
    if (costs.shared_cores) delay += kernels;
  }
  // `ready` is the end of backward. The last bucket's share of `delay` follows `ready`.
  const double before = static_cast<double>(costs.micro_batches - 1) * costs.compute_ms;
  out.compute_ms = before + ready;
  out.exposed_ms = std::max(0.0, free - ready);
  if (costs.world > 1 && costs.spread.compute != 0) {  // waits for the slowest rank, whose step varies alike
    const double deviation = std::sqrt(static_cast<double>(costs.micro_batches)) * costs.spread.compute;
    out.late_ms = expected_maximum(costs.world) * deviation * costs.compute_ms;
    out.exposed_ms += out.late_ms;
  }
  out.step_ms = out.compute_ms + out.exposed_ms + costs.optimizer_ms;
  if (const auto error = costs.errors.find(text); error != costs.errors.end()) out.error = error->second;
  return out;
}

Prediction predict_step(const StepCosts& costs, const std::string& text, int64_t bucket_mb) {
  const SchedulePlanner planner(CompressionSpec::parse(text), Collective::allreduce, costs.world,
                                costs.ranks_per_node, costs.links, kSliceBytes);
  return predict_step(costs, text, bucket_mb, [&](int64_t count, Wire wire) {
    const SchedulePlanner::Choice choice = planner.choose(count, wire);
    int64_t most = 0;
    for (int rank = 0; rank < costs.world; ++rank) {
      most = std::max(most, elements_sent(choice.schedule, rank, count));
    }
    return AllreduceCost{choice.predicted_us, static_cast<double>(wire->bytes(most)),
                         name(choice.schedule.kind)};
  });
}

void add_interval(const StepCosts& costs, Prediction& prediction) {
  const Prediction& p = prediction;
  double variance = std::pow(kModelDeviation * p.step_ms, 2);
  const auto add = [&](const StepCosts& other) {
    const double change = predict_step(other, p.spec, p.bucket_mb).step_ms - p.step_ms;
    variance += change * change;
  };
  StepCosts other = costs;
  other.compute_ms *= 1 + costs.spread.compute;
  add(other);
  other = costs;
  if (const auto codec = costs.spread.codec.find(p.spec); codec != costs.spread.codec.end()) {
    other.codec_ns.at(p.spec) *= 1 + codec->second;
    add(other);
  }
  other = costs;
  const size_t repeats = costs.spread.links.size();
  double sum = 0, squares = 0;
  for (const LinkCosts& links : costs.spread.links) {
    other.links = links;
    const double ms = predict_step(other, p.spec, p.bucket_mb).step_ms;
    sum += ms, squares += ms * ms;
  }
  if (repeats > 1) {
    const auto n = static_cast<double>(repeats);
    variance += std::max(0.0, squares - sum * sum / n) / (n - 1);
  }
  constexpr double kNinety = 1.645;  // standard deviations on each side that hold 90 % of a normal variable
  const double half = kNinety * std::sqrt(variance);
  prediction.low_ms = std::max(0.0, p.step_ms - half), prediction.high_ms = p.step_ms + half;
}

void copy_kernel_costs(const std::string& base, const std::string& text, StepCosts& costs) {
  for (auto* numbers : {&costs.codec_ns, &costs.sums, &costs.spread.codec}) {
    if (const auto found = numbers->find(base); found != numbers->end()) (*numbers)[text] = found->second;
  }
}

Prediction best_of(const std::vector<Prediction>& tried) {
  auto best = std::ranges::min_element(tried, {}, &Prediction::step_ms);
  const double limit = kDefaultIsAsGood * best->step_ms;
  for (auto it = tried.begin(); it != tried.end(); ++it) {
    if (it->bucket_mb == kDefaultBucketMb && it->step_ms <= limit) best = it;
  }
  return *best;
}

std::vector<std::string> candidate_specs() {
  return {"fp32",
          "bf16",
          "int8",
          "fp8",
          "int4",
          "powersgd:rank=8",
          "powersgd:rank=4",
          "powersgd:rank=2",
          "powersgd:rank=1"};
}

std::vector<int64_t> candidate_bucket_mb(const StepCosts& costs) {
  int64_t bytes = 0;
  for (const GradientTensor& tensor : costs.tensors) bytes += 4 * tensor.count();
  const int64_t all = std::max<int64_t>(1, (bytes + (1 << 20) - 1) >> 20);
  std::vector<int64_t> sizes;
  for (int64_t mb : {int64_t{5}, kDefaultBucketMb, int64_t{100}}) {
    if (mb < all) sizes.push_back(mb);
  }
  sizes.push_back(all);
  return sizes;
}

Recommendation recommend(const StepCosts& costs, const Choices& from) {
  Recommendation out;
  out.from = from;
  const std::vector<int64_t> sizes = from.bucket_mb.empty() ? candidate_bucket_mb(costs) : from.bucket_mb;
  for (const std::string& spec : from.specs) {
    std::vector<Prediction> tried;
    for (int64_t mb : sizes) tried.push_back(predict_step(costs, spec, mb));
    if (out.best.empty()) out.one_bucket = tried.back();
    out.best.push_back(best_of(tried));
    add_interval(costs, out.best.back());
  }
  // Errors that are not numbers come last: the gradients had values that a format cannot represent.
  std::ranges::stable_sort(out.best.begin() + 1, out.best.end(), {}, [](const Prediction& p) {
    return std::isnan(p.error) ? std::numeric_limits<double>::infinity() : p.error;
  });
  std::vector<double> errors, steps;
  for (const Prediction& p : out.best) errors.push_back(p.error), steps.push_back(p.step_ms);
  out.chosen = choose_candidate(errors, steps, from.error, from.tie);
  return out;
}

namespace {

constexpr std::string_view kName = "auto", kError = "error=", kReplanOff = "replan=off",
                           kPlan = "plan=", kAllow = "allow=";

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw BadInput("--compression {}: {}; write {}", text, why, kAutoGrammar);
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
  Choices choices{.bucket_mb = std::move(bucket_mb), .error = error, .tie = kChoiceTie};
  if (allow.empty()) return choices;
  choices.specs = {"fp32"};
  for (const std::string& spec : allow) {
    if (spec != choices.specs[0]) choices.specs.push_back(spec);
  }
  return choices;
}

namespace {

// The share of backward that must suffice: ranks that wait for each other take longer than their messages.
constexpr double kSafety = 0.4;
constexpr int64_t kRunAlignment = 4;  // of the run's reducer (ReducerOptions)

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
    CompressionSpec spec = CompressionSpec::parse(choice.spec);
    const std::vector<std::string> names = name_patterns(all, first);
    spec.dense.insert(spec.dense.end(), names.begin(), names.end());
    const std::string text = CompressionSpec::parse(spec.to_string()).to_string();  // in order
    copy_kernel_costs(choice.spec, text, costs);
    if (first.size() == all.size() || predict_step(costs, text, choice.bucket_mb).step_ms > limit) break;
    best = text;
  }
  return best;
}

}  // namespace gradwire
