#include "bench/cases/collective_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/codec/codec.h"
#include "collectives/reducer/buckets.h"
#include "kernels/math/random.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "trainer/model/parameters.h"

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

uint64_t hash_of(const std::vector<float>& values) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 0x100000001b3ull;
  }
  return hash;
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

// A codec with its step counter and workspace, as the reducer holds them for one bucket.
class CollectiveRank::Program {
 public:
  Program(CollectiveRank& rank, const CollectiveCase& c)
      : stream_(rank.stream_), step_(make_buffer<uint64_t>(rank.comm_.device(), 1)) {
    fill_zero(stream_, step_.data(), step_.bytes());
    const int world = rank.comm_.world();
    const std::vector<GradientTensor> tensors = tensors_of(c.size_bytes / 4);
    const GradientLayout layout = lay_out(tensors, 1, kOneBucket);
    const BucketRange all{.last_tensor = static_cast<int>(tensors.size()), .end = layout.elements};
    BucketContext context = bucket_context({.comm = rank.comm_,
                                            .spec = c.spec,
                                            .stream = stream_,
                                            .step = step_.as<const uint64_t>(),
                                            .gradients = rank.data()},
                                           tensors, layout, all, "the benchmark");
    context.schedule =
        make_schedule(c.spec.schedule, world, {.nodes = 0, .per_node = rank.settings_.per_node});
    if (rank.settings_.slice_bytes > 0) context.transfers = rank.comm_.transfers();
    context.slice_bytes = rank.settings_.slice_bytes;
    fp32_bytes_ =
        4.0 * static_cast<double>(elements_sent(context.schedule, rank.comm_.rank(), context.elements));
    codec_ = make_codec(context);
    workspace_ = Buffer(rank.comm_.device(), codec_->workspace_bytes());
    codec_->bind(workspace_.data());
  }
  void run() {
    codec_->run(stream_, steps_++);
    increment(stream_, step_.as<uint64_t>());
  }
  double fp32_bytes() const { return fp32_bytes_; }

 private:
  Stream stream_;
  Buffer step_, workspace_;
  std::unique_ptr<Codec> codec_;
  int64_t steps_ = 0;
  double fp32_bytes_ = 0;
};

CollectiveRank::CollectiveRank(Communicator& comm, const CollectiveSettings& settings)
    : comm_(comm), settings_(settings), stream_(Stream::create(comm.device(), "bench")) {}

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
  to_device(stream_, data(), std::span<const float>(values));
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
    Program program(*this, c);
    program.run();
    return to_host(stream_, static_cast<const float*>(data()), count);
  };
  const std::vector<float> result = result_of_first_step(Values::normal);
  mine.hash = hash_of(result);
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

double average_of(const std::vector<double>& ranks_us, Average average) {
  switch (average) {
    case Average::rank0:
      return ranks_us[0];
    case Average::mean:
      return std::accumulate(ranks_us.begin(), ranks_us.end(), 0.0) / static_cast<double>(ranks_us.size());
    case Average::min:
      return *std::min_element(ranks_us.begin(), ranks_us.end());
    case Average::max:
      break;
  }
  return *std::max_element(ranks_us.begin(), ranks_us.end());
}

std::vector<double> CollectiveRank::run_iterations(Program& program, Measured& mine) {
  using Clock = std::chrono::steady_clock;
  const bool barrier =
      settings_.blocking == Blocking::timed_barrier || settings_.blocking == Blocking::untimed_barrier;
  // An iteration ends where the next begins, or before the barrier if that is not timed.
  const bool paired = settings_.blocking == Blocking::untimed_barrier;
  const auto n = static_cast<size_t>(settings_.iterations);
  std::vector<Event> begins(n + 1), ends(paired ? n : 0);
  for (Event& event : begins) event = Event::create_timer(comm_.device());
  for (Event& event : ends) event = Event::create_timer(comm_.device());
  std::chrono::duration<double, std::micro> in_barriers{};
  const auto start = Clock::now();
  for (size_t i = 0; i < n; ++i) {
    begins[i].record(stream_);
    program.run();
    if (paired) ends[i].record(stream_);
    if (settings_.blocking != Blocking::none) stream_.synchronize();
    if (!barrier) continue;
    const auto done = Clock::now();
    comm_.barrier();
    if (paired) in_barriers += Clock::now() - done;
  }
  begins[n].record(stream_);
  stream_.synchronize();
  mine.time_us = (std::chrono::duration<double, std::micro>(Clock::now() - start) - in_barriers).count() /
                 settings_.iterations;
  std::vector<double> times_us;
  for (size_t i = 0; i < n; ++i) {
    times_us.push_back(1e3 * elapsed_ms(begins[i], paired ? ends[i] : begins[i + 1]));
  }
  return times_us;
}

