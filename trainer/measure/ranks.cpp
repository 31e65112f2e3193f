#include "trainer/measure/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>

#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/transport/transport.h"
#include "kernels/math/random.h"
#include "runtime/device/device.h"
#include "trainer/log/console.h"
#include "trainer/log/summary.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/recommend.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

constexpr double kProbeMs = 150;  // about the time of a forward and backward of the probe model on the host
constexpr double kProbeBudgetMs = 700, kCodecBudgetMs = 150;
constexpr double kOptimizerBytes = 28;  // AdamW reads four floats per parameter and writes three

// A transport whose exchanges return immediately and transfer nothing, so that only a codec's kernels take
// time.
class SilentTransport final : public PlannedTransport {
 public:
  using PlannedTransport::PlannedTransport;
  void exchange(const Stream&, const std::vector<Transfer>&, const ExchangeLabel&) override {}
  void allreduce(const Stream&, const float*, float*, int64_t, bool, uint64_t, const std::string&) override {}
  void barrier() override {}
};

std::vector<float> random_floats(int64_t count, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); i += 4) {
    const Random4 bits = philox(1, 0x444f'0001, i / 4);
    for (size_t k = 0; k < 4 && i + k < values.size(); ++k) {
      values[i + k] = scale * (2 * uniform01(bits.v[k]) - 1);
    }
  }
  return values;
}

// Times forward and backward of a model on synthetic images.
Timing time_training(const Stream& stream, const VitConfig& model, int64_t batch, Precision precision,
                     double budget_ms) {
  const std::vector<VitParameter> parameters = vit_parameters(model);
  const ParameterLayout layout = packed_layout(parameters);
  Vit vit(model, stream, layout,
          {.max_batch = batch,
           .precision = precision,
           .groups = {.layers = stream.device().is_host() ? 1 : GradientGroups::kMax, .awaited = false}});
  vit.load(random_floats(layout.elements, 0.05f));
  const int64_t pixels = batch * model.channels * model.image * model.image;
  const Buffer images = make_buffer<float>(stream.device(), pixels);
  to_device<float>(stream, images.as<float>(), random_floats(pixels, 1));
  const Buffer labels = make_buffer<int32_t>(stream.device(), batch);
  const Buffer totals = make_buffer<double>(stream.device(), 2);
  const Buffer gradients = make_buffer<float>(stream.device(), layout.elements);
  fill_zero(stream, labels.data(), labels.bytes());
  const Timing timing = time_runs(
      stream,
      [&] {
        vit.forward(images.as<float>(), batch);
        vit.backward(labels.as<int32_t>(), totals.as<double>(), 1.0f, gradients.as<float>(), false, {});
      },
      budget_ms);
  stream.synchronize();
  return timing;
}

// The measured times of one rank. Structs of doubles, which ranks exchange.
struct CodecTime {
  double ns = 0;         // kernel time per element
  double deviation = 0;  // as in Timing
  double sums = 0;       // the share of the time that lies between exchanges
};
struct RankSpeed {
  double tflops = 0, deviation = 0, optimizer_ms = 0;
};

// Measures a codec's kernels. Its exchanges take no time.
CodecTime time_codec(const Stream& stream, const std::string& text,
                     const std::vector<GradientTensor>& tensors, const Communicator& group,
                     const LinkCosts& links, double budget_ms) {
  Communicator comm(std::make_unique<SilentTransport>(0, group.world(), stream.device()));
  if (group.ranks_per_node() > 0) comm.set_ranks_per_node(group.ranks_per_node());
  comm.set_link_costs(links);
  CompressionSpec spec = CompressionSpec::parse(text);
  // predict_step() counts dense tensors by themselves.
  std::erase_if(spec.dense, [](const std::string& name) { return name != kDenseAuto; });
  Reducer reducer(comm, spec, tensors, {.bucket_bytes = int64_t{1} << 40});
  to_device<float>(stream, reducer.gradients().as<float>(), random_floats(reducer.elements(), 1e-3f));
  const Timing timing = time_runs(
      stream,
      [&] {
        for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
        reducer.wait(stream);
      },
      budget_ms);
  const ReducerStats last = reducer.stats(reducer.steps() - 1);
  const double all = last.compress_ms + last.communicate_ms + last.decompress_ms;
  return {timing.mean_ms * 1e6 / static_cast<double>(reducer.elements()), timing.deviation,
          all > 0 ? last.communicate_ms / all : 0};
}

