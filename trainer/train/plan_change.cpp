#include "trainer/train/plan_change.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "collectives/agreement/statements.h"
#include "collectives/codec/codec.h"
#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/head.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/log/summary.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/ranks.h"
#include "trainer/model/parameters.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/rank.h"
#include "trainer/train/run_reporter.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {
namespace {

// Copies each parameter's values from one layout to another.
std::vector<float> moved(const std::vector<float>& values, const std::vector<VitParameter>& parameters,
                         const ParameterLayout& from, const ParameterLayout& to) {
  std::vector<float> out(static_cast<size_t>(to.elements));
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::copy_n(values.begin() + from.offsets[i], parameters[i].elements(), out.begin() + to.offsets[i]);
  }
  return out;
}

}  // namespace

void PlanChange::take(const RankState& rank) {
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto packed_values = [&](const float* values) {
    return moved(to_host(rank.stream, values, rank.layout.elements), rank.parameters, rank.layout, packed);
  };
  weights = packed_values(rank.weights.data);
  moments.clear();
  for (const FlatState& moment : rank.moments) moments.push_back(packed_values(moment.values.data));
  const FinishOnError finish(rank.stream);
  codecs.take(rank.stream, rank.reducer, rank.comm.world());
  rank.stream.synchronize();
}

bool PlanChange::restore(const RankState& rank, const CompressionSpec& to) const {
  const Stream& stream = rank.stream;
  const ParameterLayout packed = packed_layout(rank.parameters);
  const auto put = [&](float* out, const std::vector<float>& values) {
    to_device<float>(stream, out, moved(values, rank.parameters, packed, rank.layout));
    stream.synchronize();
  };
  put(rank.weights.data, weights);
  for (size_t i = 0; i < moments.size(); ++i) put(rank.moments[i].values.data, moments[i]);
  rank.reducer.resume_at(position.step);

  return codecs.restore(stream, rank.reducer, rank.comm.world(), to.loads_state_of(spec));
}

void PlanChange::free() {
  // An assignment of {} would keep the memory.
  weights = std::vector<float>();
  moments = std::vector<std::vector<float>>();
  codecs = ReducerSnapshot();
}

// Whether the plan of --compression auto still holds. Rank 0 watches the steps, and all ranks agree between
// two steps to choose again.

namespace {

// Steps between two agreements: each waits for the latest step. With DriftDetector's 9 steps, a change leads
// to another plan within 30 steps.
constexpr int64_t kAgreeEvery = 20;

}  // namespace

void RankTrainer::prepare_plan_checks() {
  if (shared_.plan == nullptr || !leads()) return;
  drift_.emplace(shared_.plan->request.error, change_ == nullptr ? 0 : change_->quiet,
                 change_ == nullptr ? shared_.plan->predicted : change_->record.predicted);
  if (config_.graph || config_.compression == CompressionSpec()) return;  // FP32 has no error
  sample_layout_ = packed_layout(model_.parameters());
  sample_.emplace(config_, model_.parameters(), sample_layout_, stream_.device());
}

void RankTrainer::check_plan(const Slot& slot, const Event& end) {
  drift_->add_step(reducer_.stats(slot.step).communicate_ms, elapsed_ms(slot.micros.front().data, end));
  if (sampled_ != slot.step) return;
  const std::optional<double> error = try_encode_error(comm_.device(), gradient_tensors(config_.model),
                                                       sample_->values(), config_.compression.to_string());
  if (error) drift_->add_error(*error);
}

bool RankTrainer::plan_check_follows(int64_t step) const {
  const int64_t next = step + 1;
  if (shared_.plan == nullptr || next == config_.steps || next % kAgreeEvery != 0) return false;
  // A trace, a profile and a dump of gradients are parts of one RankTrainer's steps.
  const StepRange& traced = config_.trace_steps;
  return !(traced.begin < next && next < traced.end) && next != config_.gradients_step;
}

