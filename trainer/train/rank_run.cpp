#include "trainer/train/rank_run.h"

#include <algorithm>
#include <utility>

namespace gradwire {
namespace {

// After a plan that was questioned and kept, the next alarm must wait, twice as long each time.
constexpr int64_t kFirstQuiet = 100, kMostQuiet = 10'000;

}  // namespace

RankRun::RankRun(const SharedRun& shared, Communicator& comm)
    : config_(shared.config),
      shared_{.config = config_,
              .data = shared.data,
              .observer = shared.observer,
              .reports = shared.reports,
              .initial = shared.initial,
              .peaks = shared.peaks,
              .trace = shared.trace,
              .instant = shared.instant,
              .elastic = shared.elastic,
              .plan = shared.plan},
      comm_(comm) {}

RankRun::~RankRun() = default;

void RankRun::run() {
  while (true) {
    trainer_ = std::make_unique<RankTrainer>(shared_, comm_);
    if (handover_) handover_->free();
    trainer_->run();
    if (!trainer_->handover()) return;
    handover_ = std::move(trainer_->handover());
    trainer_.reset();  // frees the memory that the measurement needs
    replan();
  }
}

void RankRun::replan() {
  const std::string before = plan_flags(config_);
  const RanksReport report = choose_again(config_, *shared_.plan, shared_.data, handover_->weights, comm_);
  apply_choice(report, config_);
  config_.resume.clear();  // handover_ has the state
  const int64_t step = handover_->position.step;
  record_ = {.step = step,
             .why = handover_->why,
             .before = before,
             .after = plan_flags(config_),
             .predicted = predicted_step(report),
             .choice = choice_record(report, shared_.plan->request, config_.model, step, handover_->why)};
  quiet_ = record_->before == record_->after ? std::clamp(2 * quiet_, kFirstQuiet, kMostQuiet) : 0;
  shared_.handover = &*handover_;
  shared_.replanned = &*record_;
  shared_.quiet = quiet_;
}

void RankRun::keep_trace() {
  if (trainer_) trainer_->keep_trace();
}

}  // namespace gradwire
