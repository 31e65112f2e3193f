#include "trainer/plan/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"
#include "trainer/plan/nccl_model.h"
#include "trainer/plan/simulator.h"

namespace gradwire {
namespace {

constexpr double kAdamwBytes = 28;  // AdamW reads four floats per parameter and writes three
constexpr double kStateBytes = 16;  // weight, gradient and AdamW's moments

// Returns the time of a spec's kernels per element: measured, or from the bytes that they read and write.
// NCCL's kernels are part of its time. PowerSGD's passes: kernels/powersgd; formats: ReduceEncode and Decode
// in kernels/wire/format.h, with one contribution, or spread over the ranks.
double kernel_ns(const Cluster& cluster, const CompressionSpec& spec, const std::string& text,
                 ScheduleKind kind) {
  using enum CompressionSpec::Method;
  const auto measured = cluster.kernels_ns_per_element.find(text);
  if (measured != cluster.kernels_ns_per_element.end()) return measured->second;
  double bytes = 3 * spec.wire->bytes_per_value() + (spec.policy.keeps_errors() ? 16 : 8);
  if (spec.wire->exact) bytes = kind == ScheduleKind::nccl ? 0 : 12;
  if (spec.method == powersgd || spec.method == dion) bytes = 24;
  if (spec.method == randk) bytes = 16;
  return bytes / cluster.memory_gb_per_s;
}

// Returns the relative error of an average (PlanRow::error). The variance of one rounding enters the sum of
// independent values of equal size a number of times: a partial sum of k of n ranks has k/n of the variance
// of the sum.
double relative_error(const CompressionSpec& spec, const Schedule& s) {
  if (spec.method != CompressionSpec::Method::wire) return -1;
  if (spec.wire->exact) return 0;
  if (spec.wire->gaussian_error <= 0) return -1;
  double roundings = s.lossy_steps;
  if (s.kind == ScheduleKind::ring) roundings = (s.world + 1) / 2.0;
  if (s.kind == ScheduleKind::hierarchical)
    roundings = (s.inter_node_lossy_steps <= 2 ? 2 : (s.nodes + 1) / 2.0) + (spec.fp32_intra_node ? 0 : 1);
  return std::sqrt(roundings * spec.wire->gaussian_error);
}

StepCosts step_costs(const PlanRequest& request) {
  StepCosts costs;
  int64_t parameters = 0;
  for (const VitParameter& p : vit_parameters(request.model)) {
    costs.tensors.push_back({p.name, p.shape});
    parameters += p.elements();
  }
  costs.world = request.ranks;
  costs.shared_cores = true;  // backward keeps a GPU busy, so kernels delay backward as on the host
  costs.compute_ms = training_flops_per_image(request.model) * static_cast<double>(request.batch_size) /
                     (request.cluster.tflops * 1e9);
  costs.optimizer_ms =
      kAdamwBytes * static_cast<double>(parameters) / (request.cluster.memory_gb_per_s * 1e6);
  return costs;
}

PlanRow make_row(const PlanRequest& request, StepCosts costs, const std::string& text,
                 SimulatedSchedule& schedule, const std::vector<int64_t>& sizes) {
  const CompressionSpec spec = CompressionSpec::parse(text);
  costs.codec_ns[text] = kernel_ns(request.cluster, spec, text, schedule.kind());
  PlanRow row;
  std::vector<std::vector<double>> levels;  // of each size
  for (int64_t mb : sizes) {
    std::vector<double>& sum = levels.emplace_back(schedule.fabric().levels().size());
    row.tried.push_back(predict_step(costs, text, mb, [&](int64_t count, Wire wire) {
      const std::vector<double> bytes = schedule.level_bytes(count, wire, spec.fp32_intra_node);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += bytes[i];
      return schedule.cost(count, wire, spec.fp32_intra_node);
    }));
  }
  row.best = best_of(row.tried);
  row.error = relative_error(spec, schedule.outline());
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == row.best.bucket_mb) row.level_bytes = levels[i];
  }
  const double bucket =
      std::min(row.best.dense_bytes, static_cast<double>(row.best.bucket_mb << 20)) / row.best.dense_bytes;
  const bool exact = spec.wire->exact && spec.method == CompressionSpec::Method::wire;
  const double residual = exact || !spec.policy.keeps_errors() ? 0 : 4;
  row.memory_bytes = row.best.dense_bytes / 4 * (kStateBytes + residual) + bucket * row.best.sent_bytes;
  return row;
}

}  // namespace