bool RankTrainer::agree_to_replan(int64_t steps_done) {
  const std::string why = drift_ ? drift_->alarm() : "";
  const std::vector<double> wishes = all_gather_value(comm_.transport(), stream_, why.empty() ? 0.0 : 1.0,
                                                      "whether the compression is still the best");
  if (wishes[0] == 0) return false;
  plan_change_.emplace();
  plan_change_->position = position(steps_done);
  plan_change_->clock = reporter_.clock();
  plan_change_->began = std::chrono::steady_clock::now();
  plan_change_->record.why = why;
  plan_change_->spec = config_.compression.to_string();
  plan_change_->take(state());
  return true;
}

namespace {

constexpr const char* kType = "gradwire plan 1";
constexpr uintmax_t kMaxBytes = 100'000'000;  // a plan of 1024 ranks has about 60 MB, for its links
constexpr double kMaxBucketMb = 1 << 20;      // of --bucket-mb
// The settings that a plan is for.
constexpr const char* kSettings[] = {"model", "ranks", "device"};

[[noreturn]] void refuse_plan(const std::string& path, const std::string& why) {
  throw BadInput(
      "--compression auto:plan={}: {}; name another file, or remove this one to measure "
      "again",
      path, why);
}

double number_of(const Json& json, const char* key, const std::string& path) {
  const double number = number_in(json, key);
  if (!std::isfinite(number)) refuse_plan(path, fmt::format("damaged: no number '{}'", key));
  return number;
}

// Refuses a plan that this run's request could not have chosen.
void check_choice(const SavedPlan& plan, const Json& choice, const AutoCompression& request,
                  const TrainConfig& config, std::optional<double> bucket_mb) {
  const std::string& path = request.plan;
  std::vector<std::string> specs;
  for (const CompressionSpec& spec : request.candidates()) specs.push_back(spec.to_string());
  std::string candidate;
  try {
    candidate = request.candidate_of(plan.compression);
    std::vector<std::string> tensors;
    for (const VitParameter& p : vit_parameters(config.model)) tensors.push_back(p.name);
    check_dense_names(CompressionSpec::parse(plan.compression), tensors);
  } catch (const BadInput& error) {
    refuse_plan(path, error.what());
  }
  if (candidate.empty()) {
    refuse_plan(path, fmt::format("auto may choose {}, not '{}'", fmt::join(specs, ", "), plan.compression));
  }
  double error = std::numeric_limits<double>::quiet_NaN();  // of one encode with the plan's spec
  const Json prediction = choice.value("prediction", Json());
  for (const Json& row : prediction.is_object() ? prediction.value("best", Json()) : Json()) {
    if (std::isnan(error) && row.is_object() && row.value("compression", Json()) == plan.compression)
      error = number_in(row, "error");
  }
  if (candidate != specs[0] && !(error <= request.error)) {  // FP32 is always allowed
    refuse_plan(path, fmt::format("the error of {} is {}, more than error={}", plan.compression,
                                  std::isfinite(error) ? fmt::format("{:.3g}", error) : "not recorded",
                                  request.error));
  }
  if (!(plan.bucket_mb >= 1 && plan.bucket_mb <= kMaxBucketMb) ||
      plan.bucket_mb != std::floor(plan.bucket_mb)) {
    refuse_plan(path, fmt::format("bucket_mb {} is not a whole number of MiB from 1 to {}", plan.bucket_mb,
                                  kMaxBucketMb));
  }
  if (bucket_mb && plan.bucket_mb != *bucket_mb) {
    refuse_plan(
        path, fmt::format("the plan has buckets of {} MiB, not --bucket-mb {}", plan.bucket_mb, *bucket_mb));
  }
  if (config.memory_limit == 0) return;
  TrainConfig planned = config;
  planned.compression = CompressionSpec::parse(plan.compression);
  planned.bucket_mb = plan.bucket_mb;
  const int64_t bytes = plan_memory(planned).total();
  if (bytes <= config.memory_limit) return;
  const auto text = [](int64_t b) { return human_bytes(static_cast<double>(b)); };
  refuse_plan(path, fmt::format("{} with buckets of {} MiB needs {} per rank, more than --memory-limit {}",
                                plan.compression, plan.bucket_mb, text(bytes), text(config.memory_limit)));
}

}  // namespace