// Measures the training speed and the codecs of all ranks concurrently, as in training. Uses means, not
// minima: the fastest run may have had the machine to itself. The slowest rank's numbers count.
void measure_speeds(Communicator& comm, const Stream& stream, const TrainConfig& config,
                    const Examination& what, RanksReport& report) {
  comm.barrier();
  const double budget_ms = what.patience * kProbeBudgetMs;
  const auto [timing, optimizer_ms] =
      what.compute
          ? what.compute(stream, budget_ms)
          : std::pair(time_training(stream, report.probe, report.probe_batch, config.precision, budget_ms),
                      0.0);
  const double flops = training_flops_per_image(report.probe) * static_cast<double>(report.probe_batch);
  const RankSpeed mine{flops / (timing.mean_ms * 1e9), timing.deviation, optimizer_ms};
  const std::vector<std::string>& specs = what.choices.specs;
  std::vector<GradientTensor> bucket = what.bucket;
  for (const VitParameter& p : vit_parameters(config.model)) {  // the gradients of one layer, as a sample
    if (what.bucket.empty() && p.name.find("encoder_layer_0.") != std::string::npos)
      bucket.push_back({p.name, p.shape});
  }
  std::vector<CodecTime> codecs(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    comm.barrier();
    if (comm.world() == 1) continue;
    codecs[i] = time_codec(stream, specs[i], bucket, comm, report.links, what.patience * kCodecBudgetMs);
  }
  StepCosts& costs = report.costs;
  const auto speeds = all_gather_value(comm.transport(), stream, mine, "speed of each rank");
  const RankSpeed slowest = *std::ranges::min_element(speeds, {}, &RankSpeed::tflops);
  report.rank_tflops = slowest.tflops;
  costs.spread.compute = slowest.deviation;
  costs.optimizer_ms = std::ranges::max(speeds, {}, &RankSpeed::optimizer_ms).optimizer_ms;
  const auto all = all_gather(comm.transport(), stream, codecs, "each rank's kernels");
  for (size_t i = 0; i < specs.size(); ++i) {
    CodecTime worst;
    for (const auto& rank : all) {
      if (rank[i].ns >= worst.ns) worst = rank[i];
    }
    costs.codec_ns[specs[i]] = worst.ns;
    costs.spread.codec[specs[i]] = worst.deviation;
    costs.sums[specs[i]] = worst.sums;
  }
}

// Measures the errors of one encode on rank 0.
void measure_errors(Communicator& comm, const Stream& stream, const Examination& what,
                    const std::vector<std::string>& specs, StepCosts& costs) {
  std::vector<double> errors(specs.size());
  for (size_t i = 0; i < errors.size(); ++i) {
    if (comm.rank() == 0) errors[i] = what.error(specs[i]);
    comm.barrier();  // a deadline for each spec: the other ranks wait for rank 0
  }
  const auto seen = all_gather(comm.transport(), stream, errors, "rank 0's errors");
  for (size_t i = 0; i < specs.size(); ++i) costs.errors[specs[i]] = seen[0][i];
}

// Chooses, in place of the chosen spec, the same spec with the buckets in FP32 that backward hides.
void choose_dense_buckets(Communicator& comm, const Stream& stream, const Examination& what,
                          RanksReport& report) {
  Recommendation& r = report.recommendation;
  if (!r.compress()) return;
  const Prediction base = r.best[r.chosen];
  const std::string text = with_dense_buckets(report.costs, base);
  if (text.empty() || std::ranges::find(r.best, text, &Prediction::spec) != r.best.end()) return;
  copy_kernel_costs(base.spec, text, report.costs);
  measure_errors(comm, stream, what, {text}, report.costs);
  Prediction better = predict_step(report.costs, text, base.bucket_mb);
  if (!(better.error < base.error)) return;
  add_interval(report.costs, better);
  r.best.insert(r.best.begin() + static_cast<std::ptrdiff_t>(r.chosen), better);
}