Plan make_plan(const PlanRequest& request) {
  Plan plan{.costs = step_costs(request), .levels = {}, .parameters = 0, .rows = {}};
  for (const GradientTensor& tensor : plan.costs.tensors) plan.parameters += tensor.count();
  const std::vector<int64_t> sizes =
      request.bucket_mb.empty() ? candidate_bucket_mb(plan.costs) : request.bucket_mb;
  std::vector<ScheduleKind> kinds = {ScheduleKind::nccl};
  kinds.insert(kinds.end(), all_schedules().begin(), all_schedules().end());
  std::vector<std::unique_ptr<SimulatedSchedule>> schedules;
  for (ScheduleKind kind : kinds) {
    if (!SimulatedSchedule::supports(kind, request.cluster, request.ranks)) continue;
    schedules.push_back(std::make_unique<SimulatedSchedule>(kind, request.cluster, request.ranks));
  }
  plan.levels = schedules[0]->fabric().levels();
  plan.rows.push_back(make_row(request, plan.costs, "fp32", *schedules[0], sizes));
  for (const std::string& text : request.specs.empty() ? candidate_specs() : request.specs) {
    const CompressionSpec spec = CompressionSpec::parse(text);
    const size_t before = plan.rows.size();
    for (const auto& schedule : schedules) {
      const ScheduleKind kind = schedule->kind();
      if (spec.schedule != ScheduleKind::automatic && kind != spec.schedule) continue;
      if (kind == ScheduleKind::nccl && (!spec.wire->exact || text == "fp32")) continue;
      plan.rows.push_back(make_row(request, plan.costs, text, *schedule, sizes));
    }
    if (plan.rows.size() == before) {
      throw BadInput("{}: {} ranks in nodes of {} cannot run schedule={}; use schedule=auto", text,
                     request.ranks, request.cluster.gpus_per_node, name(spec.schedule));
    }
  }
  return plan;
}

namespace {

constexpr int kMaxSwitchLevels = 4;

// Reads the keys of one JSON object.
class ObjectReader {
 public:
  ObjectReader(const Json& json, std::string path, std::string where)
      : json_(json), path_(std::move(path)), where_(std::move(where)) {
    if (!json.is_object()) fail(fmt::format("{} must be an object", where_.empty() ? "the file" : where_));
  }

  double number(const char* key, double least, double most) {
    const Json& value = get(key);
    const double number = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!(number >= least && number <= most)) {
      fail(fmt::format("{} must be a number from {:g} to {:g}, not {}", full(key), least, most,
                       json_text(value)));
    }
    return number;
  }
  double number_or(const char* key, double least, double most, double fallback) {
    return has(key) ? number(key, least, most) : fallback;
  }
  int whole(const char* key, int least, int most) {
    const Json& value = get(key);
    if (!value.is_number_integer() || value.get<double>() < least || value.get<double>() > most) {
      fail(fmt::format("{} must be a whole number from {} to {}, not {}", full(key), least, most,
                       json_text(value)));
    }
    return value.get<int>();
  }
  std::string text(const char* key) {
    const Json& value = get(key);
    if (!value.is_string()) fail(fmt::format("{} must be a text", full(key)));
    return value.get<std::string>();
  }
  // Returns a list of some of these words; empty if the key is missing.
  std::vector<std::string> words(const char* key, const std::vector<std::string>& legal) {
    std::vector<std::string> out;
    if (!has(key)) return out;
    const Json& list = get(key);
    bool legible = list.is_array();
    for (const Json& entry : list) {
      out.push_back(entry.is_string() ? entry.get<std::string>() : "");
      legible = legible && std::find(legal.begin(), legal.end(), out.back()) != legal.end();
    }
    if (!legible) {
      fail(fmt::format("{} must be a list of some of {}, not {}", full(key), fmt::join(legal, ", "),
                       json_text(list)));
    }
    return out;
  }
  Cluster::Link link() {
    return {.gb_per_s = number("gb_per_s", kSlowest, kFastest),
            .latency_us = number("latency_us", 0, kLongest)};
  }
  ObjectReader object(const char* key) { return {get(key), path_, full(key)}; }
  const Json& get(const char* key) {
    if (!has(key)) fail(fmt::format("{} is missing", full(key)));
    return json_[key];
  }
  bool has(const char* key) {
    known_.insert(key);
    return json_.contains(key);
  }
  const Json& json() const { return json_; }
  std::string full(const std::string& key) const { return where_.empty() ? key : where_ + "." + key; }
  // Throws BadInput if a key was never asked for.
  void finish() const {
    for (const auto& [key, value] : json_.items()) {
      if (known_.count(key) > 0) continue;
      std::string all;
      for (const std::string& name : known_) all += (all.empty() ? "" : ", ") + name;
      fail(fmt::format("unknown key {}; use {}", full(key), all));
    }
  }
  [[noreturn]] void fail(const std::string& what) const { throw BadInput("{}: {}", path_, what); }

