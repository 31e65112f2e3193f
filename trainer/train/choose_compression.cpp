#include "trainer/train/choose_compression.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

#include "runtime/util/error.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/ranks.h"
#include "trainer/model/vit.h"
#include "trainer/train/agreement.h"
#include "trainer/train/initial_weights.h"
#include "trainer/train/layout.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/train_loader.h"

namespace gradwire {
namespace {

using Weights = std::shared_ptr<const std::vector<float>>;  // laid out as packed_layout()

// Forward and backward of a rank's first batch, with the weights from which the run starts or continues.
class FirstStep {
 public:
  FirstStep(const TrainConfig& config, const DataSplits& data, Weights weights, Communicator& comm,
            const Stream& stream)
      : stream_(stream),
        layout_(packed_layout(vit_parameters(config.model))),
        loader_(data.train, train_loader(config, comm, 0)),
        model_(config.model, stream, layout_,
               {.max_batch = config.batch_size,
                .precision = config.precision,
                .groups = gradient_groups(config, comm.device(), comm.world())}),
        gradients_(make_buffer<float>(comm.device(), layout_.elements)),
        totals_(make_buffer<double>(comm.device(), 2)),
        scale_(static_cast<float>(comm.world()) / static_cast<float>(config.global_batch())),
        weights_(std::move(weights)) {
    fill_zero(stream_, gradients_.data(), gradients_.bytes());  // gaps between tensors stay zero
    model_.load(*weights_);
    batch_ = loader_.next(stream_);
    stream_.synchronize();
  }

  Timing time(double budget_ms) {
    return time_runs(
        stream_, [&] { enqueue(); }, budget_ms);
  }

  // Returns the gradients after one update by this rank's own gradients. A new model's head is zero, so that
  // its first gradients are zero below the head. The update moves each weight equally, as AdamW's first does.
  std::vector<float> gradients_after_update() {
    constexpr float kUpdate = 1e-3f;
    std::vector<float> weights = *weights_;
    const std::vector<float> first = gradients();
    for (size_t i = 0; i < weights.size(); ++i) {
      if (first[i] != 0) weights[i] -= std::copysign(kUpdate, first[i]);
    }
    model_.load(weights);
    return gradients();
  }

  // Returns the time of a step of the run's optimizer, which changes the weights.
  double optimizer_ms(const TrainConfig& config, double budget_ms) {
    Optimizer optimizer(config, stream_, {{0, layout_.elements}}, optimizer_matrices(config, layout_));
    optimizer.prepare(stream_, 0, config.lr);
    const auto step = [&] {
      optimizer.step(stream_, {model_.weights().as<float>()}, {gradients_.as<const float>()},
                     model_.rounded_weights());
    };
    return time_runs(stream_, step, budget_ms).mean_ms;
  }

  std::vector<float> gradients() {
    enqueue();
    return to_host(stream_, gradients_.as<const float>(), layout_.elements);
  }

 private:
  void enqueue() {
    model_.forward(batch_.images, batch_.count);
    model_.backward(batch_.labels, totals_.as<double>(), scale_, gradients_.as<float>(), false, {});
  }

  const Stream stream_;
  const ParameterLayout layout_;
  Loader loader_;
  Vit model_;
  Buffer gradients_, totals_;
  const float scale_;
  const Weights weights_;
  Loader::Batch batch_;
};

// Returns the tensors of the largest bucket.
std::vector<GradientTensor> largest_bucket(const std::vector<GradientTensor>& tensors, int64_t bucket_bytes) {
  const std::vector<BucketRange> buckets = lay_out(tensors, 1, bucket_bytes).buckets;
  const BucketRange& largest = *std::ranges::max_element(buckets, {}, &BucketRange::elements);
  return {tensors.begin() + largest.first_tensor, tensors.begin() + largest.last_tensor};
}

// `starts`: the weights are those from which a run starts.
RanksReport measure_and_choose(const TrainConfig& config, const Choices& choices, const DataSplits& data,
                               const Weights& weights, bool starts, Communicator& comm) {
  const std::vector<GradientTensor> tensors = gradient_tensors(config.model);
  constexpr double kOptimizerBudgetMs = 100;
  std::vector<float> gradients;
  double optimizer_ms = 0;
  Examination what{.choices = choices, .bucket = largest_bucket(tensors, config.bucket_bytes())};
  what.compute = [&](const Stream& stream, double budget_ms) {
    FirstStep first(config, data, weights, comm, stream);
    const Timing timing = first.time(budget_ms);
    // All ranks take as long, so that none waits for rank 0.
    std::vector<float> later = starts ? first.gradients_after_update() : first.gradients();
    if (comm.rank() == 0) gradients = std::move(later);
    optimizer_ms = first.optimizer_ms(config, kOptimizerBudgetMs);
    return timing;
  };
  what.optimizer_ms = [&] { return optimizer_ms; };
  what.error = [&](const std::string& spec) {
    // A failure ends a run that has not started, but not a run in its steps.
    if (starts) return encode_errors(comm.device(), tensors, gradients, {spec})[0];
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
    return measure_and_choose(config, plan.choices, data, initial.get(parameters, packed_layout(parameters)),
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
                         std::vector<float> weights, Communicator& comm) {
  Choices choices = plan.choices;
  const std::string spec = config.compression.to_string();
  if (std::ranges::find(choices.specs, spec) == choices.specs.end()) choices.specs.push_back(spec);
  RanksReport report = measure_and_choose(
      config, choices, data, std::make_shared<std::vector<float>>(std::move(weights)), false, comm);
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