// Measures the links, up to `repeats` times if that takes less than about three seconds. Then the median by
// throughput counts.
void measure_links(Communicator& comm, const Stream& stream, int repeats, RanksReport& report) {
  constexpr double kMaxSeconds = 1;
  constexpr std::chrono::milliseconds kLimit(2000);
  std::vector<LinkCosts> all;
  const auto start = std::chrono::steady_clock::now();
  double taken = 0;  // by the slowest rank, so that all ranks repeat alike
  while (static_cast<int>(all.size()) < repeats && taken < kMaxSeconds) {
    comm.barrier();
    all.push_back(measure_link_costs(comm.transport(), stream, comm.ranks_per_node(), kLimit));
    const std::chrono::duration<double> mine = std::chrono::steady_clock::now() - start;
    const auto times =
        all_gather_value(comm.transport(), stream, mine.count(), "time of measuring the links");
    taken = *std::ranges::max_element(times);
  }
  std::ranges::sort(all, {}, [](const LinkCosts& costs) { return costs.all_pairs.bytes_per_us; });
  report.links = all[all.size() / 2];
  report.costs.spread.links = std::move(all);
}

// Computes the costs of a step from the measurements.
void fill_costs(const Communicator& comm, const TrainConfig& config, int sharing, RanksReport& report) {
  StepCosts& costs = report.costs;
  const std::vector<VitParameter> parameters = vit_parameters(config.model);
  for (const VitParameter& p : parameters) costs.tensors.push_back({p.name, p.shape});
  report.parameters = count_elements(parameters);
  costs.world = comm.world();
  costs.ranks_per_node = comm.ranks_per_node();
  costs.links = report.links;
  costs.compute_ms =
      report.flops_per_image * static_cast<double>(report.batch_size) / (report.rank_tflops * 1e9);
  if (costs.optimizer_ms == 0) {
    report.optimizer_bytes = kOptimizerBytes * static_cast<double>(report.parameters);
    costs.optimizer_ms = report.optimizer_bytes * sharing / (report.peaks.copy_gb_per_s * 1e6);
  }
  costs.micro_batches = config.accumulate;
  costs.shared_cores = comm.device().is_host();
}

}  // namespace

RanksReport examine_ranks(Communicator& comm, const TrainConfig& config, const Examination& what) {
  RanksReport report;
  report.world = comm.world();
  report.transport = comm.transport().name();
  report.link = config.link;
  report.batch_size = config.batch_size;
  report.flops_per_image = training_flops_per_image(config.model);
  // Ranks on rank 0's device. Processes share no device, or share_cores() has divided the cores.
  const auto sharing = config.processes
                           ? 1
                           : static_cast<int>(std::count(config.devices.begin(), config.devices.end(),
                                                         config.devices.front()));
  const Stream stream = Stream::create(comm.device(), "doctor");

  constexpr int kLinkRepeats = 3;
  measure_links(comm, stream, what.compute ? kLinkRepeats : 1, report);
  if (comm.world() > 1 && comm.world() <= kPairRanks && !what.compute)
    report.pairs = measure_pairs(comm, stream, report.links);
  comm.barrier();
  if (comm.rank() == 0) report.peaks = measure_peaks(comm.device(), config.precision);
  const auto peaks = all_gather(comm.transport(), stream, {report.peaks.tflops, report.peaks.copy_gb_per_s},
                                "peaks of rank 0's device");
  report.peaks.tflops = peaks[0][0], report.peaks.copy_gb_per_s = peaks[0][1];

  report.probe = config.model;
  report.probe_batch = config.batch_size;
  if (!what.compute) {
    report.probe.depth = std::min(config.model.depth, 2);
    if (comm.device().is_host()) {
      const double share = report.peaks.tflops / sharing;  // a rank's share of the cores
      const double images = kProbeMs * share * 1e9 / training_flops_per_image(report.probe);
      report.probe_batch = std::clamp<int64_t>(std::llround(images), 1, config.batch_size);
    }
  }
  measure_speeds(comm, stream, config, what, report);
  if (what.error) measure_errors(comm, stream, what, what.choices.specs, report.costs);
  fill_costs(comm, config, sharing, report);
  report.recommendation = recommend(report.costs, what.choices);
  if (what.error) choose_dense_buckets(comm, stream, what, report);
  return report;
}

RanksReport examine_group(const TrainConfig& config, Communicator* comm,
                          const std::function<RanksReport(Communicator&)>& examine) {
  if (comm != nullptr) {
    if (config.ranks_per_node > 0) {
      comm->set_ranks_per_node(config.ranks_per_node);
    } else {
      comm->agree_on_ranks_per_node(config.ranks_here);
    }
    return examine(*comm);
  }
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(config.timeout_s * 1e3));
  const auto group = create_local_ranks(config.devices, timeout, config.link);
  for (const auto& rank : group) rank->set_ranks_per_node(config.ranks_per_node);
  RanksReport report;
  run_local_ranks(group, [&](Communicator& mine) {
    RanksReport seen = examine(mine);
    if (mine.rank() == 0) report = std::move(seen);
  });
  return report;
}