  static constexpr double kSlowest = 1e-6, kFastest = 1e5, kLongest = 1e6;

 private:
  const Json& json_;
  const std::string path_, where_;
  std::set<std::string> known_;
};

// Reads the links inside a node: the key `nvlink` or the key `pcie`.
void read_node(ObjectReader& from, Cluster& cluster) {
  cluster.nvlink = from.has("nvlink");
  if (cluster.nvlink == from.has("pcie")) from.fail("give one of nvlink and pcie");
  ObjectReader link = from.object(cluster.nvlink ? "nvlink" : "pcie");
  cluster.gpu = link.link();
  if (!cluster.nvlink && link.has("gpus_per_root")) {
    cluster.gpus_per_root = link.whole("gpus_per_root", 1, cluster.gpus_per_node);
    cluster.root_gb_per_s = link.number("root_gb_per_s", ObjectReader::kSlowest, ObjectReader::kFastest);
    if (cluster.gpus_per_node % cluster.gpus_per_root != 0) {
      link.fail(fmt::format("pcie.gpus_per_root must divide gpus_per_node, {}", cluster.gpus_per_node));
    }
  }
  link.finish();
}

void read_network(ObjectReader& from, const std::string& path, Cluster& cluster) {
  if (!from.has("nic")) return;
  ObjectReader nic = from.object("nic");
  cluster.nics = nic.whole("per_node", 1, 1024);
  cluster.nic = nic.link();
  nic.finish();
  if (!from.has("switches")) return;
  const Json& levels = from.get("switches");
  if (!levels.is_array() || levels.size() > kMaxSwitchLevels) {
    from.fail(fmt::format("switches must be a list of at most {} levels", kMaxSwitchLevels));
  }
  for (const Json& entry : levels) {
    ObjectReader level(entry, path, fmt::format("switches[{}]", cluster.switches.size()));
    const int nodes = level.whole("nodes", 1, 1 << 20);
    const int below = cluster.switches.empty() ? 1 : cluster.switches.back().nodes;
    if (nodes % below != 0)
      level.fail(fmt::format("{} must be a multiple of {}", level.full("nodes"), below));
    cluster.switches.push_back({nodes, level.number("oversubscription", 1, 1e6)});
    level.finish();
  }
}

}  // namespace

