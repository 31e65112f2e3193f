#include "trainer/train/rank.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/agreement/statements.h"
#include "collectives/transport/transport.h"
#include "runtime/device/nvtx.h"
#include "runtime/util/error.h"
#include "runtime/util/signals.h"
#include "trainer/measure/peaks.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/plan_change.h"
#include "trainer/train/run_reporter.h"
#include "trainer/train/weight_shards.h"

namespace gradwire {
namespace {

constexpr int64_t kErrorEvery = 200;  // steps between measurements of the error, which take one encode

// Returns the first step to capture: a step can be captured after one normal run (kernels loaded, connections
// open), and once all later steps are alike.
int64_t first_graph_step(const TrainConfig& config, Communicator& comm, const Reducer& reducer,
                         int64_t first_step) {
  if (!config.graph) return config.steps;
  if (const std::string obstacle = comm.transport().capture_obstacle(); !obstacle.empty()) {
    throw BadInput("--graph: {}", obstacle);
  }
  return std::max(first_step, reducer.steady_from()) + 1;
}

}  // namespace

// Finds the first step and its position in the data. With another world size, the global batch changes. The
// run then continues at the first whole batch after the images already used, so that no image is used twice
// in an epoch.
RankTrainer::Start RankTrainer::find_start() const {
  Start start;
  Position at;
  if (!config_.resume.empty()) {
    start.from = read_head(config_.resume);
    if (start.from->links && start.from->world == comm_.world()) comm_.set_link_costs(*start.from->links);
    at = start.from->position;
  }
  if (shared_.elastic != nullptr && shared_.elastic->start()) {
    start.again = &*shared_.elastic->start();
    at = start.again->position;
  }
  if (change_ != nullptr) at = change_->position;
  const int64_t per_epoch =
      batches_per_epoch(shared_.data.train, train_loader(config_, comm_, 0)) / config_.accumulate;
  const int64_t batch = config_.global_batch();
  const int64_t within = std::min(at.images / batch + (at.images % batch != 0), per_epoch);
  start.step = at.step;
  start.data_step = at.epoch * per_epoch + within;
  return start;
}

RankTrainer::RankTrainer(const TrainConfig& config, const SharedRun& shared, Communicator& comm,
                         const PlanChange* change)
    : config_(config),
      shared_(shared),
      comm_(comm),
      change_(change),
      stream_(Stream::create(comm.device(), "compute")),
      start_(find_start()),
      trace_(config_, comm, shared.trace, shared.instant),
      loader_(shared.data.train, train_loader(config_, comm, start_.data_step * config_.accumulate)),
      reducer_(comm, config_.compression, gradient_tensors(config_.model),
               reducer_options(config_, trace_.tracer())),
      layout_(reducer_layout(reducer_)),
      model_(config_.model, stream_, layout_,
             {.max_batch = config_.batch_size,
              .precision = config_.precision,
              .enter_block =
                  [this](int block) {
                    if (deferred_) deferred_->enter_block(block);
                  },
              .groups = gradient_groups(config_, comm.device(), comm.world())}),
      optimizer_(config_, stream_, reducer_.owned(), optimizer_matrices(config_, layout_)),
      images_(part_of_batch(config_.micro_batch(), comm.rank(), comm.world())),
      reporter_(config_, comm, reducer_, shared.reports, shared.observers, images_,
                change != nullptr ? change->clock : RunReporter::Clock{}),
      steps_per_epoch_(loader_.batches_per_epoch() / config_.accumulate),
      graph_from_(first_graph_step(config_, comm, reducer_, start_.step)),
      gradients_(reducer_.gradients().as<float>()),
      totals_(make_buffer<double>(comm.device(), 2)) {
  // Wait, because loading may throw. The exception would free memory that the stream may still be zeroing.
  stream_.synchronize();
  if (config_.divides_optimizer()) shards_.emplace(config_, comm, stream_, reducer_, model_);
  const bool snapshot = start_.again != nullptr && !shared.elastic->from_checkpoints();
  if (start_.from || snapshot || change != nullptr) {
    restore();
    stream_.synchronize();
  } else {
    const auto initial = shared.initial.get(model_.parameters(), layout_);
    shards_ ? shards_->take_weights(initial->data()) : model_.load(*initial);
    stream_.synchronize();  // waits before the initial weights are freed
  }
  if (leads() && !config_.gradients_directory.empty()) {
    dump_.emplace(config_, model_.parameters(), layout_, stream_.device());
  }
  if (config_.overlap_forward && comm.world() > 1) {
    deferred_.emplace(comm, stream_, reducer_, optimizer_, model_);
  }
  if (config_.eval_every > 0) evaluator_.emplace(config_, shared.data.test, comm, stream_, model_);
  create_slots();
  prepare_plan_checks();
  if (shared.elastic != nullptr && start_.from && carried_ && !shared.elastic->from_checkpoints()) {
    throw BadInput(
        "--elastic: the run cannot keep the residuals in checkpoint {}: they go into the gradients of the "
        "first step, which could then not be repeated; resume without --elastic up to the next checkpoint",
        start_.from->path);
  }
  if (!snapshot) take_snapshot(start_.step);
  stream_.synchronize();
}

void RankTrainer::create_slots() {
  const auto timer = [&] { return Event::create_timer(comm_.device()); };
  for (Slot& slot : slots_) {
    for (int64_t i = 0; i < config_.accumulate; ++i)
      slot.micros.push_back({timer(), timer(), timer(), timer()});
    slot.reduced = timer();
    slot.end = timer();
    slot.snapshot_done = Event::create(comm_.device());
    slot.totals = Buffer::pinned(comm_.device(), 2 * sizeof(double));
    if (deferred_) deferred_->prepare(slot);
  }
}

RankTrainer::~RankTrainer() {
  try {
    stream_.synchronize();
  } catch (...) {  // ignore errors: the failure is already known
  }
}

void RankTrainer::run() {
  const DeferredEnd deferred(!config_.checkpoint_directory.empty());
  start_run();
  Slot* pending = nullptr;
  auto catch_up = [&] {
    if (deferred_) deferred_->finish();
    if (pending != nullptr) harvest(*pending, nullptr);
    pending = nullptr;
  };
  for (int64_t step = start_.step; step < config_.steps; ++step) {
    enqueue_step(step);
    Slot& slot = slots_[static_cast<size_t>(step % 2)];
    if (pending != nullptr) harvest(*pending, &slot.micros.front().data);
    pending = &slot;
    if (deferred_ && deferred_->orders_now()) {
      catch_up();
      deferred_->order_exchanges();
    }
    if (evaluation_follows(step)) {
      catch_up();
      evaluate(step + 1);
    }
    if (checkpoint_follows(step)) {
      catch_up();
      save(step + 1);
    }
    if (end_check_follows(step)) {
      catch_up();
      if (agree_to_end(step + 1, checkpoint_follows(step))) break;
    }
    if (plan_check_follows(step)) {
      catch_up();
      if (agree_to_replan(step + 1)) return;
    }
    if (joiners_wait_ && step + 1 < config_.steps) {
      catch_up();
      if (shared_.elastic->from_checkpoints() && !checkpoint_follows(step)) save(step + 1);
      if (shared_.elastic->grow()) return;
      joiners_wait_ = false;  // the group has not formed, because the joiners have left
    }
  }
  catch_up();
  if (config_.trace_steps.end == config_.steps) profile(config_, comm_, stream_, config_.steps);
  reporter_.report_end(
      parameter_hash(to_host(stream_, model_.weights().as<const float>(), layout_.elements)));
  if (leads() && shared_.elastic != nullptr) shared_.elastic->finished();
}

bool RankTrainer::evaluation_follows(int64_t step) const {
  if (config_.eval_every == 0) return false;
  const auto every = std::llround(config_.eval_every * static_cast<double>(steps_per_epoch_));
  return step + 1 == config_.steps || (data_step(step) + 1) % std::max<int64_t>(every, 1) == 0;
}

bool RankTrainer::checkpoint_follows(int64_t step) const {
  if (config_.checkpoint_directory.empty()) return false;
  return step + 1 == config_.steps || (step + 1) % config_.checkpoint_every == 0;
}

bool RankTrainer::end_check_follows(int64_t step) const {
  const bool may_end = !config_.checkpoint_directory.empty() || config_.ends_diverged;
  return may_end && step + 1 < config_.steps && step + 1 >= agrees_next_;
}

bool RankTrainer::agree_to_end(int64_t steps_done, bool saved) {
  // The steps to the next agreement, of which rank 0's number holds: as many as took a second.
  const auto now = std::chrono::steady_clock::now();
  const auto steps = static_cast<double>(steps_done - std::max(agreed_at_, start_.step));
  const std::chrono::duration<double> took = now - agreed_;
  const double diverged = config_.ends_diverged && reporter_.diverged() ? 1 : 0;
  const std::vector<double> mine{static_cast<double>(requested_end()), diverged,
                                 std::clamp(std::floor(steps / took.count()), 1.0, 2 * steps)};
  const auto all = all_gather(comm_.transport(), stream_, mine, "whether the run ends");
  agreed_at_ = steps_done, agrees_next_ = steps_done + static_cast<int64_t>(all[0][2]), agreed_ = now;
  const int signal = static_cast<int>((*std::max_element(all.begin(), all.end()))[0]);
  if (signal == 0) return all[0][1] != 0;
  if (!saved) save(steps_done);
  comm_.barrier();  // rank 0 has completed the checkpoint: now launchers may end the other ranks
  // With --elastic a rank leaves alone, and the others continue.
  if (shared_.elastic == nullptr || requested_end() != 0) end_by_signal(signal);
  return false;
}

void RankTrainer::start_run() {
  if (change_ != nullptr) {
    if (!leads()) return;
    ReplanRecord record = change_->record;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - change_->began;
    record.seconds = took.count();
    record.buckets = reducer_.buckets();
    record.schedule = reducer_.schedule();
    return shared_.observers.tell(&RunObserver::on_replan, record);
  }
  if (start_.again == nullptr) {
    if (leads()) announce();
    // If the checkpoint was saved after the last step, only the final evaluation remains.
    if (evaluator_ && start_.step == config_.steps) evaluate(start_.step);
    return;
  }
  if (shared_.elastic->takes_over() || shared_.elastic->takes_back()) announce();
  for (const GroupRecord& change : shared_.elastic->resumed()) {
    if (leads()) shared_.observers.tell(&RunObserver::on_group, change);
  }
  if (start_.again->evaluation) evaluate(start_.step);
  if (start_.again->checkpoint) save(start_.step);
}

void RankTrainer::announce() {
  const Peaks peaks = shared_.peaks != nullptr ? *shared_.peaks : Peaks{};
  shared_.observers.tell(&RunObserver::on_run,
                         {.parameters = count_elements(model_.parameters()),
                          .tensors = reducer_.tensors(),
                          .buckets = reducer_.buckets(),
                          .schedule = reducer_.schedule(),
                          .schedule_reason = reducer_.schedule_reason(),
                          .reducer = reducer_.describe(),
                          .reducer_extra_bytes = reducer_.extra_bytes(),
                          .peak_tflops = peaks.tflops,
                          .copy_gb_per_s = peaks.copy_gb_per_s,
                          .fma_share = peaks.fma_share,
                          .slow_products = slow_products_warning(peaks.fma_share),
                          .products = comm_.device().is_host() ? host_products_text() : "",
                          .first_step = start_.step,
                          .takes_over = start_.again != nullptr});
  if (shared_.elastic != nullptr) shared_.elastic->announced();
}

void RankTrainer::take_snapshot(int64_t steps_done) {
  if (shared_.elastic == nullptr) return;
  const int64_t last = steps_done - 1;
  const bool first = steps_done == start_.step;  // no work is due before the first step
  shared_.elastic->take_snapshot(
      state(), position(steps_done),
      {.evaluation = !first && evaluation_follows(last), .checkpoint = !first && checkpoint_follows(last)});
}

void RankTrainer::evaluate(int64_t steps_done) {
  reporter_.report_evaluation(
      evaluator_->run(), steps_done,
      static_cast<double>(data_step(steps_done)) / static_cast<double>(steps_per_epoch_));
  if (leads() && shared_.elastic != nullptr) shared_.elastic->evaluated(steps_done);
}

Position RankTrainer::position(int64_t steps_done) const {
  const int64_t at = data_step(steps_done);
  return {.step = steps_done,
          .epoch = at / steps_per_epoch_,
          .images = at % steps_per_epoch_ * config_.global_batch()};
}

void RankTrainer::save(int64_t steps_done) {
  const auto begin = std::chrono::steady_clock::now();
  const SavedCheckpoint saved = save_checkpoint(state(), config_, position(steps_done));
  if (!leads()) return;
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  shared_.observers.tell(
      &RunObserver::on_checkpoint,
      {.step = steps_done, .path = saved.path, .bytes = saved.bytes, .save_ms = took.count()});
}

RankState RankTrainer::state() {
  return {.comm = comm_,
          .stream = stream_,
          .reducer = reducer_,
          .parameters = model_.parameters(),
          .layout = layout_,
          .weights = shards_ ? shards_->weights() : Parts<float>{model_.weights().as<float>()},
          .moments = optimizer_.moments(),
          .parts = optimizer_.parts(),
          .divided = shards_.has_value()};
}

void RankTrainer::restore() {
  if (change_ != nullptr) {
    carried_ = change_->restore(state(), config_.compression);
  } else {
    carried_ =
        start_.from ? restore_checkpoint(state(), config_, *start_.from) : shared_.elastic->restore(state());
  }
  if (shards_) {
    shards_->share_weights();
  } else {
    model_.round_weights();
  }
}

// One step of a rank: enqueues the work of a step, and reads the results of the previous step.

void RankTrainer::enqueue_step(int64_t step) {
  Slot& slot = slots_[static_cast<size_t>(step % 2)];
  profile(config_, comm_, stream_, step);
  if (Tracer* tracer = trace_.tracer()) tracer->begin_step(step, step < graph_from_);
  slot.enqueue_begin = std::chrono::steady_clock::now();
  slot.step = step;
  slot.lr = learning_rate(config_, step);
  if (!deferred_) optimizer_.prepare(stream_, step, slot.lr);
  slot.micros.front().data.record(stream_);
  if (config_.graph) {
    enqueue_graph(slot);
  } else {
    enqueue_work(slot);
  }
  copy(stream_, slot.totals.data(), totals_.data(), totals_.bytes());
  if (!deferred_) slot.end.record(stream_);
  if (shared_.elastic != nullptr) {
    take_snapshot(step + 1);
    slot.snapshot_done.record(stream_);
  }
  slot.enqueue_end = std::chrono::steady_clock::now();
}

// Captures a step's work, or launches the captured graph. A graph contains the marks of its slot and the
// addresses of its batches, so even and odd steps have separate graphs.
void RankTrainer::enqueue_graph(Slot& slot) {
  std::vector<Loader::Batch> batches;
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) batches.push_back(next_batch(slot.step));
  const bool replays = static_cast<bool>(slot.graph);
  for (size_t micro = 0; replays && micro < batches.size(); ++micro) {
    if (batches[micro].images != slot.batches[micro].images)
      throw Error("the loader's slots are out of step");
  }
  slot.batches = std::move(batches);
  if (slot.step < graph_from_) {
    enqueue_work(slot);
  } else {
    if (!replays) {
      slot.graph = Graph::capture(stream_, [&] { enqueue_work(slot); });
      slot.captured = slot.step;
    }
    slot.graph.launch();
    if (replays) reducer_.replayed(slot.captured);
  }
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) loader_.release(stream_);
}