// The report of examine_ranks() as text.

namespace {

std::string number(double value, int digits = 3) {
  if (!std::isfinite(value)) return "-";
  if (std::abs(value) >= 1000) return human_count(value);
  return fmt::format("{:.{}g}", value, digits);
}
std::string ms(double value) {
  return number(value) + " ms";
}
std::string percent(double share) {
  return number(100 * share, 2) + " %";
}

// Returns the spec, with a long list of dense tensors cut.
std::string brief(const std::string& spec) {
  constexpr size_t kMax = 9;
  const size_t dense = spec.find("dense=");
  if (dense == std::string::npos) return spec;
  const size_t begin = dense + 6, end = std::min(spec.find(',', begin), spec.size());
  if (end - begin <= kMax) return spec;
  return spec.substr(0, begin + kMax) + "..." + spec.substr(end);
}

Table predictions(const Recommendation& r) {
  Table table{{"compression", "bucket MB", "buckets", "schedule", "sends", "links ms", "kernels ms",
               "exposed ms", "step ms", "speed"}};
  const bool measured = std::isfinite(r.from.error);  // the errors
  if (measured) table[0].emplace_back("error");
  auto add = [&](const Prediction& p) {
    table.push_back({brief(p.spec), fmt::format("{}", p.bucket_mb), fmt::format("{}", p.buckets), p.schedule,
                     human_bytes(p.sent_bytes), number(p.comm_ms), number(p.codec_ms), number(p.exposed_ms),
                     number(p.step_ms), number(r.best[0].step_ms / p.step_ms) + "x"});
    if (measured)
      table.back().push_back(number(p.error) +
                             (r.allows(p) ? "" : fmt::format(" > {}", number(r.from.error))));
  };
  if (r.one_bucket.bucket_mb != r.best[0].bucket_mb) add(r.one_bucket);
  for (const Prediction& p : r.best) add(p);
  return table;
}

}  // namespace

std::string links_text(const RanksReport& report) {
  auto pattern = [](const LinkCosts::Pattern& p) {
    return fmt::format("{} us, {} GB/s", number(p.latency_us), number(p.bytes_per_us / 1e3));
  };
  const std::string emulated = report.link ? fmt::format(", emulated at {}", report.link.to_string()) : "";
  std::string text = fmt::format("\nLinks between {} ranks, transport {}{} (measured)\n", report.world,
                                 report.transport, emulated);
  text += row_text("to a neighbour", pattern(report.links.neighbour) + ", all ranks at once");
  text += row_text("to all", pattern(report.links.all_pairs) + ", all ranks at once");
  if (report.links.intra_node != report.links.all_pairs ||
      report.links.inter_node != report.links.all_pairs) {
    text += row_text("inside a node", pattern(report.links.intra_node));
    text += row_text("between nodes", pattern(report.links.inter_node));
  }
  if (report.links.library_measured) text += row_text("NCCL's allreduce", pattern(report.links.library));
  if (report.pairs.empty()) return text;
  const auto world = static_cast<size_t>(report.world);
  Table table(world + 1, std::vector<std::string>(world + 1, "-"));
  table[0][0] = "us \\ GB/s";  // latency below the diagonal, bandwidth above
  for (size_t a = 0; a < world; ++a) {
    table[0][a + 1] = table[a + 1][0] = fmt::format("rank {}", a);
    for (size_t b = 0; b < world; ++b) {
      const PairSpeed& link = report.pairs[a * world + b];
      if (a != b) table[a + 1][b + 1] = number(a > b ? link.latency_us : link.gb_per_s);
    }
  }
  return text + "  one pair at a time: latency below the diagonal, bandwidth each way above it\n" +
         table_text(table, "    ");
}

