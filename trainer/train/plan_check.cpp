// Whether the plan of --compression auto still holds. Rank 0 watches the steps, and all ranks agree between
// two steps to choose again.
#include <chrono>
#include <optional>

#include "collectives/agreement/statements.h"
#include "trainer/measure/peaks.h"
#include "trainer/train/choose_compression.h"
#include "trainer/train/layout.h"
#include "trainer/train/rank.h"

namespace gradwire {
namespace {

// Steps between two agreements: each waits for the latest step. With DriftDetector's 9 steps, a change leads
// to another plan within 30 steps.
constexpr int64_t kAgreeEvery = 20;
constexpr int64_t kErrorEvery = 200;  // steps between measurements of the error, which take one encode

}  // namespace

void RankTrainer::prepare_plan_checks() {
  if (shared_.plan == nullptr || !leads()) return;
  DriftDetector::Options options{.error_limit = shared_.plan->request.error, .quiet = shared_.quiet};
  options.predicted = shared_.plan->predicted;
  if (shared_.replanned != nullptr) options.predicted = shared_.replanned->predicted;
  drift_.emplace(options);
  if (config_.graph || config_.compression == CompressionSpec()) return;  // FP32 has no error
  sample_layout_ = packed_layout(model_.parameters());
  sample_.emplace(config_, model_.parameters(), sample_layout_, stream_.device());
}

bool RankTrainer::samples_gradients(int64_t step) {
  // Gradients that are added to residuals are not those of a step.
  if (!sample_ || (step + 1) % kErrorEvery != 0 || carried_) return false;
  sampled_ = step;
  return true;
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
  plan_change_->why = why;
  plan_change_->spec = config_.compression.to_string();
  plan_change_->take(state());
  return true;
}

}  // namespace gradwire
