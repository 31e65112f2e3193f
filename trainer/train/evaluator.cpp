#include "trainer/train/evaluator.h"

#include <vector>

namespace gradwire {
namespace {

Vit::Options vit_options(const TrainConfig& config, const Vit& model) {
  return {
      .max_batch = config.eval_batch_size, .precision = config.precision, .training = false, .share = &model};
}

constexpr int64_t kBatches = 2;  // batches in flight

}  // namespace

int64_t Evaluator::bytes(const TrainConfig& config, const Stream& stream, const Vit& model) {
  const VitConfig& shape = config.model;
  const int64_t image = int64_t{shape.channels} * shape.image * shape.image;
  return Vit(shape, stream, model.layout(), vit_options(config, model)).activation_bytes() +
         kBatches * config.eval_batch_size * (image + 1) * static_cast<int64_t>(sizeof(float));
}

Evaluator::Evaluator(const TrainConfig& config, const Dataset& data, const Communicator& comm,
                     const Stream& stream, const Vit& model)
    : stream_(stream),
      loader_(data, {.rank = comm.rank(),
                     .world = comm.world(),
                     .batch_size = config.eval_batch_size,
                     .group = 1,
                     .shuffle = false,
                     .drop_last = false,
                     .seed = config.seed,
                     .slots = kBatches,
                     .device = stream.device()}),
      model_(config.model, stream, model.layout(), vit_options(config, model)),
      totals_(make_buffer<double>(stream.device(), 2)) {}

RankReports::Report Evaluator::run() {
  RankReports::Report entry;
  fill_zero(stream_, totals_.data(), totals_.bytes());
  for (int64_t batch = 0; batch < loader_.batches_per_epoch(); ++batch) {
    const Loader::Batch images = loader_.next(stream_);
    model_.forward(images.images, images.count);
    model_.evaluate(images.labels, totals_.as<double>());
    loader_.release(stream_);
    entry.images += images.count;
  }
  std::vector<double> totals = to_host(stream_, totals_.as<const double>(), 2);
  entry.loss = totals[0];
  entry.correct = totals[1];
  return entry;
}

}  // namespace gradwire