Cluster parse_cluster(const std::string& text, const std::string& path) {
  const Json json = parse_json(text);
  if (json.is_discarded()) throw BadInput("{}: not a JSON file", path);
  ObjectReader from(json, path, "");
  Cluster cluster;
  cluster.name = from.text("name");
  if (from.has("source")) cluster.source = from.text("source");
  cluster.gpus_per_node = from.whole("gpus_per_node", 1, 1024);
  ObjectReader gpu = from.object("gpu");
  const std::string generation = gpu.text("generation");
  constexpr const char* kGenerations[] = {"volta", "ampere", "hopper", "blackwell"};
  const auto* const found = std::ranges::find(kGenerations, generation);
  if (found == std::end(kGenerations))
    gpu.fail(fmt::format("gpu.generation must be volta, ampere, hopper or blackwell, not '{}'", generation));
  cluster.generation = static_cast<Cluster::Generation>(found - kGenerations);
  cluster.tflops = gpu.number("tflops", 1e-3, 1e6);
  cluster.memory_gb_per_s = gpu.number("memory_gb_per_s", 1e-3, 1e6);
  if (gpu.has("kernels_ns_per_element")) {
    ObjectReader kernels = gpu.object("kernels_ns_per_element");
    for (const auto& [spec, value] : kernels.json().items())
      cluster.kernels_ns_per_element[spec] = kernels.number(spec.c_str(), 0, 1e6);
  }
  gpu.finish();
  read_node(from, cluster);
  read_network(from, path, cluster);
  if (from.has("nccl")) {
    ObjectReader nccl = from.object("nccl");
    cluster.nccl.launch_us = nccl.number_or("launch_us", 0, ObjectReader::kLongest, 0);
    if (nccl.has("channels")) cluster.nccl.channels = nccl.whole("channels", 1, 1024);
    cluster.nccl.nvls_gb_per_s =
        nccl.number_or("nvls_gb_per_s", ObjectReader::kSlowest, ObjectReader::kFastest, 0);
    cluster.nccl.algorithms = nccl.words("algorithms", {"ring", "tree", "nvls", "nvls_tree"});
    cluster.nccl.network_protocols = nccl.words("network_protocols", {"ll", "ll128", "simple"});
    nccl.finish();
  }
  from.finish();
  return cluster;
}

Cluster read_cluster(const std::string& path) {
  return parse_cluster(read_regular_file(path), path);
}

int Cluster::symmetric_ranks(int ranks) const {
  int group = gpus_per_node;
  for (const Level& level : switches) {
    if (level.nodes * gpus_per_node >= ranks) break;
    group = level.nodes * gpus_per_node;
  }
  return std::min(group, ranks);
}

void check_ranks(const Cluster& cluster, int ranks) {
  const int per_node = cluster.gpus_per_node;
  if (ranks > per_node && ranks % per_node != 0) {
    throw BadInput("--ranks {} do not fill nodes of {} GPUs ({}); use {} or {}", ranks, per_node,
                   cluster.name, ranks / per_node * per_node, (ranks / per_node + 1) * per_node);
  }
  if (ranks <= per_node) return;
  if (cluster.nics == 0) {
    throw BadInput(
        "--ranks {} need {} nodes, and the cluster file has no key nic; add one, or "
        "use at most {} ranks",
        ranks, ranks / per_node, per_node);
  }
  for (const Cluster::Level& level : cluster.switches) {
    const int below = level.nodes * per_node;
    if (ranks <= below || ranks % below == 0) continue;
    throw BadInput("--ranks {} do not fill switches of {} nodes, {} ranks ({}); use {} or {}", ranks,
                   level.nodes, below, cluster.name, ranks / below * below, (ranks / below + 1) * below);
  }
}

// The plan as text and as JSON.

namespace {

constexpr double kSmallestMessage = 0x1p12, kLargestMessage = 0x1p34;

std::string three_digits(double value) {
  return std::abs(value) >= 1000 ? human_count(value) : fmt::format("{:.3g}", value);
}

Json prediction_record(const Prediction& p) {
  return {{"bucket_mb", p.bucket_mb}, {"buckets", p.buckets},     {"sent_bytes", p.sent_bytes},
          {"links_ms", p.comm_ms},    {"kernels_ms", p.codec_ms}, {"exposed_ms", p.exposed_ms},
          {"step_ms", p.step_ms}};
}

}  // namespace

