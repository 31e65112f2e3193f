#include "trainer/train/choose_compression.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <utility>

#include "runtime/util/error.h"
#include "trainer/measure/encode_error.h"
#include "trainer/measure/timing.h"
#include "trainer/model/vit.h"
#include "trainer/train/agreement.h"
#include "trainer/train/initial_weights.h"
#include "trainer/train/layout.h"
#include "trainer/train/train_loader.h"

namespace gradwire {
namespace {

// Forward and backward of a rank's first batch, with the weights from which the run starts.
class FirstStep {
 public:
  FirstStep(const TrainConfig& config, const DataSplits& data, InitialWeights& initial, Communicator& comm,
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
        scale_(static_cast<float>(comm.world()) / static_cast<float>(config.global_batch())) {
    fill_zero(stream_, gradients_.data(), gradients_.bytes());  // gaps between tensors stay zero
    weights_ = initial.get(model_.parameters(), layout_);
    model_.load(*weights_);
    batch_ = loader_.next(stream_);
    stream_.synchronize();
  }

  double mean_ms(double budget_ms) {
    return time_runs(
               stream_, [&] { enqueue(); }, budget_ms)
        .mean_ms;
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

 private:
  void enqueue() {
    model_.forward(batch_.images, batch_.count);
    model_.backward(batch_.labels, totals_.as<double>(), scale_, gradients_.as<float>(), false, {});
  }
  std::vector<float> gradients() {
    enqueue();
    return to_host(stream_, gradients_.as<const float>(), layout_.elements);
  }

  const Stream stream_;
  const ParameterLayout layout_;
  Loader loader_;
  Vit model_;
  Buffer gradients_, totals_;
  const float scale_;
  std::shared_ptr<const std::vector<float>> weights_;
  Loader::Batch batch_;
};

// Returns the tensors of the largest bucket.
std::vector<GradientTensor> largest_bucket(const std::vector<GradientTensor>& tensors, int64_t bucket_bytes) {
  const std::vector<BucketRange> buckets = lay_out(tensors, 1, bucket_bytes).buckets;
  const BucketRange& largest = *std::ranges::max_element(buckets, {}, &BucketRange::elements);
  return {tensors.begin() + largest.first_tensor, tensors.begin() + largest.last_tensor};
}

RanksReport measure_and_choose(const TrainConfig& config, const Choices& choices, const DataSplits& data,
                               InitialWeights& initial, Communicator& comm) {
  const std::vector<GradientTensor> tensors = gradient_tensors(config.model);
  std::vector<float> gradients;
  Examination what{.choices = choices, .bucket = largest_bucket(tensors, config.bucket_bytes())};
  what.compute_ms = [&](const Stream& stream, double budget_ms) {
    FirstStep first(config, data, initial, comm, stream);
    const double ms = first.mean_ms(budget_ms);
    // All ranks take as long, so that none waits for rank 0.
    std::vector<float> updated = first.gradients_after_update();
    if (comm.rank() == 0) gradients = std::move(updated);
    return ms;
  };
  what.error = [&](const std::string& spec) {
    return encode_errors(comm.device(), tensors, gradients, {spec})[0];
  };
  RanksReport report = examine_ranks(comm, config, what);
  if (!std::isfinite(report.costs.errors.at(choices.specs[0]))) {
    throw BadInput(
        "--compression auto: the gradients of the first batch are not finite, so that no error can be "
        "measured; lower --lr or check --init and the data, or name a spec, such as bf16");
  }
  return report;
}

}  // namespace

RanksReport choose_compression(const TrainConfig& config, const AutoCompression& request,
                               const Choices& choices, const DataSplits& data, Communicator* comm) {
  InitialWeights initial(config.seed, config.init);
  const auto examine = [&](Communicator& mine) {
    return measure_and_choose(config, choices, data, initial, mine);
  };
  if (comm == nullptr) return examine_group(config, nullptr, examine);
  try {
    check_agreement(
        fmt::format("{}\n\"auto\": {}", described_run(config, described_data(data)), request.to_string()),
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

void apply_choice(const RanksReport& report, TrainConfig& config) {
  const Prediction& chosen = report.recommendation.best[report.recommendation.chosen];
  config.compression = CompressionSpec::parse(chosen.spec);
  config.bucket_mb = static_cast<double>(chosen.bucket_mb);
}

}  // namespace gradwire