CollectiveResult CollectiveRank::run(const CollectiveCase& c) {
  Measured mine{};
  const int64_t count = c.size_bytes / 4;
  if (settings_.check) check_results(c, mine);
  fill(Values::normal, count);
  Program program(*this, c);
  for (int i = 0; i < settings_.warmup; ++i) program.run();
  stream_.synchronize();
  comm_.barrier();
  const uint64_t sent_before = comm_.bytes_sent();
  const std::vector<double> times_us = run_iterations(program, mine);
  mine.wire_bytes = static_cast<double>(comm_.bytes_sent() - sent_before) / settings_.iterations;
  mine.fp32_bytes = program.fp32_bytes();

  CollectiveResult all;
  const std::vector<Measured> ranks =
      all_gather_value(comm_.transport(), stream_, mine, "results of the benchmark");
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
  all.time_us = average_of(ranks_us, settings_.average);
  all.times_us = all_gather(comm_.transport(), stream_, times_us, "times of the benchmark");
  return all;
}

namespace {

// Encodes and decodes one row repeatedly. Each draw uses a different step.
class RoundTrip {
 public:
  RoundTrip(const CompressionSpec& spec, const std::vector<float>& values, uint64_t seed)
      : spec_(spec),
        values_(values),
        seed_(seed),
        wire_(Device::host(), static_cast<size_t>(spec.wire->bytes(count()))),
        decoded_(values.size()) {}

  const std::vector<float>& draw(uint64_t step) {
    if (spec_.wire->exact) return values_;
    spec_.wire->reduce_encode(stream_, {.own = values_.data(),
                                        .wire = wire_.data(),
                                        .count = count(),
                                        .rounding = {.mode = spec_.rounding, .seed = seed_, .step = &step}});
    spec_.wire->decode(stream_, {.wire = wire_.data(), .out = decoded_.data(), .count = count()});
    return decoded_;
  }

 private:
  int64_t count() const { return static_cast<int64_t>(values_.size()); }

  const CompressionSpec& spec_;
  const std::vector<float>& values_;
  uint64_t seed_;
  Stream stream_ = Stream::immediate_host();
  Buffer wire_;
  std::vector<float> decoded_;
};

// Adds the errors to `sums`. Returns their squared norm.
double add_errors(const std::vector<float>& decoded, const std::vector<float>& values,
                  std::vector<double>& sums) {
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double error = static_cast<double>(decoded[i]) - values[i];
    sums[i] += error;
    squares += error * error;
  }
  return squares;
}

RowError row_error(const CompressionSpec& spec, const Row& row, int draws, uint64_t seed) {
  RoundTrip trip(spec, row.values, seed);
  std::vector<double> sums(row.values.size());
  const std::vector<float> first = trip.draw(0);
  double squares = add_errors(first, row.values, sums);
  RowError result{.error = squares / row.squared_norm};
  const auto count = static_cast<int64_t>(row.values.size());
  result.bytes_per_element = static_cast<double>(spec.wire->bytes(count)) / static_cast<double>(count);
  const std::vector<float>& second = trip.draw(1);
  if (std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) == 0) {
    result.bias = std::sqrt(result.error);
    return result;
  }
  result.random = true;
  squares += add_errors(second, row.values, sums);
  for (int k = 2; k < draws; ++k)
    squares += add_errors(trip.draw(static_cast<uint64_t>(k)), row.values, sums);
  double of_mean = 0;
  for (double sum : sums) of_mean += sum * sum / draws / draws;
  // E |mean error|^2 = |bias|^2 + variance / draws. `noise` is an unbiased estimate of the second term.
  const double noise = std::max(0.0, squares / draws - of_mean) / (draws - 1);
  result.bias = std::sqrt(of_mean / row.squared_norm);
  result.by_chance = std::sqrt(noise / row.squared_norm);
  return result;
}

}  // namespace

