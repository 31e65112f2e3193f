#include "trainer/train/elastic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "collectives/agreement/all_gather.h"
#include "collectives/net/membership.h"
#include "runtime/util/error.h"
#include "runtime/util/output_file.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/config/members.h"
#include "trainer/train/hand_over.h"

namespace gradwire {
namespace {

// All ranks learn of a failure within the deadline plus five seconds (docs/faults.md).
constexpr std::chrono::seconds kBeyondDeadline{10};

// Returns the settings without those that are specific to the launch.
TrainConfig as_launched(TrainConfig config) {
  config.resume.clear();
  config.trace.clear();
  config.trace_steps = {};
  config.measure_peak = false;
  config.ranks_per_node = config.ranks_here = 0;  // nodes will differ in size
  return config;
}

}  // namespace

Elastic::Elastic(const TrainConfig& config, Communicator& comm)
    : launched_(as_launched(config)),
      from_checkpoints_(config.divides(Sharding::optimizer)),
      resumed_(config.resume),
      config_(config),
      first_(&comm),
      ranks_(static_cast<size_t>(comm.world())),
      next_number_(comm.world()),
      kept_(!from_checkpoints_) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  reported_ = ranks_;
}

Elastic::Elastic(const TrainConfig& config)
    : launched_(as_launched(config)),
      from_checkpoints_(config.divides(Sharding::optimizer)),
      config_(launched_),
      first_(nullptr),
      kept_(!from_checkpoints_) {}

Elastic::~Elastic() {
  if (first_ == nullptr && !group_) return;
  if (Admission* admission = comm().transport().admission()) admission->close_admission();
}

TrainConfig Elastic::config_for(int world) const {
  TrainConfig config = launched_;
  if (world == launched_.ranks()) return config;
  config.devices.resize(static_cast<size_t>(world), launched_.devices[0]);
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
  for (int& rank : left) rank = rank < 0 ? kUnknown : ranks_[static_cast<size_t>(rank)];
  others_ = others_ || left != ranks_;
  ranks_ = std::move(left);
  group_ = std::move(next);
  if (comm().world() < launched_.elastic.least) {
    std::vector<int> gone;
    for (int rank = 0; rank < next_number_; ++rank) {
      if (std::find(ranks_.begin(), ranks_.end(), rank) == ranks_.end()) gone.push_back(rank);
    }
    throw Error(
        fmt::format("{} of {} ranks are left (lost: {}), fewer than the {} that --elastic {} asks for; {}. "
                    "The first error: {}",
                    comm().world(), next_number_, fmt::join(gone, ", "), launched_.elastic.least,
                    launched_.elastic.to_string(), remedy(), why_));
  }
  config_ = config_for(comm().world());
}

int64_t Elastic::reached() const {
  const int64_t begun_with = from_checkpoints_ && start_ ? start_->position.step : -1;
  return kept_.newest().value_or(begun_with);
}

// Returns to the newest checkpoint. It belongs to this run: a run does not start in a folder with other
// checkpoints (cli/resolve_run.cpp).
void Elastic::go_back_to_checkpoint() {
  const std::string& folder = launched_.checkpoint_directory;
  double found = -1;
  if (comm().rank() == 0) {
    const std::optional<std::string> newest = find_checkpoint(folder).path;
    if (newest) found = static_cast<double>(read_head(*newest).position.step);
  }
  const double step =
      all_gather(comm().transport(), Stream::immediate_host(), {found}, "the newest checkpoint")[0][0];
  config_.resume = step < 0 ? resumed_ : NewCheckpoint::final_path(folder, static_cast<int64_t>(step));
  start_ = Start{config_.resume.empty() ? Position{} : read_head(config_.resume).position};
  joiners_.clear();
  kept_.go_back_to(-1);
}