std::string plan_text(const PlanRequest& request, const Plan& plan) {
  const double baseline = plan.rows[0].best.step_ms;
  std::string text = fmt::format("Plan: {}, {} ranks\n", request.cluster.name, request.ranks);
  text +=
      row_text("model", fmt::format("{}, {} parameters, batch {} per rank", request.model.name,
                                    human_count(static_cast<double>(plan.parameters)), request.batch_size));
  text += row_text("compute",
                   fmt::format("{} ms, and {} ms for the optimizer", three_digits(plan.costs.compute_ms),
                               three_digits(plan.costs.optimizer_ms)));
  if (request.ranks > 1) {  // NCCL's choice for the baseline's largest bucket
    const Prediction& first = plan.rows[0].best;
    const double bytes = std::min(first.dense_bytes, static_cast<double>(first.bucket_mb << 20));
    const NcclEstimate estimate = nccl_allreduce_estimate(request.cluster, request.ranks, bytes);
    text +=
        row_text("NCCL", fmt::format("{}, protocol {}, for a bucket of {}: {} ms", estimate.algorithm,
                                     estimate.protocol, human_bytes(bytes), three_digits(estimate.us / 1e3)));
  }
  Table table{{"compression", "schedule", "bucket MB"}};
  for (const std::string& level : plan.levels) table[0].push_back(level + " sends");
  for (const char* title : {"links ms", "kernels ms", "exposed ms", "step ms", "speed", "error", "memory"}) {
    table[0].emplace_back(title);
  }
  for (const PlanRow& row : plan.rows) {
    const Prediction& p = row.best;
    auto& cells = table.emplace_back();
    cells = {p.spec, p.schedule, fmt::format("{}", p.bucket_mb)};
    for (double bytes : row.level_bytes) cells.push_back(human_bytes(bytes));
    for (double ms : {p.comm_ms, p.codec_ms, p.exposed_ms, p.step_ms}) cells.push_back(three_digits(ms));
    cells.push_back(fmt::format("{:.2f}x", baseline / p.step_ms));
    cells.push_back(row.error < 0 ? "-" : row.error == 0 ? "0" : fmt::format("{:.1e}", row.error));
    cells.push_back(human_bytes(row.memory_bytes));
  }
  text += fmt::format(
      "\n{}\nsends: bytes of the busiest rank; error: of the average, for independent gradients; memory:\n"
      "without activations\n",
      table_text(table));
  const Prediction& best =
      std::ranges::min_element(plan.rows, {}, [](const PlanRow& row) { return row.best.step_ms; })->best;
  if (request.ranks == 1) return text + "One rank exchanges nothing, so compression cannot pay\n";
  return text + fmt::format("Fastest: {} with schedule {}, {:.2f}x NCCL's FP32\n", best.spec, best.schedule,
                            baseline / best.step_ms);
}

std::string plan_json(const PlanRequest& request, const Plan& plan) {
  Json json{{"cluster", request.cluster.name},
            {"ranks", request.ranks},
            {"model", request.model.name},
            {"parameters", plan.parameters},
            {"batch_size", request.batch_size},
            {"compute_ms", plan.costs.compute_ms},
            {"optimizer_ms", plan.costs.optimizer_ms},
            {"levels", plan.levels},
            {"rows", Json::array()},
            {"nccl_allreduce", Json::array()}};
  for (const PlanRow& row : plan.rows) {
    Json entry{
        {"compression", row.best.spec},        {"schedule", row.best.schedule},
        {"best", prediction_record(row.best)}, {"speed", plan.rows[0].best.step_ms / row.best.step_ms},
        {"level_bytes", row.level_bytes},      {"error", row.error < 0 ? Json(nullptr) : Json(row.error)},
        {"memory_bytes", row.memory_bytes},    {"tried", Json::array()}};
    for (const Prediction& p : row.tried) entry["tried"].push_back(prediction_record(p));
    json["rows"].push_back(entry);
  }
  const double n = request.ranks;
  for (double bytes = kSmallestMessage; n > 1 && bytes <= kLargestMessage; bytes *= 2) {
    const NcclEstimate estimate = nccl_allreduce_estimate(request.cluster, request.ranks, bytes);
    json["nccl_allreduce"].push_back({{"bytes", bytes},
                                      {"algorithm", estimate.algorithm},
                                      {"protocol", estimate.protocol},
                                      {"us", estimate.us},
                                      {"bus_gb_per_s", 2 * (n - 1) / n * bytes / estimate.us / 1e3}});
  }
  return json_text(json, 2) + "\n";
}

}  // namespace gradwire