void RankTrainer::enqueue_work(Slot& slot) {
  const int64_t step = slot.step;
  // Scale the gradients to the mean over this rank's images, or to this rank's share of the mean over all
  // images. The reducer divides by the number of ranks.
  const float grad_scale = static_cast<float>(comm_.world()) / static_cast<float>(config_.global_batch());
  const bool dumps = dump_ && step == config_.gradients_step;
  if (dumps && carried_) {
    throw BadInput(
        "--dump-gradients: after --resume with another compression or number of ranks, the "
        "gradients of step {} begin with the checkpoint's residuals; dump a later step",
        step);
  }
  // Gradients that are added to residuals are not those of a step.
  const bool samples = sample_ && (step + 1) % kErrorEvery == 0 && !carried_;
  if (samples) sampled_ = step;
  const std::function<void(int)> ready = [&](int i) {
    if (dumps) dump_->take(stream_, i, reducer_.gradient(i));
    if (samples) sample_->take(stream_, i, reducer_.gradient(i));
    reducer_.ready(i, stream_);
  };

  for (int64_t micro = 0; micro < config_.accumulate; ++micro) {
    TrainingMarks::Micro& marks = slot.micros[static_cast<size_t>(micro)];
    if (micro > 0) marks.data.record(stream_);
    std::optional<NvtxRange> range;
    const Loader::Batch batch = config_.graph ? slot.batches[static_cast<size_t>(micro)] : next_batch(step);
    marks.forward.record(stream_);
    range.emplace(Activity::forward, step);
    // backward() adds to the residuals in the gradient buffer, and also to the totals, which must therefore
    // start at zero.
    if (micro == 0 && carried_) fill_zero(stream_, totals_.data(), totals_.bytes());
    model_.forward(batch.images, batch.count);
    if (deferred_) deferred_->finish();  // ends the previous step
    range.reset();
    marks.backward.record(stream_);
    // Only the last micro-batch completes a gradient.
    bool completes = micro + 1 == config_.accumulate;
    range.emplace(Activity::backward, step);
    model_.backward(batch.labels, totals_.as<double>(), grad_scale, gradients_, micro > 0 || carried_,
                    completes ? ready : std::function<void(int)>());
    range.reset();
    marks.done.record(stream_);
    if (!config_.graph) loader_.release(stream_);
  }
  carried_ = false;
  if (deferred_) return deferred_->begin(slot, gradients_, slot.lr);
  reducer_.wait(stream_);
  slot.reduced.record(stream_);
  const NvtxRange update(Activity::optimizer, step);
  if (shards_) {
    optimizer_.step(stream_, shards_->weights(), gradients_);
    shards_->share_weights();
  } else {
    optimizer_.step(stream_, {model_.weights().as<float>()}, gradients_, model_.rounded_weights());
  }
}

