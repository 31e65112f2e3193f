#include "bench/cases/collective_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/codec/pipeline.h"
#include "collectives/reducer/buckets.h"
#include "kernels/math/random.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::bench {
namespace {

constexpr int64_t kGrain = 1 << 16;

// Returns `count` floats shaped like the gradients of a transformer's layers: matrices of up to 3072 x 768,
// and the rest as a vector.
std::vector<GradientTensor> tensors_of(int64_t count) {
  const auto cols = std::min<int64_t>(768, static_cast<int64_t>(std::sqrt(static_cast<double>(count))));
  std::vector<GradientTensor> tensors;
  int64_t done = 0;
  auto add = [&](int64_t rows, int64_t columns) {
    tensors.push_back({fmt::format("t{}", tensors.size()), {rows, columns}});
    done += rows * columns;
  };
  while (cols > 1 && count - done >= cols) add(std::min<int64_t>(3072, (count - done) / cols), cols);
  if (done < count) add(count - done, 1);
  return tensors;
}

// Returns whether every block of integers from -most to `most` decodes to the same integers.
bool represents_integers(Wire wire, int most) {
  if (wire->exact) return true;
  std::vector<float> values(static_cast<size_t>(2 * wire->granularity)), decoded(values.size());
  std::vector<std::byte> bytes(static_cast<size_t>(wire->bytes(static_cast<int64_t>(values.size()))));
  for (int largest = 1; largest <= most; ++largest) {
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(static_cast<int>(i % static_cast<size_t>(2 * largest + 1)) - largest);
    }
    ReduceEncode encode;
    encode.own = values.data();
    encode.wire = bytes.data();
    encode.count = static_cast<int64_t>(values.size());
    encode.rounding.mode = Rounding::nearest;
    wire->reference_reduce_encode(encode);
    wire->reference_decode({.wire = bytes.data(), .out = decoded.data(), .count = encode.count});
    if (decoded != values) return false;
  }
  return true;
}

}  // namespace

// A pipeline with its step counter and workspace, as the reducer holds them for one bucket.
class CollectiveRank::Bucket {
 public:
  Bucket(CollectiveRank& rank, const CollectiveCase& c)
      : stream_(rank.stream), step_(make_buffer<uint64_t>(rank.comm_.device(), 1)) {
    fill_zero(stream_, step_.data(), step_.bytes());
    const int world = rank.comm_.world();
    const std::vector<GradientTensor> tensors = tensors_of(c.size_bytes / 4);
    const GradientLayout layout = lay_out(tensors, 1, kOneBucket);
    const BucketRange all{.last_tensor = static_cast<int>(tensors.size()), .end = layout.elements};
    BucketContext context =
        bucket_context(rank.comm_, c.spec, stream_, tensors, layout, all, rank.data(), "the benchmark");
    context.step = step_.as<const uint64_t>();
    context.schedule =
        make_schedule(c.spec.schedule, world, {.nodes = 0, .per_node = rank.settings_.per_node});
    context.slice_bytes = static_cast<int64_t>(rank.settings_.slice_bytes);
    if (context.slice_bytes > 0) context.transfers = rank.comm_.transfers();
    fp32_bytes =
        4.0 * static_cast<double>(elements_sent(context.schedule, rank.comm_.rank(), context.elements));
    pipeline_.emplace(context);
    workspace_ = Buffer(rank.comm_.device(), pipeline_->workspace_bytes());
    pipeline_->bind(workspace_.data());
  }
  void run() {
    BucketPhases no_phases;
    pipeline_->run(stream_, steps_++, no_phases);
    increment(stream_, step_.as<uint64_t>());
  }

  double fp32_bytes = 0;  // that this rank sends in a step without compression

 private:
  Stream stream_;
  Buffer step_, workspace_;
  std::optional<BucketPipeline> pipeline_;
  int64_t steps_ = 0;
};

CollectiveRank::CollectiveRank(Communicator& comm, const CollectiveSettings& settings)
    : stream(Stream::create(comm.device(), "bench")), comm_(comm), settings_(settings) {}

float CollectiveRank::value(Values kind, int rank, int64_t i) const {
  const auto seed = static_cast<uint64_t>(rank) + 1, counter = static_cast<uint64_t>(i);
  if (kind == Values::normal) return rough_normal(philox(seed, 0, counter));
  // -1, 0 or 1, and at most 15 ranks are nonzero. So no partial sum exceeds 15, and BF16 and FP8 represent
  // every sum exactly.
  if ((i + rank) % comm_.world() >= 15) return 0.0f;
  uint64_t mixed = (counter * 0x9e3779b97f4a7c15ull + seed) * 0xff51afd7ed558ccdull;
  return static_cast<float>(static_cast<int>((mixed >> 33) % 3) - 1);
}

void CollectiveRank::fill(Values kind, int64_t count) {
  const int64_t all = count + settings_.unalign;
  if (static_cast<int64_t>(data_.bytes()) < 4 * all) data_ = make_buffer<float>(comm_.device(), all);
  std::vector<float> values(static_cast<size_t>(count));
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = value(kind, comm_.rank(), i);
  });
  to_device(stream, data(), std::span<const float>(values));
}

