#include "trainer/measure/recommend.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "collectives/codec/codec.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr double kWorthIt = 1.1, kDefaultIsAsGood = 1.02;
constexpr int64_t kDefaultBucketMb = 25;

struct Bucket {
  int64_t elements = 0;
  int64_t dense = 0, p = 0, q = 0;  // transmitted floats: uncompressed, and of the factors P and Q
};

// Returns the reducer's buckets, without gaps between tensors.
std::vector<Bucket> cut(const StepCosts& costs, const CompressionSpec& spec, int64_t bucket_bytes) {
  std::vector<Bucket> buckets;
  for (const BucketRange& range : lay_out(costs.tensors, 1, bucket_bytes).buckets) {
    Bucket& bucket = buckets.emplace_back(Bucket{.elements = range.elements()});
    for (int i = range.first_tensor; i < range.last_tensor; ++i) {
      const auto [rows, cols] = matrix_of(costs.tensors[i]);
      using Method = CompressionSpec::Method;
      const bool low_rank = spec.method == Method::powersgd || spec.method == Method::dion;
      const int rank = low_rank ? powersgd_rank(spec, rows, cols) : 0;
      const double share = spec.method == Method::randk ? spec.ratio : 1;
      bucket.dense += rank > 0 ? 0 : std::llround(share * static_cast<double>(rows * cols));
      bucket.p += rows * rank;
      bucket.q += cols * rank;
    }
  }
  return buckets;
}

}  // namespace

Prediction predict_step(const StepCosts& costs, const std::string& text, int64_t bucket_mb,
                        const AllreduceModel& model) {
  const CompressionSpec spec = CompressionSpec::parse(text);
  const auto codec = costs.codec_ns.find(text);
  if (codec == costs.codec_ns.end())
    throw BadInput(fmt::format("{}: its kernels were not measured (StepCosts::codec_ns)", text));
  const std::vector<Bucket> buckets = cut(costs, spec, bucket_mb << 20);
  Prediction out{.spec = text, .bucket_mb = bucket_mb, .buckets = static_cast<int>(buckets.size())};
  double elements = 0;
  for (const Bucket& bucket : buckets) elements += static_cast<double>(bucket.elements);
  out.dense_bytes = 4 * elements;

  int64_t largest = 0;
  double us = 0;
  auto allreduce = [&](int64_t count) {
    if (count == 0 || costs.world == 1) return;
    const AllreduceCost cost = model(count, spec.wire);
    us += cost.us;
    out.sent_bytes += cost.sent_bytes;
    if (count > largest) out.schedule = cost.schedule;
    largest = std::max(largest, count);
  };
  const double forward = costs.compute_ms / 3, backward = costs.compute_ms - forward;
  double done = 0, ready = 0, delay = 0;
  double free = 0;  // time at which the reducer's stream becomes idle
  for (const Bucket& bucket : buckets) {
    const double kernels = costs.world == 1 ? 0 : codec->second * static_cast<double>(bucket.elements) * 1e-6;
    us = 0;
    allreduce(bucket.dense + bucket.p);
    allreduce(bucket.q);
    done += static_cast<double>(bucket.elements);
    ready = forward + backward * done / elements + delay;
    const bool during_backward = costs.shared_cores && &bucket != &buckets.back();
    free = std::max(free, ready) + (during_backward ? 2 : 1) * kernels + us * 1e-3;
    out.codec_ms += kernels;
    out.comm_ms += us * 1e-3;
    if (costs.shared_cores) delay += kernels;
  }
  // `ready` is the end of backward. The last bucket's share of `delay` follows `ready`.
  out.exposed_ms = std::max(0.0, free - ready);
  out.step_ms = std::max(free, ready) + costs.optimizer_ms;
  return out;
}

Prediction predict_step(const StepCosts& costs, const std::string& text, int64_t bucket_mb) {
  const SchedulePlanner planner(schedule_request(CompressionSpec::parse(text)), costs.world,
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

Prediction best_of(const std::vector<Prediction>& tried) {
  auto best = std::min_element(tried.begin(), tried.end(), [](const Prediction& a, const Prediction& b) {
    return a.step_ms < b.step_ms;
  });
  const double limit = kDefaultIsAsGood * best->step_ms;
  for (auto it = tried.begin(); it != tried.end(); ++it) {
    if (it->bucket_mb == kDefaultBucketMb && it->step_ms <= limit) best = it;
  }
  return *best;
}

std::vector<std::string> candidate_specs() {
  return {"fp32", "bf16", "fp8", "powersgd:rank=8", "powersgd:rank=4", "powersgd:rank=2", "powersgd:rank=1"};
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

Recommendation recommend(const StepCosts& costs) {
  Recommendation out;
  const std::vector<int64_t> sizes = candidate_bucket_mb(costs);
  for (const std::string& spec : candidate_specs()) {
    std::vector<Prediction> tried;
    for (int64_t mb : sizes) tried.push_back(predict_step(costs, spec, mb));
    if (out.best.empty()) out.one_bucket = tried.back();
    out.best.push_back(best_of(tried));
  }
  double fastest = out.best[0].step_ms;
  for (const Prediction& p : out.best) fastest = std::min(fastest, p.step_ms);
  while (out.best[out.chosen].step_ms > kWorthIt * fastest) ++out.chosen;
  return out;
}

}  // namespace gradwire