Loader::Batch RankTrainer::next_batch(int64_t step) {
  NvtxRange range(Activity::batch, step);
  const Loader::Batch batch = loader_.next(stream_);
  if (batch.count != images_) {
    throw Error("the loader gave a training batch of {} images, expected {}", batch.count, images_);
  }
  return batch;
}

void RankTrainer::harvest(Slot& slot, const Event* next_start) {
  const Event& end = next_start != nullptr ? *next_start : slot.end;
  slot.wait_begin = std::chrono::steady_clock::now();
  end.synchronize();
  if (deferred_) slot.end.synchronize();  // the step ends inside the next step
  // Report only steps that will not be repeated.
  if (shared_.elastic != nullptr) {
    slot.snapshot_done.synchronize();
    comm_.check();
    joiners_wait_ = shared_.elastic->joiners_wait(slot.step + 1);
  }
  slot.wait_end = std::chrono::steady_clock::now();
  comm_.check();
  if (dump_ && slot.step == config_.gradients_step) dump_->write();
  reporter_.report_step(slot, end, slot.totals.as<double>(), data_step(slot.step) / steps_per_epoch_, slot.lr,
                        shards_ ? shards_->sent() : WeightShards::Sent());
  if (drift_) check_plan(slot, end);
  if (deferred_) deferred_->measured(slot.backward_ms(), reducer_.stats(slot.step).comm_ms);
  trace_.add(slot, end, stream_.name(), reducer_);
}

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