const std::vector<double>& CollectiveRank::exact_means(Values kind, int64_t count) {
  if (means_kind_ == kind && static_cast<int64_t>(means_.size()) == count) return means_;
  means_.assign(static_cast<size_t>(count), 0.0);
  means_kind_ = kind;
  const float scale = 1.0f / static_cast<float>(comm_.world());
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int r = 0; r < comm_.world(); ++r) sum += value(kind, r, i);
      // Integers are compared bit for bit, so their mean is rounded as the contract specifies: once, in FP32.
      means_[i] = kind == Values::integers ? static_cast<float>(sum) * scale : sum / comm_.world();
    }
  });
  return means_;
}

// Checks the first step's results for normally distributed values and, if the format represents integers
// exactly, for integers.
void CollectiveRank::check_results(const CollectiveCase& c, Measured& mine) {
  const int64_t count = c.size_bytes / 4;
  auto result_of_first_step = [&](Values kind) {
    fill(kind, count);
    Bucket bucket(*this, c);
    bucket.run();
    return to_host(stream, static_cast<const float*>(data()), count);
  };
  const std::vector<float> result = result_of_first_step(Values::normal);
  mine.hash = 0xcbf29ce484222325ull;
  for (float each : result) mine.hash = (mine.hash ^ std::bit_cast<uint32_t>(each)) * 0x100000001b3ull;
  const std::vector<double>& means = exact_means(Values::normal, count);
  for (int64_t i = 0; i < count; ++i) {
    const double difference = result[i] - means[i];
    mine.error2 += difference * difference;
    mine.norm2 += means[i] * means[i];
    mine.wrong += std::isfinite(result[i]) ? 0 : 1;
  }
  const bool exact = c.spec.method == CompressionSpec::Method::wire &&
                     represents_integers(c.spec.wire, std::min(15, comm_.world()));
  if (!exact) return;
  const std::vector<float> integers = result_of_first_step(Values::integers);
  const std::vector<double>& mean_integers = exact_means(Values::integers, count);
  for (int64_t i = 0; i < count; ++i)
    mine.wrong += integers[i] == static_cast<float>(mean_integers[i]) ? 0 : 1;
}

double CollectiveSettings::average_of(const std::vector<double>& ranks_us) const {
  if (average == 0) return ranks_us[0];
  if (average == 1)
    return std::accumulate(ranks_us.begin(), ranks_us.end(), 0.0) / static_cast<double>(ranks_us.size());
  const auto [least, most] = std::minmax_element(ranks_us.begin(), ranks_us.end());
  return average == 2 ? *least : *most;
}

std::vector<double> CollectiveRank::run_iterations(Bucket& bucket, Measured& mine) {
  using Clock = std::chrono::steady_clock;
  // An iteration ends where the next begins, or before the barrier if that is not timed.
  const bool paired = settings_.blocking == 3, barrier = paired || settings_.blocking == 1;
  const auto n = static_cast<size_t>(settings_.iterations);
  std::vector<Event> begins(n + 1), ends(paired ? n : 0);
  for (Event& event : begins) event = Event::create_timer(comm_.device());
  for (Event& event : ends) event = Event::create_timer(comm_.device());
  std::chrono::duration<double, std::micro> in_barriers{};
  const auto start = Clock::now();
  for (size_t i = 0; i < n; ++i) {
    begins[i].record(stream);
    bucket.run();
    if (paired) ends[i].record(stream);
    if (settings_.blocking != 0) stream.synchronize();
    if (!barrier) continue;
    const auto done = Clock::now();
    comm_.barrier();
    if (paired) in_barriers += Clock::now() - done;
  }
  begins[n].record(stream);
  stream.synchronize();
  mine.time_us = (std::chrono::duration<double, std::micro>(Clock::now() - start) - in_barriers).count() /
                 settings_.iterations;
  std::vector<double> times_us;
  for (size_t i = 0; i < n; ++i) {
    times_us.push_back(1e3 * elapsed_ms(begins[i], paired ? ends[i] : begins[i + 1]));
  }
  return times_us;
}

CollectiveResult CollectiveRank::run_case(const CollectiveCase& c) {
  Measured mine{};
  const int64_t count = c.size_bytes / 4;
  if (settings_.check != 0) check_results(c, mine);
  fill(Values::normal, count);
  Bucket bucket(*this, c);
  for (int i = 0; i < settings_.warmup; ++i) bucket.run();
  stream.synchronize();
  comm_.barrier();
  const uint64_t sent_before = comm_.bytes_sent();
  const std::vector<double> times_us = run_iterations(bucket, mine);
  mine.wire_bytes = static_cast<double>(comm_.bytes_sent() - sent_before) / settings_.iterations;
  mine.fp32_bytes = bucket.fp32_bytes;

  CollectiveResult all;
  const std::vector<Measured> ranks =
      all_gather_value(comm_.transport(), stream, mine, "results of the benchmark");
  std::vector<double> ranks_us;
  for (const Measured& r : ranks) {
    ranks_us.push_back(r.time_us);
    all.wire_bytes = std::max(all.wire_bytes, r.wire_bytes);
    all.fp32_bytes = std::max(all.fp32_bytes, r.fp32_bytes);
    all.wrong += r.wrong;
    // If a rank's bits differ from rank 0's, all its elements count as wrong.
    if (r.hash != ranks[0].hash) all.wrong += static_cast<double>(count);
    all.rel_error = std::max(all.rel_error, std::sqrt(r.error2 / std::max(r.norm2, 1e-300)));
  }
  all.time_us = settings_.average_of(ranks_us);
  all.times_us = all_gather(comm_.transport(), stream, times_us, "times of the benchmark");
  return all;
}

}  // namespace gradwire::bench
