#include "trainer/train/evaluator.h"

#include <vector>

namespace gradwire {

Evaluator::Evaluator(const TrainConfig& config, const Dataset& data, const Communicator& comm,
                     const Stream& stream, const Vit& model)
    : stream_(stream),
      loader_(data, {.rank = comm.rank(),
                     .world = comm.world(),
                     .batch_size = config.eval_batch_size,
                     .group = 1,
                     .shuffle = false,
                     .drop_last = false,
                     .seed = config.seed}),
      model_(config.model, stream, model.layout(),
             {.max_batch = config.eval_batch_size,
              .precision = config.precision,
              .training = false,
              .weights = model.weights()}),
      images_(make_buffer<float>(stream.device(), config.eval_batch_size * data.image_elements())),
      labels_(make_buffer<int32_t>(stream.device(), config.eval_batch_size)),
      totals_(make_buffer<double>(stream.device(), 2)) {}

Board::Entry Evaluator::run() {
  Board::Entry entry;
  fill_zero(stream_, totals_.data(), totals_.bytes());
  for (int64_t batch = 0; batch < loader_.batches_per_epoch(); ++batch) {
    int64_t count = loader_.next(stream_, images_.as<float>(), labels_.as<int32_t>());
    model_.forward(images_.as<float>(), count);
    model_.evaluate(labels_.as<int32_t>(), totals_.as<double>());
    entry.images += count;
  }
  std::vector<double> totals = to_host(stream_, totals_.as<const double>(), 2);
  entry.loss = totals[0];
  entry.right = totals[1];
  return entry;
}

}  // namespace gradwire
