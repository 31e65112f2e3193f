#include "trainer/train/rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "collectives/transport/transport.h"
#include "runtime/device/memory_use.h"
#include "runtime/device/nvtx.h"
#include "runtime/util/error.h"
#include "trainer/measure/products.h"
#include "trainer/model/flops.h"
#include "trainer/train/layout.h"
#include "trainer/train/parameter_hash.h"
#include "trainer/train/schedule.h"

namespace gradwire {
namespace {

LoaderOptions train_loader(const TrainConfig& config, const Communicator& comm, int64_t first_batch) {
  return {.rank = comm.rank(),
          .world = comm.world(),
          .batch_size = config.batch_size,
          .global_batch = config.micro_batch(),
          .group = config.accumulate,
          .shuffle = true,
          .drop_last = true,
          .augment = config.augment,
          .seed = config.seed,
          .first_batch = first_batch,
          // One batch trains while the next is loaded; a graph needs all batches of a step at once.
          .slots = config.graph ? 2 * config.accumulate : 2,
          .device = comm.device()};
}

// Returns the images per step on rank 0's device, over all its ranks, if each has `images` per batch. With a
// process per rank, each rank has its own GPU or its share of the cores.
int64_t images_per_device(const TrainConfig& config, int64_t images) {
  const auto here = std::count(config.devices.begin(), config.devices.end(), config.devices.front());
  return (config.processes ? 1 : here) * images * config.accumulate;
}

// Returns the first step to capture: a step can be captured after one normal run (kernels loaded, connections
// open), once it no longer changes.
int64_t first_graph_step(const TrainConfig& config, Communicator& comm, const Reducer& reducer,
                         int64_t first_step) {
  if (!config.graph) return config.steps;
  if (const std::string obstacle = comm.transport().capture_obstacle(); !obstacle.empty()) {
    throw BadInput(fmt::format("--graph: {}", obstacle));
  }
  return std::max(first_step, reducer.steady_from()) + 1;
}

// Sums in rank order, so that the rounding is the same in every run.
RankReports::Report sum(const std::vector<RankReports::Report>& entries) {
  RankReports::Report all;
  for (const RankReports::Report& entry : entries) {
    all.loss += entry.loss;
    all.correct += entry.correct;
    all.images += entry.images;
  }
  return all;
}

}  // namespace

// Finds the first step and its position in the data. With another world size, the global batch changes. The
// run then continues at the first whole batch after the images already used, so that no image is used twice
// in an epoch.
RankTrainer::Start RankTrainer::find_start(const SharedRun& shared, Communicator& comm) {
  const TrainConfig& config = shared.config;
  Start start;
  Position at;
  if (!config.resume.empty()) {
    start.from = read_head(config.resume);
    if (start.from->links && start.from->world == comm.world()) comm.set_link_costs(*start.from->links);
    at = start.from->position;
  }
  if (shared.elastic != nullptr && shared.elastic->start()) {
    start.again = &*shared.elastic->start();
    at = start.again->position;
  }
  const int64_t per_epoch =
      batches_per_epoch(shared.data.train, train_loader(config, comm, 0)) / config.accumulate;
  const int64_t batch = config.global_batch();
  const int64_t within = std::min(at.images / batch + (at.images % batch != 0), per_epoch);
  start.step = at.step;
  start.data_step = at.epoch * per_epoch + within;
  return start;
}

RankTrainer::RankTrainer(const SharedRun& shared, Communicator& comm)
    : shared_(shared),
      config_(shared.config),
      comm_(comm),
      stream_(Stream::create(comm.device(), "compute")),
      start_(find_start(shared, comm)),
      trace_(config_, comm, shared.trace, shared.instant),
      loader_(shared.data.train, train_loader(config_, comm, start_.data_step * config_.accumulate)),
      reducer_(comm, config_.compression, gradient_tensors(config_.model),
               reducer_options(config_, trace_.tracer())),
      layout_(reducer_layout(reducer_)),
      gradient_layout_(gradient_layout(reducer_)),
      model_(config_.model, stream_,
             config_.divides(Sharding::full) ? WeightWindow::layout(reducer_) : layout_,
             {.max_batch = config_.batch_size,
              .precision = config_.precision,
              .gradients = gradient_layout_,
              .enter_block = enter_block(),
              .groups = gradient_groups(config_, comm.device(), comm.world())}),
      optimizer_(config_, stream_, reducer_.owned()),
      images_(part_of_batch(config_.micro_batch(), comm.rank(), comm.world())),
      steps_per_epoch_(loader_.batches_per_epoch() / config_.accumulate),
      graph_from_(first_graph_step(config_, comm, reducer_, start_.step)),
      gradients_(reducer_.gradients().as<float>()),
      totals_(make_buffer<double>(comm.device(), 2)) {
  // Loading may throw, which frees memory that the stream may still be zeroing.
  stream_.synchronize();
  if (config_.divides(Sharding::optimizer)) shards_.emplace(config_, comm, stream_, reducer_, model_);
  const bool again = start_.again != nullptr, from_checkpoints = again && shared.elastic->from_checkpoints();
  if (start_.from || (again && !from_checkpoints)) {
    restore();
  } else {
    load(*shared.initial.get(model_.parameters(), layout_));
  }
  stream_.synchronize();
  if (leads() && !config_.gradients_directory.empty()) {
    dump_.emplace(config_, model_.parameters(), layout_, stream_.device());
  }
  if (config_.overlap_forward && comm.world() > 1) {
    deferred_.emplace(comm, stream_, reducer_, optimizer_, model_);
  }
  if (config_.eval_every > 0) evaluator_.emplace(config_, shared.data.test, comm, stream_, model_);
  for (Slot& slot : slots_) {
    auto event = [&] { return Event::create_timer(comm.device()); };
    for (int64_t i = 0; i < config_.accumulate; ++i)
      slot.micros.push_back({event(), event(), event(), event()});
    slot.reduced = event();
    slot.end = event();
    slot.kept = Event::create(comm.device());
    slot.totals = Buffer::pinned(comm.device(), 2 * sizeof(double));
    if (deferred_) deferred_->prepare(slot);
  }
  if (shared.elastic != nullptr && start_.from && carried_ && !shared.elastic->from_checkpoints()) {
    throw BadInput(fmt::format(
        "--elastic: this run keeps no residuals of the kind that {} holds, which go into the first step's "
        "gradients and "
        "could not be kept for repeating it; resume without --elastic as far as the next checkpoint",
        start_.from->path));
  }
  if (!again || from_checkpoints) keep(start_.step);
  stream_.synchronize();
}

RankTrainer::~RankTrainer() {
  try {
    stream_.synchronize();
  } catch (...) {  // the failure is already known
  }
}

void RankTrainer::run() {
  begin();
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
    if (joiners_wait_ && step + 1 < config_.steps) {
      catch_up();
      if (shared_.elastic->from_checkpoints() && !checkpoint_follows(step)) save(step + 1);
      if (shared_.elastic->grow()) return;
      joiners_wait_ = false;  // the joiners have left
    }
  }
  catch_up();
  if (config_.profile_steps.end == config_.steps) profile(config_, comm_, stream_, config_.steps);
  finish();
}