std::optional<SavedPlan> SavedPlan::read(const AutoCompression& request, const TrainConfig& config,
                                         std::optional<double> bucket_mb) {
  const std::string& path = request.plan;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  if (const auto bytes = std::filesystem::file_size(path, ignored); !ignored && bytes > kMaxBytes)
    refuse_plan(path, fmt::format("{} bytes are too many for a plan", bytes));
  const Json json = parse_json(read_regular_file(path));
  if (!json.is_object() || json.value("type", Json()) != kType)
    refuse_plan(path, "not a plan of this version");
  const Json own = Json::parse(config_text(config));
  for (const char* key : kSettings) {
    const Json theirs = json.value(key, Json());
    if (theirs == own[key]) continue;
    const auto text = [](const Json& value) {
      return value.is_object() ? value.value("name", Json()).dump() : value.dump();
    };
    std::string other = text(theirs);
    if (other == text(own[key])) other += " of another size";
    refuse_plan(path, fmt::format("the plan is for {} {}, this run has {}", key, other, text(own[key])));
  }
  const Json predicted = json.value("predicted", Json()), choice = json.value("choice", Json());
  const auto compression = field<std::string>(json, "compression");
  if (!predicted.is_object() || !choice.is_object() || !compression) refuse_plan(path, "damaged");
  const auto ms = [&](const char* key) { return number_of(predicted, key, path); };
  SavedPlan plan{.compression = *compression,
                 .bucket_mb = number_of(json, "bucket_mb", path),
                 .links = links_of(json.value("links", Json())),
                 .predicted = {},
                 .choice = json_text(choice)};
  for (const StepPart& part : kStepParts) plan.predicted.parts.*part.value = ms(part.key);
  plan.predicted.low_ms = ms("low_ms"), plan.predicted.high_ms = ms("high_ms");
  check_choice(plan, choice, request, config, bucket_mb);
  return plan;
}

void SavedPlan::write(const std::string& path, const TrainConfig& config) const {
  const Json own = Json::parse(config_text(config));
  Json json{{"type", kType}};
  for (const char* key : kSettings) json[key] = own[key];
  json["compression"] = compression;
  json["bucket_mb"] = shortest(bucket_mb);
  if (links) json["links"] = links_json(*links);
  json["predicted"] = parts_json(predicted.parts);
  json["predicted"]["low_ms"] = predicted.low_ms;
  json["predicted"]["high_ms"] = predicted.high_ms;
  json["choice"] = Json::parse(choice);
  OutputFile(path).write(json_text(json, 2) + "\n");
}

void DriftDetector::add_step(double links_ms, double step_ms) {
  if (!std::isfinite(links_ms) || !std::isfinite(step_ms)) return;
  if (++steps_ == quiet_) {  // what has drifted so far counts only if it lasts
    alarm_.clear();
    above_ = below_ = 0;
    streak_ = 0;
    if (!latest_.empty()) compare_with_prediction(median({latest_.begin(), latest_.end()}));
  }
  if (steps_ <= kWarmup) return;
  if (links_.size() < kBaseline) {
    links_.push_back(links_ms);
    steps_ms_.push_back(step_ms);
    if (links_.size() < kBaseline) return;
    constexpr double kNormal = 1.4826;  // a normal variable's deviation per median absolute deviation
    median_ = median(links_);
    std::vector<double> distances;
    for (double ms : links_) distances.push_back(std::abs(ms - median_));
    deviation_ = std::max(kNormal * median(std::move(distances)), kMin * median(steps_ms_));
    return compare_with_prediction(median_);
  }
  const double z = std::clamp((links_ms - median_) / deviation_, -kMax, kMax);
  above_ = std::max(0.0, above_ + z - kSlack);
  below_ = std::max(0.0, below_ - z - kSlack);
  latest_.push_back(links_ms);
  if (latest_.size() > kLatest) latest_.pop_front();
  if (above_ <= kLimit && below_ <= kLimit) return;
  if (!alarm_.empty()) return;
  alarm_ = fmt::format("the links take {} ms per step instead of {} ms",
                       milliseconds(median({latest_.begin(), latest_.end()})), milliseconds(median_));
}

void DriftDetector::compare_with_prediction(double links_ms) {
  if (!predicted_) return;
  const double links = predicted_->parts.links_ms, step = median(steps_ms_);
  const bool differs = links_ms > 2 * links || links > 2 * links_ms;
  if (predicted_->holds(step) || !differs || std::abs(links_ms - links) < 0.1 * step) return;
  alarm_ = fmt::format("the links take {} ms per step instead of the predicted {} ms", milliseconds(links_ms),
                       milliseconds(links));
}