std::string recommendation_text(const RanksReport& report, const VitConfig& model) {
  const StepCosts& costs = report.costs;
  const Recommendation& r = report.recommendation;
  std::string text =
      fmt::format("\nPrediction: {}, {} parameters, batch {}, {} ranks\n", model.name,
                  human_count(static_cast<double>(report.parameters)), report.batch_size, report.world);
  text += row_text("compute", fmt::format("{} GFLOP x {} images / {} TFLOP/s = {}, two thirds of it backward",
                                          number(report.flops_per_image / 1e9), report.batch_size,
                                          number(report.rank_tflops), ms(costs.compute_ms)));
  text += row_text(
      "", fmt::format("(the slowest rank's speed, all at once, on {}{} and batch {})", report.probe.depth,
                      report.probe.depth == 1 ? " layer" : " layers", report.probe_batch));
  text +=
      row_text("optimizer", report.optimizer_bytes == 0
                                ? fmt::format("{}, measured", ms(costs.optimizer_ms))
                                : fmt::format("{} / {} GB/s = {}, AdamW", human_bytes(report.optimizer_bytes),
                                              number(report.peaks.copy_gb_per_s), ms(costs.optimizer_ms)));
  text += table_text(predictions(r));
  if (r.best[0].late_ms > 0) {
    text += fmt::format("  exposed includes {}, the expected wait for the slowest rank, whose speed varies\n",
                        ms(r.best[0].late_ms));
  }

  const Prediction &plain = r.best[0], &chosen = r.best[r.chosen];
  text += fmt::format(
      "\n{}: {} --bucket-mb {}\n", std::isfinite(r.from.error) ? "Choice" : "Recommendation",
      r.compress() ? fmt::format("--compression {}", chosen.spec) : "do not compress, --compression fp32",
      chosen.bucket_mb);
  auto line = [&](const Prediction& p) {
    const double codec = p.codec_ms * 1e6 / static_cast<double>(report.parameters);
    return row_text(brief(p.spec),
                    fmt::format("{} / {} GB/s = {} on the links, {} ns x {} = {} of kernels",
                                human_bytes(p.sent_bytes), number(p.sent_bytes / (p.comm_ms * 1e6)),
                                ms(p.comm_ms), number(codec),
                                human_count(static_cast<double>(report.parameters)), ms(p.codec_ms))) +
           row_text("", fmt::format("{} ({} of the step) are left when backward is done: {} per step, with "
                                    "90 % probability {} to {}",
                                    ms(p.exposed_ms), percent(p.exposed_ms / p.step_ms), ms(p.step_ms),
                                    number(p.low_ms), number(p.high_ms)));
  };
  text += line(plain);
  if (r.compress()) return text + line(chosen);
  const Prediction* fastest = &plain;
  for (const Prediction& p : r.best) {
    if (r.allows(p) && p.step_ms < fastest->step_ms) fastest = &p;
  }
  if (fastest == &plain) {
    return text + row_text("", fmt::format("nothing{} is predicted to be faster",
                                           std::isfinite(r.from.error) ? " within the error" : ""));
  }
  return text + line(*fastest) +
         row_text("", fmt::format("compression would gain {}, too little to justify its rounding errors",
                                  percent(plain.step_ms / fastest->step_ms - 1)));
}

namespace {

Json row_json(const Prediction& p) {
  Json json{{"compression", p.spec},  {"bucket_mb", p.bucket_mb},   {"buckets", p.buckets},
            {"schedule", p.schedule}, {"sent_bytes", p.sent_bytes}, {"dense_bytes", p.dense_bytes},
            {"links_ms", p.comm_ms},  {"kernels_ms", p.codec_ms},   {"exposed_ms", p.exposed_ms},
            {"step_ms", p.step_ms}};
  if (std::isfinite(p.error)) json["error"] = p.error;
  if (std::isfinite(p.low_ms)) json["step_interval_ms"] = {p.low_ms, p.high_ms};
  return json;
}

}  // namespace

Json ranks_json(const RanksReport& report) {
  auto pattern = [](const LinkCosts::Pattern& p) {
    return Json{{"latency_us", p.latency_us}, {"gb_per_s", p.bytes_per_us / 1e3}};
  };
  Json json{{"world", report.world},
            {"transport", report.transport},
            {"link", report.link ? Json(report.link.to_string()) : Json(nullptr)},
            {"neighbour", pattern(report.links.neighbour)},
            {"all_pairs", pattern(report.links.all_pairs)},
            {"inside", pattern(report.links.intra_node)},
            {"between", pattern(report.links.inter_node)},
            {"pairs", Json::array()}};
  if (report.links.library_measured) json["nccl_allreduce"] = pattern(report.links.library);
  for (int a = 0; !report.pairs.empty() && a < report.world; ++a) {
    for (int b = a + 1; b < report.world; ++b) {
      const PairSpeed& link = report.pairs[static_cast<size_t>(a * report.world + b)];
      json["pairs"].push_back(
          {{"a", a}, {"b", b}, {"latency_us", link.latency_us}, {"gb_per_s", link.gb_per_s}});
    }
  }
  return json;
}