bool RankTrainer::evaluation_follows(int64_t step) const {
  if (config_.eval_every == 0) return false;
  return step + 1 == config_.steps || (data_step(step) + 1) % (steps_per_epoch_ * config_.eval_every) == 0;
}

bool RankTrainer::checkpoint_follows(int64_t step) const {
  if (config_.checkpoint_directory.empty()) return false;
  return step + 1 == config_.steps || (step + 1) % config_.checkpoint_every == 0;
}

void RankTrainer::begin() {
  if (start_.again == nullptr) {
    if (leads()) announce();
    // If the checkpoint was saved after the last step, only the final evaluation remains.
    if (evaluator_ && start_.step == config_.steps) evaluate(start_.step);
    return;
  }
  if (shared_.elastic->takes_over() || shared_.elastic->takes_back()) announce();
  const Elastic::Changes changes = shared_.elastic->resumed();
  if (leads() && changes.grown) shared_.observer.on_grow(*changes.grown);
  if (leads() && changes.shrunk) shared_.observer.on_shrink(*changes.shrunk);
  if (start_.again->evaluation) evaluate(start_.step);
  if (start_.again->checkpoint) save(start_.step);
}

void RankTrainer::announce() {
  const Peaks peaks = shared_.peaks != nullptr ? *shared_.peaks : Peaks{};
  shared_.observer.on_run({.parameters = count_elements(model_.parameters()),
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

void RankTrainer::keep(int64_t steps_done) {
  if (shared_.elastic == nullptr) return;
  const int64_t last = steps_done - 1;
  const bool first = steps_done == start_.step;  // nothing is due before the first step
  shared_.elastic->keep(
      state(), position(steps_done),
      {.evaluation = !first && evaluation_follows(last), .checkpoint = !first && checkpoint_follows(last)});
}

EnterBlock RankTrainer::enter_block() {
  if (config_.overlap_forward) {
    return [this](int block, int) {
      if (deferred_) deferred_->enter_block(block);
    };
  }
  if (!config_.divides(Sharding::full)) return {};
  return [this](int block, int next) { shards_->window()->enter_block(block, next); };
}

// `weights`: all weights, in host memory.
void RankTrainer::load(std::span<const float> weights) {
  if (!shards_) return model_.load(weights);
  shards_->take_weights(weights.data());
  stream_.synchronize();  // before the caller frees the memory
}

Loader::Batch RankTrainer::next_batch(int64_t step) {
  NvtxRange range(Activity::batch, step);
  const Loader::Batch batch = loader_.next(stream_);
  if (batch.count != images_) {
    throw Error(
        fmt::format("the loader gave a training batch of {} images, expected {}", batch.count, images_));
  }
  return batch;
}

void RankTrainer::enqueue_step(int64_t step) {
  Slot& slot = slots_[static_cast<size_t>(step % 2)];
  profile(config_, comm_, stream_, step);
  if (Tracer* tracer = trace_.tracer()) tracer->begin_step(step, step < graph_from_);
  slot.enqueue_begin = std::chrono::steady_clock::now();
  slot.step = step;
  slot.lr = learning_rate(config_, step);
  if (!deferred_) optimizer_.prepare(stream_, step, slot.lr);
  slot.micros.front().data.record(stream_);
  if (shards_) shards_->begin_step();
  if (config_.graph) {
    enqueue_graph(slot);
  } else {
    enqueue_work(slot);
  }
  if (shards_) slot.weights = shards_->sent();
  copy(stream_, slot.totals.data(), totals_.data(), totals_.bytes());
  if (!deferred_) slot.end.record(stream_);
  if (shared_.elastic != nullptr) {
    keep(step + 1);
    slot.kept.record(stream_);
  }
  slot.enqueue_end = std::chrono::steady_clock::now();
}

// A graph contains the marks of its slot and the addresses of its batches, so there are two graphs: for even
// and odd steps.
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
  // The mean over this rank's images, or its share of the mean over all images. The reducer divides by the
  // number of ranks.
  const float grad_scale = static_cast<float>(comm_.world()) / static_cast<float>(config_.global_batch());
  const bool dumps = dump_ && step == config_.gradients_step;
  if (dumps && carried_) {
    throw BadInput(
        fmt::format("--dump-gradients: after --resume with another compression or number of ranks, the "
                    "gradients of step {} begin with the checkpoint's residuals; dump a later step",
                    step));
  }
  const std::function<void(int)> ready = [&](int i) {
    if (dumps) dump_->take(stream_, i, gradients_ + gradient_layout_.offsets[static_cast<size_t>(i)]);
    reducer_.ready(i, stream_);
    if (left_over_ && i + 1 < reducer_.tensors() && reducer_.bucket_of(i) != reducer_.bucket_of(i + 1)) {
      carry(reducer_.bucket_of(i + 1));
    }
  };

  for (int64_t micro = 0; micro < config_.accumulate; ++micro) {
    TrainingMarks::Micro& marks = slot.micros[static_cast<size_t>(micro)];
    if (micro > 0) marks.data.record(stream_);
    std::optional<NvtxRange> range;
    const Loader::Batch batch = config_.graph ? slot.batches[static_cast<size_t>(micro)] : next_batch(step);
    marks.forward.record(stream_);
    range.emplace(Activity::forward, step);
    // backward() adds to gradients that were carried over, and to the totals along with them.
    if (micro == 0 && carried_) fill_zero(stream_, totals_.data(), totals_.bytes());
    model_.forward(batch.images, batch.count);
    if (deferred_) deferred_->finish();  // of the previous step
    range.reset();
    marks.backward.record(stream_);
    // Only the last micro-batch completes a gradient.
    bool completes = micro + 1 == config_.accumulate;
    range.emplace(Activity::backward, step);
    if (left_over_) carry(0);
    model_.backward(batch.labels, totals_.as<double>(), grad_scale, gradients_, micro > 0 || carried_,
                    completes ? ready : std::function<void(int)>());
    range.reset();
    marks.done.record(stream_);
    if (!config_.graph) loader_.release(stream_);
  }
  carried_ = false;
  if (deferred_) return deferred_->begin(slot, gradients_, slot.lr);
  enqueue_update(slot);
}

void RankTrainer::enqueue_update(Slot& slot) {
  reducer_.wait(stream_);
  if (left_over_) {
    stream_.synchronize();
    left_over_ = {};
  }
  slot.reduced.record(stream_);
  NvtxRange range(Activity::optimizer, slot.step);
  if (shards_) {
    const Buffer& own = reducer_.shard();
    shards_->step(optimizer_,
                  own ? Parts<const float>{own.as<float>(), true} : Parts<const float>{gradients_});
  } else {
    optimizer_.step(stream_, {model_.weights().as<float>()}, {gradients_}, model_.rounded_weights());
  }
}

void RankTrainer::carry(int bucket) {
  const BucketRange& range = reducer_.ranges()[static_cast<size_t>(bucket)];
  copy(stream_, reducer_.gradient(range.first_tensor), left_over_.as<float>() + range.begin,
       static_cast<size_t>(range.elements()) * sizeof(float));
}

void RankTrainer::harvest(Slot& slot, const Event* next_start) {
  const Event& end = next_start != nullptr ? *next_start : slot.end;
  slot.wait_begin = std::chrono::steady_clock::now();
  end.synchronize();
  if (deferred_) slot.end.synchronize();  // inside the next step
  // Report only steps that will not be repeated.
  if (shared_.elastic != nullptr) {
    slot.kept.synchronize();
    comm_.check();
    joiners_wait_ = shared_.elastic->joiners_wait(slot.step + 1);
  }
  slot.wait_end = std::chrono::steady_clock::now();
  comm_.check();
  if (dump_ && slot.step == config_.gradients_step) dump_->write();
  const double* totals = slot.totals.as<double>();
  RankReports::Report mine{.loss = totals[0], .correct = totals[1], .images = images_ * config_.accumulate};
  constexpr std::chrono::seconds kBetweenWaits{1};
  if (comm_.world() > 1 && slot.wait_end >= waits_due_) {
    mine.waited_s = comm_.waited_s();
    waits_due_ = slot.wait_end + kBetweenWaits;
  }
  shared_.reports.post(comm_.rank(), mine);
  if (leads()) report(slot, end);
  if (deferred_) deferred_->measured(slot.backward_ms(), reducer_.stats(slot.step).comm_ms);
  trace_.add(slot, end, stream_.name(), reducer_);
}

void RankTrainer::report(const Slot& slot, const Event& end) {
  const std::vector<RankReports::Report> reports = shared_.reports.collect();
  const RankReports::Report all = sum(reports);
  ReducerStats stats = reducer_.stats(slot.step);
  StepRecord record{.step = slot.step,
                    .epoch = data_step(slot.step) / steps_per_epoch_,
                    .loss = all.loss / static_cast<double>(all.images),
                    .lr = slot.lr};
  record.step_ms = elapsed_ms(slot.micros.front().data, end);
  record.images_per_s = static_cast<double>(config_.global_batch()) / (record.step_ms * 1e-3);
  record.wire_bytes = stats.wire_bytes + slot.weights.wire;
  record.dense_bytes = stats.dense_bytes + slot.weights.dense;
  record.comm_ms = stats.comm_ms;
  record.compress_ms = stats.compress_ms;
  record.communicate_ms = stats.communicate_ms;
  record.decompress_ms = stats.decompress_ms;
  record.exposed_comm_ms = stats.exposed_comm_ms;
  for (const TrainingMarks::Micro& marks : slot.micros) {
    record.data_ms += elapsed_ms(marks.data, marks.forward);
    record.forward_ms += elapsed_ms(marks.forward, marks.backward);
  }
  record.backward_ms = slot.backward_ms();
  record.optimizer_ms = elapsed_ms(slot.reduced, slot.end);
  for (const TrainingMarks::Update& update : slot.updates) {
    record.exposed_comm_ms += elapsed_ms(update.wait, update.begin);
    record.optimizer_ms += elapsed_ms(update.begin, update.end);
  }
  record.forward_ms -= before_ms_;
  before_ms_ = slot.updated_in_forward ? record.exposed_comm_ms + record.optimizer_ms : 0;
  record.tflops = training_flops_per_image(config_.model) *
                  static_cast<double>(images_per_device(config_, images_)) / (record.step_ms * 1e9);
  shared_.observer.on_step(record);
  report_waits(slot, reports);
}

// Each rank adds its waits to a report when a second has passed on its own clock, so the latest reports
// belong to the same second.
void RankTrainer::report_waits(const Slot& slot, const std::vector<RankReports::Report>& reports) {
  latest_waits_.resize(reports.size());
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].waited_s.empty()) latest_waits_[rank] = reports[rank].waited_s;
  }
  const bool know_all =
      std::none_of(latest_waits_.begin(), latest_waits_.end(), [](const auto& of) { return of.empty(); });
  if (!know_all || reports[0].waited_s.empty()) return;
  if (!first_waits_) first_waits_ = slot.wait_end;
  shared_.observer.on_waits({.step = slot.step + 1,
                             .seconds = std::chrono::duration<double>(slot.wait_end - *first_waits_).count(),
                             .waited_s = latest_waits_});
}