void DriftDetector::add_error(double error) {
  streak_ = error <= error_limit_ ? 0 : streak_ + 1;
  if (streak_ < kStreak || !alarm_.empty()) return;
  alarm_ = fmt::format("one encode has an error of {:.3g}, more than {:.3g}", error, error_limit_);
}

namespace {

// What the ranks measure on a rank's first batch, with the weights from which the run starts or continues.
struct FirstStep {
  Timing timing;  // of forward and backward
  double optimizer_ms = 0;
  std::vector<float> gradients;
};

// `starts`: returns the gradients after one update by this rank's own gradients. A new model's head is zero,
// so that its first gradients are zero below the head. The update moves each weight equally, as AdamW's first
// does.
FirstStep measure_first_step(const TrainConfig& config, const DataSplits& data, std::vector<float> weights,
                             bool starts, Communicator& comm, const Stream& stream, double budget_ms) {
  constexpr double kOptimizerBudgetMs = 100;
  constexpr float kUpdate = 1e-3f;
  const ParameterLayout layout = packed_layout(vit_parameters(config.model));
  Loader loader(data.train, train_loader(config, comm, 0));
  Vit model(config.model, stream, layout,
            {.max_batch = config.batch_size,
             .precision = config.precision,
             .groups = gradient_groups(config, comm.device(), comm.world())});
  const Buffer flat = make_buffer<float>(comm.device(), layout.elements);
  const Buffer totals = make_buffer<double>(comm.device(), 2);
  fill_zero(stream, flat.data(), flat.bytes());  // gaps between tensors stay zero
  model.load(weights);
  const Loader::Batch batch = loader.next(stream);
  stream.synchronize();
  const float scale = static_cast<float>(comm.world()) / static_cast<float>(config.global_batch());
  const auto step = [&] {
    model.forward(batch.images, batch.count);
    model.backward(batch.labels, totals.as<double>(), scale, flat.as<float>(), false, {});
  };
  const auto gradients = [&] {
    step();
    return to_host(stream, flat.as<const float>(), layout.elements);
  };
  FirstStep out{.timing = time_runs(stream, step, budget_ms), .optimizer_ms = 0, .gradients = gradients()};
  if (starts) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (out.gradients[i] != 0) weights[i] -= std::copysign(kUpdate, out.gradients[i]);
    }
    model.load(weights);
    out.gradients = gradients();
  }
  Optimizer optimizer(config, stream, {{0, layout.elements}}, optimizer_matrices(config, layout));
  optimizer.prepare(stream, 0, config.lr);
  const auto update = [&] {
    optimizer.step(stream, {model.weights().as<float>()}, {flat.as<const float>()}, model.rounded_weights());
  };
  out.optimizer_ms = time_runs(stream, update, kOptimizerBudgetMs).mean_ms;
  return out;
}

// `starts`: the weights are those from which a run starts.
RanksReport measure_and_choose(const TrainConfig& config, const Choices& choices, const DataSplits& data,
                               const std::vector<float>& weights, bool starts, Communicator& comm) {
  const std::vector<GradientTensor> tensors = gradient_tensors(config.model);
  const std::vector<BucketRange> buckets = lay_out(tensors, 1, config.bucket_bytes()).buckets;
  const BucketRange& largest = *std::ranges::max_element(buckets, {}, &BucketRange::elements);
  std::vector<float> gradients;
  Examination what{.choices = choices,
                   .bucket = {tensors.begin() + largest.first_tensor, tensors.begin() + largest.last_tensor}};
  what.compute = [&](const Stream& stream, double budget_ms) {
    // All ranks measure the same, so that none waits for rank 0.
    FirstStep first = measure_first_step(config, data, weights, starts, comm, stream, budget_ms);
    if (comm.rank() == 0) gradients = std::move(first.gradients);
    return std::pair(first.timing, first.optimizer_ms);
  };
  what.error = [&](const std::string& spec) {
    // A failure ends a run that has not started, but not a run in its steps.
    if (starts) return encode_error(comm.device(), tensors, gradients, spec);
    return try_encode_error(comm.device(), tensors, gradients, spec)
        .value_or(std::numeric_limits<double>::quiet_NaN());
  };
  RanksReport report = examine_ranks(comm, config, what);
  if (starts && !std::isfinite(report.costs.errors.at(choices.specs[0]))) {
    throw BadInput(
        "--compression auto: the gradients of the first batch are not finite, so that no error can be "
        "measured; lower --lr or check --init and the data, or name a spec, such as bf16");
  }
  return report;
}

}  // namespace

