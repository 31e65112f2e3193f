#include "trainer/train/elastic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "collectives/agreement/all_gather.h"
#include "runtime/error.h"
#include "trainer/checkpoint/folder.h"

namespace gradwire {
namespace {

// All ranks hear of a failure within the deadline and five seconds (docs/faults.md).
constexpr std::chrono::seconds kBeyondDeadline{10};

}  // namespace

Elastic::Elastic(const TrainConfig& config, Communicator& comm)
    : launched_(config), config_(config), first_(comm), ranks_(static_cast<size_t>(comm.world())) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
}

TrainConfig Elastic::config_for(int world) const {
  TrainConfig config = launched_;
  config.resume.clear();
  config.trace.clear();
  config.measure_peak = false;
  if (world == launched_.ranks()) return config;
  config.devices.resize(static_cast<size_t>(world));
  config.ranks_per_node = config.ranks_here = 0;  // nodes are no longer equal
  if (config.elastic_batch == ElasticBatch::keep_global) {
    config.shared_batch = launched_.micro_batch();
    config.batch_size = (config.shared_batch + world - 1) / world;
  } else {
    config.lr *= static_cast<double>(world) / launched_.ranks();
  }
  return config;
}

std::string Elastic::remedy() const {
  const std::string& folder = launched_.checkpoint_directory;
  if (folder.empty()) return "start the run again; with --checkpoint DIR it could be resumed";
  return fmt::format("go on from the newest checkpoint with --checkpoint {0} --resume {0}", folder);
}

void Elastic::regroup(const std::string& why) {
  if (!failed_at_) {
    failed_at_ = std::chrono::steady_clock::now();
    why_ = why;
  }
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(launched_.timeout_s * 1e3));
  std::vector<int> left;
  std::unique_ptr<Communicator> next;
  try {
    next = comm().regroup(timeout + kBeyondDeadline, left);
  } catch (const CommError& error) {
    throw CommError(fmt::format("{}; --elastic cannot go on: {}; if no other rank has gone on, {}", why,
                                error.what(), remedy()));
  }
  for (int& rank : left) rank = ranks_[static_cast<size_t>(rank)];
  const size_t lost_before = lost_.size();
  std::set_difference(ranks_.begin(), ranks_.end(), left.begin(), left.end(), std::back_inserter(lost_));
  lost_any_ = lost_.size() > lost_before;
  std::sort(lost_.begin(), lost_.end());
  ranks_ = std::move(left);
  group_ = std::move(next);
  if (comm().world() < launched_.elastic.least) {
    std::vector<int> all(static_cast<size_t>(launched_.ranks())), gone;
    std::iota(all.begin(), all.end(), 0);
    std::set_difference(all.begin(), all.end(), ranks_.begin(), ranks_.end(), std::back_inserter(gone));
    throw Error(
        fmt::format("{} of {} ranks are left (lost: {}), fewer than the {} that --elastic {} asks for; {}. "
                    "The first error: {}",
                    comm().world(), launched_.ranks(), fmt::join(gone, ", "), launched_.elastic.least,
                    launched_.elastic.to_string(), remedy(), why_));
  }
  config_ = config_for(comm().world());
}

bool Elastic::agree() {
  if (!group_) return true;
  const Stream stream = Stream::immediate_host();
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const auto told = all_gather(comm().transport(), stream,
                               {number(*kept_.newest()), number(evaluated_), number(finished_ ? 1 : 0)},
                               "the step to go on from");
  double oldest = told[0][0];
  for (const auto& theirs : told) oldest = std::min(oldest, theirs[0]);
  const auto step = static_cast<int64_t>(oldest);
  if (told[0][2] != 0) return false;
  const bool got_further = lost_any_ || !start_ || start_->position.step != step;
  fruitless_ = got_further ? 0 : fruitless_ + 1;
  if (fruitless_ > 1) {
    throw Error(fmt::format("step {} breaks again and again, though no rank is lost: {}", step, why_));
  }
  kept_.go_back_to(step);
  const KeptSteps::Kept& kept = kept_.at(step);
  bool saved = false;
  if (kept.due.checkpoint) {  // a rank that wrote its part of one does not know whether rank 0 got to the end
    const std::string path = NewCheckpoint::final_path(launched_.checkpoint_directory, step);
    saved = all_gather(comm().transport(), stream, {number(checkpoint_world(path))},
                       "the last checkpoint")[0][0] > 0;
  }
  start_ = {kept.position, kept.due.evaluation && told[0][1] != oldest, kept.due.checkpoint && !saved};
  return true;
}

ShrinkRecord Elastic::resumed() {
  const KeptSteps::Kept& kept = kept_.at(start_->position.step);
  ShrinkRecord record{.step = start_->position.step,
                      .lost = std::move(lost_),
                      .ranks = ranks_,
                      .global_batch = config_.global_batch(),
                      .lr = config_.lr,
                      .why = std::move(why_)};
  for (const int rank : record.lost) {
    const auto at = std::find(kept.ranks.begin(), kept.ranks.end(), rank);
    record.lost_residual_norms.push_back(
        at == kept.ranks.end() ? std::numeric_limits<double>::quiet_NaN()
                               : kept.residual_norms[static_cast<size_t>(at - kept.ranks.begin())]);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - *failed_at_;
  record.seconds = took.count();
  lost_.clear();
  why_.clear();
  failed_at_.reset();
  return record;
}

void Elastic::keep(const RankState& rank, const Position& position, KeptSteps::Due due) {
  if (comm().world() > 1) kept_.keep(rank, ranks_, position, due);
}

}  // namespace gradwire