void RankTrainer::evaluate(int64_t steps_done) {
  shared_.reports.post(comm_.rank(), evaluator_->run());
  if (!leads()) return;
  RankReports::Report all = sum(shared_.reports.collect());
  const double count = static_cast<double>(all.images);
  shared_.observer.on_eval(
      {.step = steps_done,
       .epoch = static_cast<double>(data_step(steps_done)) / static_cast<double>(steps_per_epoch_),
       .test_loss = all.loss / count,
       .test_accuracy = all.correct / count,
       .images = all.images});
  if (shared_.elastic != nullptr) shared_.elastic->evaluated(steps_done);
}

Position RankTrainer::position(int64_t steps_done) const {
  const int64_t at = data_step(steps_done);
  return {.step = steps_done,
          .epoch = at / steps_per_epoch_,
          .images = at % steps_per_epoch_ * config_.global_batch()};
}

void RankTrainer::save(int64_t steps_done) {
  const auto begin = std::chrono::steady_clock::now();
  // save_checkpoint() exchanges on stream_, while the window's streams may still be gathering weights.
  if (shards_ && shards_->window() != nullptr) shards_->window()->synchronize();
  const SavedCheckpoint saved = save_checkpoint(state(), config_, position(steps_done));
  if (!leads()) return;
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  shared_.observer.on_checkpoint(
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
          .divided = shards_.has_value(),
          .left_over = [this] {
            if (!reducer_.shard()) return reducer_.gradients().as<float>();
            left_over_ =
                Buffer::pinned(stream_.device(), static_cast<size_t>(layout_.elements) * sizeof(float));
            return left_over_.as<float>();
          }};
}