RanksReport choose_compression(const TrainConfig& config, const AutoPlan& plan, const DataSplits& data,
                               Communicator* comm) {
  const bool starts = config.resume.empty();
  InitialWeights initial(config.seed, starts ? config.init : weights_path(config.resume));
  const auto examine = [&](Communicator& mine) {
    const std::vector<VitParameter> parameters = vit_parameters(config.model);
    return measure_and_choose(config, plan.choices, data, *initial.get(parameters, packed_layout(parameters)),
                              starts, mine);
  };
  if (comm == nullptr) return examine_group(config, nullptr, examine);
  try {
    check_agreement(
        fmt::format("{}\n\"auto\": {}", described_run(config, plan.about_data), plan.request.to_string()),
        *comm);
    // A separate group on the host, so that waits of the measurement do not count as waits of the run.
    const std::unique_ptr<Communicator> group =
        comm->device().is_host() ? comm->split(0, comm->rank()) : nullptr;
    RanksReport report = examine_group(config, group != nullptr ? group.get() : comm, examine);
    comm->barrier();  // keeps the group open until every rank is done
    comm->set_link_costs(report.links);
    return report;
  } catch (const std::exception& error) {
    comm->abort(error.what());
    throw;
  }
}

RanksReport choose_again(const TrainConfig& config, const AutoPlan& plan, const DataSplits& data,
                         const std::vector<float>& weights, Communicator& comm) {
  Choices choices = plan.choices;
  const std::string spec = config.compression.to_string();
  if (std::ranges::find(choices.specs, spec) == choices.specs.end()) choices.specs.push_back(spec);
  RanksReport report = measure_and_choose(config, choices, data, weights, false, comm);
  comm.set_link_costs(report.links);
  Recommendation& r = report.recommendation;
  const auto present = std::ranges::find(r.best, spec, &Prediction::spec);
  Prediction same = predict_step(report.costs, spec, std::llround(config.bucket_mb));
  const bool finite = std::isfinite(report.costs.errors.at(choices.specs[0]));  // the gradients
  if (!finite || (r.allows(same) && same.step_ms <= choices.tie * r.best[r.chosen].step_ms)) {
    add_interval(report.costs, same);
    *present = same;
    r.chosen = static_cast<size_t>(present - r.best.begin());
  }
  return report;
}

std::string plan_flags(const TrainConfig& config) {
  return fmt::format("--compression {} --bucket-mb {}", config.compression.to_string(), config.bucket_mb);
}

PredictedStep predicted_step(const RanksReport& report) {
  const Prediction& p = report.recommendation.best[report.recommendation.chosen];
  return {.parts = {.compute_ms = p.compute_ms,
                    .kernels_ms = p.kernels_ms,
                    .links_ms = p.links_ms,
                    .exposed_ms = p.exposed_ms,
                    .optimizer_ms = report.costs.optimizer_ms,
                    .step_ms = p.step_ms},
          .low_ms = p.low_ms,
          .high_ms = p.high_ms};
}

std::string choice_record(const RanksReport& report, const AutoCompression& request, const VitConfig& model,
                          int64_t step, const std::string& why) {
  Json json{{"type", "choice"}, {"step", step}, {"request", request.to_string()}};
  if (!why.empty()) json["why"] = why;
  json["ranks"] = ranks_json(report);
  json["prediction"] = prediction_json(report, model);
  return json_text(json);
}

void apply_choice(const RanksReport& report, TrainConfig& config) {
  const Prediction& chosen = report.recommendation.best[report.recommendation.chosen];
  config.compression = CompressionSpec::parse(chosen.spec);
  config.bucket_mb = static_cast<double>(chosen.bucket_mb);
}

}  // namespace gradwire