RowSetError round_trip_error(const CompressionSpec& spec, const RowSet& set, int draws, uint64_t seed) {
  RowSetError all;
  double norms = 0, elements = 0, bias = 0, by_chance = 0;
  for (const Row& row : set.rows) {
    const RowError e = row_error(spec, row, draws, seed);
    const auto count = static_cast<double>(row.values.size());
    norms += row.squared_norm;
    elements += count;
    all.mean += e.error / static_cast<double>(set.rows.size());
    all.total += e.error * row.squared_norm;
    bias += e.bias * e.bias * row.squared_norm;
    by_chance += e.by_chance * e.by_chance * row.squared_norm;
    all.random = all.random || e.random;
    all.bytes_per_element += e.bytes_per_element * count;
    all.rows.push_back(e);
    if (e.error > all.rows[all.worst].error) all.worst = all.rows.size() - 1;
  }
  all.total /= norms;
  all.bias = std::sqrt(bias / norms);
  all.by_chance = std::sqrt(by_chance / norms);
  all.bytes_per_element /= elements;
  double spread = 0;
  for (const RowError& e : all.rows) spread += (e.error - all.mean) * (e.error - all.mean);
  const auto rows = static_cast<double>(all.rows.size());
  all.standard_error =
      rows < 2 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(spread / (rows - 1) / rows);
  return all;
}

namespace {

// Returns torchvision's ResNets (He et al., arXiv 1512.03385): basic blocks for 18, bottlenecks for 50.
std::vector<GradientTensor> resnet(bool bottleneck, const std::vector<int>& blocks) {
  std::vector<GradientTensor> all;
  auto conv = [&](const std::string& name, int64_t out, int64_t in, int64_t side) {
    all.push_back({name + ".weight", {out, in, side, side}});
  };
  auto norm = [&](const std::string& name, int64_t width) {
    all.push_back({name + ".weight", {width}});
    all.push_back({name + ".bias", {width}});
  };
  conv("conv1", 64, 3, 7);
  norm("bn1", 64);
  const int64_t expansion = bottleneck ? 4 : 1;
  int64_t in = 64, width = 64;
  for (size_t stage = 0; stage < blocks.size(); ++stage, width *= 2) {
    for (int b = 0; b < blocks[stage]; ++b) {
      const std::string at = fmt::format("layer{}.{}.", stage + 1, b);
      int64_t out = width * expansion;
      if (bottleneck) {
        conv(at + "conv1", width, in, 1);
        norm(at + "bn1", width);
        conv(at + "conv2", width, width, 3);
        norm(at + "bn2", width);
        conv(at + "conv3", out, width, 1);
        norm(at + "bn3", out);
      } else {
        conv(at + "conv1", width, in, 3);
        norm(at + "bn1", width);
        conv(at + "conv2", width, width, 3);
        norm(at + "bn2", width);
      }
      if (in != out || (stage > 0 && b == 0)) {
        conv(at + "downsample.0", out, in, 1);
        norm(at + "downsample.1", out);
      }
      in = out;
    }
  }
  all.push_back({"fc.weight", {1000, in}});
  all.push_back({"fc.bias", {1000}});
  std::reverse(all.begin(), all.end());
  return all;
}

}  // namespace

std::vector<GradientTensor> gradients_of(const std::string& model) {
  if (model == "resnet18") return resnet(false, {2, 2, 2, 2});
  if (model == "resnet50") return resnet(true, {3, 4, 6, 3});
  std::vector<std::string> vits = model_names();
  if (std::find(vits.begin(), vits.end(), model) == vits.end()) {
    throw BadInput(
        fmt::format("--model '{}' is unknown; use resnet18, resnet50, {}", model, fmt::join(vits, ", ")));
  }
  std::vector<GradientTensor> all;
  for (const VitParameter& p : vit_parameters(named_model(model))) all.push_back({p.name, p.shape});
  return all;
}

int64_t elements_of(const std::vector<GradientTensor>& tensors) {
  int64_t count = 0;
  for (const GradientTensor& t : tensors) count += t.count();
  return count;
}

}  // namespace gradwire::bench