Json prediction_json(const RanksReport& report, const VitConfig& model) {
  const Recommendation& r = report.recommendation;
  Json json{{"model", model.name},
            {"parameters", report.parameters},
            {"batch_size", report.batch_size},
            {"rank_tflops", report.rank_tflops},
            {"compute_ms", report.costs.compute_ms},
            {"optimizer_ms", report.costs.optimizer_ms},
            {"kernels_ns_per_element", report.costs.codec_ns},
            {"fp32_one_bucket", row_json(r.one_bucket)},
            {"best", Json::array()}};
  for (const Prediction& p : r.best) json["best"].push_back(row_json(p));
  json["compress"] = r.compress();
  json["recommended"] = row_json(r.best[r.chosen]);
  return json;
}

namespace {

constexpr size_t kSmallBytes = 64, kMinLarge = 256 << 10, kMaxLarge = 32 << 20;
constexpr double kLargeUs = 10e3;

double best_round_us(Communicator& comm, const Stream& stream, const std::vector<Transfer>& transfers,
                     const ExchangeLabel& label, int rounds, int repeats) {
  using Clock = std::chrono::steady_clock;
  const FinishOnError finish(stream);
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= repeats; ++i) {  // the first run is a warm-up
    const auto start = Clock::now();
    for (int k = 0; k < rounds; ++k) comm.transport().exchange(stream, transfers, label);
    stream.synchronize();
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / rounds;
    if (i > 0) best = std::min(best, us);
  }
  comm.check();
  return best;
}

}  // namespace

std::vector<PairSpeed> measure_pairs(Communicator& comm, const Stream& stream, const LinkCosts& costs) {
  const int world = comm.world(), rank = comm.rank();
  const auto wanted = static_cast<size_t>(costs.neighbour.bytes_per_us * kLargeUs);
  const size_t large = std::clamp(wanted, kMinLarge, kMaxLarge) / 4 * 4;
  const Buffer out(comm.device(), large), in(comm.device(), large);
  fill_zero(stream, out.data(), large);
  std::vector<double> mine(static_cast<size_t>(2 * world));
  const Call call{0x6c696e6d, "measuring each link"};
  const ExchangeLabel label{call.hash, call.what};
  comm.transport().begin_call(stream, call);
  // Neighbours check the call at their first exchange, and a pair measured below need not be neighbours.
  const std::vector<Transfer> round{
      {Transfer::Kind::send, (rank + 1) % world, out.data(), kSmallBytes},
      {Transfer::Kind::receive, (rank + world - 1) % world, in.data(), kSmallBytes}};
  const FinishOnError finish(stream);
  comm.transport().exchange(stream, round, label);
  for (int a = 0; a < world; ++a) {
    for (int b = a + 1; b < world; ++b) {
      stream.synchronize();
      comm.barrier();  // no other traffic on the links
      if (rank != a && rank != b) continue;
      const int peer = rank == a ? b : a;
      auto transfers = [&](size_t bytes) {
        return std::vector<Transfer>{{Transfer::Kind::send, peer, out.data(), bytes},
                                     {Transfer::Kind::receive, peer, in.data(), bytes}};
      };
      const double small_us = best_round_us(comm, stream, transfers(kSmallBytes), label, 16, 4);
      const double large_us = best_round_us(comm, stream, transfers(large), label, 1, 3);
      mine[static_cast<size_t>(2 * peer)] = small_us;
      // If latency dominates, noise may make the difference tiny or negative. Therefore use at least half of
      // large_us.
      mine[static_cast<size_t>(2 * peer + 1)] =
          static_cast<double>(large) / std::max(large_us - small_us, 0.5 * large_us) / 1e3;
    }
  }
  const auto all = all_gather(comm.transport(), stream, mine, "speed of each link");
  std::vector<PairSpeed> pairs(static_cast<size_t>(world * world));
  for (int a = 0; a < world; ++a) {
    for (int b = 0; b < world; ++b) {
      if (a == b) continue;
      const auto &from = all[static_cast<size_t>(a)], &to = all[static_cast<size_t>(b)];
      const auto i = static_cast<size_t>(2 * b), j = static_cast<size_t>(2 * a);
      pairs[static_cast<size_t>(a * world + b)] = {std::max(from[i], to[j]),
                                                   std::min(from[i + 1], to[j + 1])};
    }
  }
  return pairs;
}

}  // namespace gradwire