bool Elastic::agree() {
  if (!group_) return true;
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const auto me = static_cast<size_t>(comm().rank());
  const auto told = all_gather(comm().transport(), Stream::immediate_host(),
                               {number(reached()), number(evaluated_), number(finished_ ? 1 : 0),
                                number(ranks_[me]), number(next_number_)},
                               "the step to go on from");
  joiners_.clear();
  double oldest = std::numeric_limits<double>::infinity();
  for (size_t r = 0; r < told.size(); ++r) {
    if (told[r][0] < 0) joiners_.push_back(static_cast<int>(r));
    if (told[r][0] >= 0) oldest = std::min(oldest, told[r][0]);
  }
  if (joiners_.size() == told.size()) {
    throw Error(fmt::format("all ranks that had the run's state are lost; {}", remedy()));
  }
  if (told[0][2] != 0) return false;
  number_ranks(told);
  const auto step = static_cast<int64_t>(oldest);
  const bool got_further = others_ || broke_at_ != step;
  fruitless_ = got_further ? 0 : fruitless_ + 1;
  broke_at_ = step;
  others_ = false;
  if (fruitless_ > 1) {
    throw Error(fmt::format("step {} breaks again and again, though no rank is lost: {}", step, why_));
  }
  if (from_checkpoints_) {
    go_back_to_checkpoint();
    return true;
  }
  agree_on_kept(step);
  const KeptSteps::Due& due = start_kept_.due;
  bool saved = false;
  if (due.checkpoint) {  // a rank that wrote its part does not know whether rank 0 completed the checkpoint
    const std::string path = NewCheckpoint::final_path(launched_.checkpoint_directory, step);
    saved = all_gather(comm().transport(), Stream::immediate_host(), {number(checkpoint_world(path))},
                       "the last checkpoint")[0][0] > 0;
  }
  start_ = {start_kept_.position, due.evaluation && told[0][1] != oldest, due.checkpoint && !saved};
  return true;
}

// Gives joiners the next numbers, in rank order.
void Elastic::number_ranks(const std::vector<std::vector<double>>& told) {
  for (const auto& theirs : told) next_number_ = std::max(next_number_, static_cast<int>(theirs[4]));
  for (size_t r = 0; r < told.size(); ++r) {
    const int known = static_cast<int>(told[r][3]);
    ranks_[r] = known == kUnknown ? next_number_++ : known;
  }
}

// Shares rank 0's data on the step, and the residual norm of every rank in the group.
void Elastic::agree_on_kept(int64_t step) {
  const auto me = static_cast<size_t>(comm().rank());
  const bool joins = std::find(joiners_.begin(), joiners_.end(), comm().rank()) != joiners_.end();
  if (!joins) {
    kept_.go_back_to(step);
    start_kept_ = kept_.at(step);
  }
  if (joiners_.empty()) return;
  const KeptSteps::Kept& kept = start_kept_;
  const auto mine = std::find(kept.ranks.begin(), kept.ranks.end(), ranks_[me]) - kept.ranks.begin();
  const double norm = joins ? 0 : kept.residual_norms.at(static_cast<size_t>(mine));
  const auto told =
      all_gather(comm().transport(), Stream::immediate_host(),
                 {static_cast<double>(kept.position.epoch), static_cast<double>(kept.position.images),
                  kept.due.evaluation ? 1.0 : 0, kept.due.checkpoint ? 1.0 : 0, norm},
                 "what is known of the step to go on from");
  if (joins) {
    start_kept_ = {.position = {.step = step,
                                .epoch = static_cast<int64_t>(told[0][0]),
                                .images = static_cast<int64_t>(told[0][1])},
                   .due = {.evaluation = told[0][2] != 0, .checkpoint = told[0][3] != 0},
                   .ranks = {},
                   .residual_norms = {}};
  }
  // Keeps lost ranks as long as this step is the one to return to.
  for (size_t r = 0; r < told.size(); ++r) {
    if (std::find(start_kept_.ranks.begin(), start_kept_.ranks.end(), ranks_[r]) != start_kept_.ranks.end())
      continue;
    start_kept_.ranks.push_back(ranks_[r]);
    start_kept_.residual_norms.push_back(told[r][4]);
  }
  if (!joins) kept_.describe(start_kept_);
}

