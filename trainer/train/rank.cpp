#include "trainer/train/rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "collectives/agreement/statements.h"
#include "collectives/transport/transport.h"
#include "runtime/util/error.h"
#include "runtime/util/signals.h"
#include "trainer/measure/peaks.h"
#include "trainer/train/choose_compression.h"
#include "trainer/train/layout.h"
#include "trainer/train/parameter_hash.h"
#include "trainer/train/train_loader.h"

namespace gradwire {
namespace {

// Returns the first step to capture: a step can be captured after one normal run (kernels loaded, connections
// open), and once all later steps are alike.
int64_t first_graph_step(const TrainConfig& config, Communicator& comm, const Reducer& reducer,
                         int64_t first_step) {
  if (!config.graph) return config.steps;
  if (const std::string obstacle = comm.transport().capture_obstacle(); !obstacle.empty()) {
    throw BadInput(fmt::format("--graph: {}", obstacle));
  }
  return std::max(first_step, reducer.steady_from()) + 1;
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
  if (shared.plan_change != nullptr) at = shared.plan_change->position;
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
      reporter_(config_, comm, reducer_, shared.reports, shared.observer, images_,
                shared.plan_change != nullptr ? shared.plan_change->clock : RunReporter::Clock{}),
      steps_per_epoch_(loader_.batches_per_epoch() / config_.accumulate),
      graph_from_(first_graph_step(config_, comm, reducer_, start_.step)),
      gradients_(reducer_.gradients().as<float>()),
      totals_(make_buffer<double>(comm.device(), 2)) {
  // Wait, because loading may throw. The exception would free memory that the stream may still be zeroing.
  stream_.synchronize();
  if (config_.divides_optimizer()) shards_.emplace(config_, comm, stream_, reducer_, model_);
  const bool snapshot = start_.again != nullptr && !shared.elastic->from_checkpoints();
  if (start_.from || snapshot || shared.plan_change != nullptr) {
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
  create_slots();
  prepare_plan_checks();
  if (shared.elastic != nullptr && start_.from && carried_ && !shared.elastic->from_checkpoints()) {
    throw BadInput(fmt::format(
        "--elastic: the run cannot keep the residuals in checkpoint {}: they go into the gradients of the "
        "first step, which could then not be repeated; resume without --elastic up to the next checkpoint",
        start_.from->path));
  }
  if (!snapshot) take_snapshot(start_.step);
  stream_.synchronize();
}

void RankTrainer::create_slots() {
  for (Slot& slot : slots_) {
    auto event = [&] { return Event::create_timer(comm_.device()); };
    for (int64_t i = 0; i < config_.accumulate; ++i)
      slot.micros.push_back({event(), event(), event(), event()});
    slot.reduced = event();
    slot.end = event();
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
  finish_run();
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
  return may_end && step + 1 < config_.steps && step + 1 >= end_check_.next;
}

bool RankTrainer::agree_to_end(int64_t steps_done, bool saved) {
  // The steps to the next agreement, of which rank 0's number holds: as many as took a second.
  const auto now = std::chrono::steady_clock::now();
  const auto steps = static_cast<double>(steps_done - std::max(end_check_.step, start_.step));
  const std::chrono::duration<double> took = now - end_check_.at;
  const double diverged = config_.ends_diverged && reporter_.diverged() ? 1 : 0;
  const std::vector<double> mine{static_cast<double>(requested_end()), diverged,
                                 std::clamp(std::floor(steps / took.count()), 1.0, 2 * steps)};
  const auto all = all_gather(comm_.transport(), stream_, mine, "whether the run ends");
  end_check_ = {steps_done, steps_done + static_cast<int64_t>(all[0][2]), now};
  const int signal = static_cast<int>((*std::max_element(all.begin(), all.end()))[0]);
  if (signal == 0) return all[0][1] != 0;
  if (!saved) save(steps_done);
  comm_.barrier();  // rank 0 has completed the checkpoint: now launchers may end the other ranks
  // With --elastic a rank leaves alone, and the others continue.
  if (shared_.elastic == nullptr || requested_end() != 0) end_by_signal(signal);
  return false;
}

void RankTrainer::start_run() {
  if (shared_.replanned != nullptr) {
    if (!leads()) return;
    ReplanRecord record = *shared_.replanned;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - shared_.plan_change->began;
    record.seconds = took.count();
    record.buckets = reducer_.buckets();
    record.schedule = reducer_.schedule();
    return shared_.observer.on_replan(record);
  }
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

void RankTrainer::take_snapshot(int64_t steps_done) {
  if (shared_.elastic == nullptr) return;
  const int64_t last = steps_done - 1;
  const bool first = steps_done == start_.step;  // no work is due before the first step
  shared_.elastic->take_snapshot(
      state(), position(steps_done),
      {.evaluation = !first && evaluation_follows(last), .checkpoint = !first && checkpoint_follows(last)});
}

// Loads the model's weights or, with --shard, this rank's shards. `weights`: all weights, in host memory.
void RankTrainer::load(std::span<const float> weights) {
  if (!shards_) return model_.load(weights);
  shards_->take_weights(weights.data());
  stream_.synchronize();  // waits before the caller frees the memory
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
          .divided = shards_.has_value()};
}

void RankTrainer::restore() {
  if (shared_.plan_change != nullptr) {
    carried_ = shared_.plan_change->restore(state(), config_.compression);
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

void RankTrainer::finish_run() {
  reporter_.report_end(
      parameter_hash(to_host(stream_, model_.weights().as<const float>(), layout_.elements)));
  if (leads() && shared_.elastic != nullptr) shared_.elastic->finished();
}

}  // namespace gradwire