void RankTrainer::restore() {
  carried_ =
      start_.from ? restore_checkpoint(state(), config_, *start_.from) : shared_.elastic->restore(state());
  if (shards_) {
    shards_->share_weights();
  } else {
    model_.round_weights();
  }
}

void RankTrainer::finish() {
  uint64_t hash = kNoParameters;
  auto add = [&](const float* weights, int64_t count) {
    hash = parameter_hash(to_host(stream_, weights, count), hash);
  };
  if (shards_) {
    shards_->visit(add);
  } else {
    add(model_.weights().as<const float>(), layout_.elements);
  }
  shared_.reports.post(
      comm_.rank(), {.hash = hash, .waited_s = comm_.world() > 1 ? comm_.waited_s() : std::vector<double>{}});
  if (!leads()) return;
  std::vector<RankReports::Report> entries = shared_.reports.collect();
  for (size_t rank = 1; rank < entries.size(); ++rank) {
    if (entries[rank].hash != hash) {
      throw Error(
          fmt::format("rank {} ended with parameters that differ from rank 0's (hash {}, rank 0 has {}): the "
                      "averaged gradients were not bit-identical on all ranks",
                      rank, hex(entries[rank].hash), hex(hash)));
    }
  }
  std::vector<std::vector<double>> waited;
  for (RankReports::Report& entry : entries) {
    if (!entry.waited_s.empty()) waited.push_back(std::move(entry.waited_s));
  }
  // Ranks that are processes do not share their devices' memory.
  const auto here =
      config_.processes ? 1 : std::count(config_.devices.begin(), config_.devices.end(), comm_.device());
  shared_.observer.on_end({.parameter_hash = hash,
                           .waited_s = std::move(waited),
                           .memory_bytes = memory_use(comm_.device()).peak / here});
  if (shared_.elastic != nullptr) shared_.elastic->finished();
}

}  // namespace gradwire