bool Elastic::restore(const RankState& rank) {
  const bool joins = std::find(joiners_.begin(), joiners_.end(), comm().rank()) != joiners_.end();
  const bool carried = !joins && kept_.restore(rank, start_->position.step);
  if (joiners_.empty()) return carried;
  hand_over(rank, joiners_);
  if (joins) {
    rank.reducer.resume_at(start_->position.step);
    kept_.begin(rank, start_kept_);
  }
  joiners_.clear();
  return carried;
}

std::vector<int> Elastic::lost() const {
  std::vector<int> lost;
  std::set_difference(reported_.begin(), reported_.end(), ranks_.begin(), ranks_.end(),
                      std::back_inserter(lost));
  return lost;
}

Elastic::Changes Elastic::resumed() {
  const auto now = std::chrono::steady_clock::now();
  const auto since = [&](const auto& begin) { return std::chrono::duration<double>(now - *begin).count(); };
  Changes changes;
  std::vector<int> joined;
  std::set_difference(ranks_.begin(), ranks_.end(), reported_.begin(), reported_.end(),
                      std::back_inserter(joined));
  if (!joined.empty()) {
    changes.grown =
        GrowRecord{.step = start_->position.step,
                   .joined = std::move(joined),
                   .ranks = ranks_,
                   .global_batch = config_.global_batch(),
                   .lr = config_.lr,
                   .seconds = stopped_at_ ? since(stopped_at_) : std::numeric_limits<double>::quiet_NaN()};
  }
  if (failed_at_) {
    ShrinkRecord& record = changes.shrunk.emplace(ShrinkRecord{.step = start_->position.step,
                                                               .lost = lost(),
                                                               .ranks = ranks_,
                                                               .global_batch = config_.global_batch(),
                                                               .lr = config_.lr,
                                                               .seconds = since(failed_at_),
                                                               .why = std::move(why_),
                                                               .goes_back = from_checkpoints_});
    for (const int rank : record.lost) {
      if (from_checkpoints_) {  // the checkpoint has the residual
        record.lost_residual_norms.push_back(0);
        continue;
      }
      const auto at = std::find(start_kept_.ranks.begin(), start_kept_.ranks.end(), rank);
      record.lost_residual_norms.push_back(
          at == start_kept_.ranks.end()
              ? std::numeric_limits<double>::quiet_NaN()
              : start_kept_.residual_norms[static_cast<size_t>(at - start_kept_.ranks.begin())]);
    }
  }
  reported_ = ranks_;
  why_.clear();
  failed_at_.reset();
  stopped_at_.reset();
  return changes;
}

// ---- New ranks

void Elastic::open_admission(std::function<std::string(const std::string&)> validate) {
  require_admission(comm().transport()).open_admission(launched_.elastic.most, std::move(validate));
}

void Elastic::post_members() {
  if (launched_.members.empty() || comm().rank() != 0) return;
  try {
    const std::string invitation = require_admission(comm().transport()).invitation();
    write_private_file(launched_.members, members_text(launched_.ranks(), invitation));
  } catch (const Error& error) {
    warn_once(fmt::format("{}; the run continues, and no rank can join it with --join", error.what()));
  }
}

void Elastic::finished() {
  finished_ = true;
  if (!launched_.members.empty()) remove_output(launched_.members);
}

void Elastic::join(std::unique_ptr<Communicator> comm) {
  group_ = std::move(comm);
  ranks_.assign(static_cast<size_t>(group_->world()), kUnknown);
  config_ = config_for(group_->world());
}

bool Elastic::grow() {
  const auto now = std::chrono::steady_clock::now();
  next_ = comm().grow();
  if (next_) stopped_at_ = now;
  return has_grown();
}

void Elastic::move_on() {
  group_ = std::move(next_);
  ranks_.resize(static_cast<size_t>(group_->world()), kUnknown);
  others_ = true;
  config_ = config_for(group_->world());
}

void Elastic::keep(const RankState& rank, const Position& position, KeptSteps::Due due) {
  kept_.keep(rank, ranks_, position, due);
}

}  // namespace gradwire
