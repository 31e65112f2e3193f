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
    if (plan_change_) plan_change_->free();
    trainer_->run();
    if (!trainer_->plan_change()) return;
    plan_change_ = std::move(trainer_->plan_change());
    trainer_.reset();  // frees the memory that the measurement needs
    replan();
  }
}

void RankRun::replan() {
  const std::string before = plan_flags(config_);
  const RanksReport report = choose_again(config_, *shared_.plan, shared_.data, plan_change_->weights, comm_);
  apply_choice(report, config_);
  config_.resume.clear();  // plan_change_ has the state
  const int64_t step = plan_change_->position.step;
  record_ = {.step = step,
             .why = plan_change_->why,
             .before = before,
             .after = plan_flags(config_),
             .predicted = predicted_step(report),
             .choice = choice_record(report, shared_.plan->request, config_.model, step, plan_change_->why)};
  quiet_ = record_->before == record_->after ? std::clamp(2 * quiet_, kFirstQuiet, kMostQuiet) : 0;
  shared_.plan_change = &*plan_change_;
  shared_.replanned = &*record_;
  shared_.quiet = quiet_;
}

void RankRun::keep_trace() {
  if (trainer_) trainer_->keep_trace();
}

}  // namespace gradwire
