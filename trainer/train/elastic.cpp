#include "trainer/train/elastic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "collectives/agreement/statements.h"
#include "collectives/net/store.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/config/config.h"
#include "trainer/train/snapshots.h"

namespace gradwire {
namespace {

// Time beyond the deadline to wait for survivors. All ranks learn of a failure within the deadline plus five
// seconds (docs/faults.md).
constexpr std::chrono::seconds kBeyondDeadline{10};

// A rank's description of the step to continue from. The struct has no padding, because ranks send its bytes.
struct StepDescription {
  int64_t epoch = 0, images = 0;
  int64_t evaluation_due = 0, checkpoint_due = 0;  // 0 or 1
  double residual_norm = 0;                        // norm of this rank's residual
};
static_assert(sizeof(StepDescription) == 40);

// Returns the settings without the launch-specific values.
TrainConfig as_launched(TrainConfig config) {
  config.resume.clear();
  config.trace.clear();
  config.trace_steps = {};
  config.measure_peak = false;
  config.ranks_per_node = config.ranks_here = 0;  // later, nodes can have different numbers of ranks
  return config;
}

}  // namespace

Elastic::Elastic(const TrainConfig& config, Communicator& comm)
    : launched_(as_launched(config)),
      from_checkpoints_(config.divides_optimizer()),
      resumed_(config.resume),
      config_(config),
      first_(&comm),
      ranks_(static_cast<size_t>(comm.world())),
      next_number_(comm.world()),
      snapshots_(!from_checkpoints_) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  record_.reported = ranks_;
}

Elastic::Elastic(const TrainConfig& config)
    : launched_(as_launched(config)),
      from_checkpoints_(config.divides_optimizer()),
      config_(launched_),
      first_(nullptr),
      snapshots_(!from_checkpoints_) {}

Elastic::~Elastic() {
  if (first_ == nullptr && !group_) return;
  comm().transport().close_admission();
}

TrainConfig Elastic::config_for(int world) const {
  TrainConfig config = launched_;
  if (world == launched_.ranks()) return config;
  config.devices.resize(static_cast<size_t>(world), launched_.devices[0]);
  if (config.elastic_batch == ElasticBatch::keep_global) {
    config.shared_batch = launched_.micro_batch();
    config.batch_size = (config.shared_batch + world - 1) / world;
  } else {
    const double share = static_cast<double>(world) / launched_.ranks();
    config.lr *= share;
    config.dion_lr *= share;
  }
  return config;
}

std::string Elastic::remedy() const {
  const std::string& folder = launched_.checkpoint_directory;
  if (folder.empty()) return "start the run again; with --checkpoint DIR it could be resumed";
  return fmt::format("continue from the newest checkpoint with --checkpoint {0} --resume {0}", folder);
}

void Elastic::regroup(const std::string& why) {
  if (!record_.failed_at) {
    record_.failed_at = std::chrono::steady_clock::now();
    record_.why = why;
  }
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(launched_.timeout_s * 1e3));
  std::vector<int> left;
  std::unique_ptr<Communicator> next;
  try {
    next = comm().regroup(timeout + kBeyondDeadline, left);
  } catch (const CommError& error) {
    throw CommError("{}; --elastic cannot continue: {}; if no other rank has continued, {}", why,
                    error.what(), remedy());
  }
  for (int& rank : left) rank = rank < 0 ? kUnknown : ranks_[static_cast<size_t>(rank)];
  ranks_changed_ = ranks_changed_ || left != ranks_;
  ranks_ = std::move(left);
  group_ = std::move(next);
  if (comm().world() < launched_.elastic.least) {
    std::vector<int> gone;
    for (int rank = 0; rank < next_number_; ++rank) {
      if (std::find(ranks_.begin(), ranks_.end(), rank) == ranks_.end()) gone.push_back(rank);
    }
    throw Error(
        "{} of {} ranks are left (lost: {}), fewer than the {} that --elastic {} asks for; {}. "
        "The first error: {}",
        comm().world(), next_number_, fmt::join(gone, ", "), launched_.elastic.least,
        launched_.elastic.to_string(), remedy(), record_.why);
  }
  config_ = config_for(comm().world());
}

int64_t Elastic::reached() const {
  const int64_t begun_with = from_checkpoints_ && start_ ? start_->position.step : -1;
  return snapshots_.newest().value_or(begun_with);
}

// Returns to the newest checkpoint. The checkpoint belongs to this run, because a run does not start in a
// folder with other checkpoints (cli/resolve.cpp).
void Elastic::go_back_to_checkpoint() {
  const std::string& folder = launched_.checkpoint_directory;
  int64_t found = -1;
  if (comm().rank() == 0) {
    const std::optional<std::string> newest = find_checkpoint(folder).path;
    if (newest) found = read_head(*newest).position.step;
  }
  const int64_t step =
      all_gather_value(comm().transport(), Stream::immediate_host(), found, "the newest checkpoint")[0];
  config_.resume = step < 0 ? resumed_ : NewCheckpoint::final_path(folder, step);
  start_ = Start{config_.resume.empty() ? Position{} : read_head(config_.resume).position};
  joiners_.clear();
  snapshots_.drop_after(-1);
}

bool Elastic::agree() {
  if (!group_) return true;
  const ElasticState mine{.reached = reached(),
                          .evaluated = evaluated_,
                          .finished = finished_ ? 1 : 0,
                          .number = ranks_[static_cast<size_t>(comm().rank())],
                          .next_number = next_number_};
  const std::vector<ElasticState> states =
      all_gather_value(comm().transport(), Stream::immediate_host(), mine, "the step to continue from");
  joiners_.clear();
  int64_t step = std::numeric_limits<int64_t>::max();
  for (size_t r = 0; r < states.size(); ++r) {
    if (states[r].reached < 0) joiners_.push_back(static_cast<int>(r));
    if (states[r].reached >= 0) step = std::min(step, states[r].reached);
  }
  if (joiners_.size() == states.size()) {
    throw Error("all ranks that had the run's state are lost; {}", remedy());
  }
  if (states[0].finished != 0) return false;
  for (const ElasticState& state : states)
    next_number_ = std::max(next_number_, static_cast<int>(state.next_number));
  for (size_t r = 0; r < states.size(); ++r) {  // joiners get the next numbers, in rank order
    const int known = static_cast<int>(states[r].number);
    ranks_[r] = known == kUnknown ? next_number_++ : known;
  }
  const bool progress = ranks_changed_ || broke_at_ != step;
  fruitless_ = progress ? 0 : fruitless_ + 1;
  broke_at_ = step;
  ranks_changed_ = false;
  if (fruitless_ > 1) {
    throw Error("step {} breaks again and again, though no rank is lost: {}", step, record_.why);
  }
  if (from_checkpoints_) {
    go_back_to_checkpoint();
    return true;
  }
  agree_on_kept(step);
  const Snapshots::Pending& pending = start_snapshot_.pending;
  // Whether rank 0 has completed the checkpoint: the others know only whether their part is complete.
  const bool saved =
      pending.checkpoint &&
      all_gather_value(comm().transport(), Stream::immediate_host(),
                       checkpoint_world(NewCheckpoint::final_path(launched_.checkpoint_directory, step)),
                       "the last checkpoint")[0] > 0;
  start_ = {start_snapshot_.position, pending.evaluation && states[0].evaluated != step,
            pending.checkpoint && !saved};
  return true;
}

bool Elastic::is_joiner() {
  return std::find(joiners_.begin(), joiners_.end(), comm().rank()) != joiners_.end();
}

// Shares rank 0's description of the step, and the residual norm of every rank in the group.
void Elastic::agree_on_kept(int64_t step) {
  if (!is_joiner()) {
    snapshots_.drop_after(step);
    start_snapshot_ = snapshots_.at(step);
  }
  if (joiners_.empty()) return;
  StepDescription mine{.epoch = start_snapshot_.position.epoch,
                       .images = start_snapshot_.position.images,
                       .evaluation_due = start_snapshot_.pending.evaluation ? 1 : 0,
                       .checkpoint_due = start_snapshot_.pending.checkpoint ? 1 : 0};
  if (!is_joiner()) {
    const int number = ranks_[static_cast<size_t>(comm().rank())];
    const auto at = std::find(start_snapshot_.ranks.begin(), start_snapshot_.ranks.end(), number);
    mine.residual_norm =
        start_snapshot_.residual_norms.at(static_cast<size_t>(at - start_snapshot_.ranks.begin()));
  }
  const std::vector<StepDescription> all =
      all_gather_value(comm().transport(), Stream::immediate_host(), mine, "the state to continue from");
  if (is_joiner()) {
    start_snapshot_ = {
        .position = {.step = step, .epoch = all[0].epoch, .images = all[0].images},
        .pending = {.evaluation = all[0].evaluation_due != 0, .checkpoint = all[0].checkpoint_due != 0},
        .ranks = {},
        .residual_norms = {}};
  }
  // Adds the group's ranks to the description. Lost ranks remain in the description while the run may return
  // to this step.
  for (size_t r = 0; r < all.size(); ++r) {
    if (std::find(start_snapshot_.ranks.begin(), start_snapshot_.ranks.end(), ranks_[r]) !=
        start_snapshot_.ranks.end())
      continue;
    start_snapshot_.ranks.push_back(ranks_[r]);
    start_snapshot_.residual_norms.push_back(all[r].residual_norm);
  }
  if (!is_joiner()) snapshots_.describe(start_snapshot_);
}

bool Elastic::restore(const RankState& rank) {
  const bool joins = is_joiner();
  const bool carried = !joins && snapshots_.restore(rank, start_->position.step);
  if (joiners_.empty()) return carried;
  transfer_state(rank, joiners_);
  if (joins) {
    rank.reducer.resume_at(start_->position.step);
    snapshots_.take_first(rank, start_snapshot_);
  }
  joiners_.clear();
  return carried;
}

std::vector<GroupRecord> Elastic::resumed() {
  constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();
  const auto now = std::chrono::steady_clock::now();
  std::vector<GroupRecord> changes;
  const auto add = [&](const auto& since) -> GroupRecord& {
    const double seconds = since ? std::chrono::duration<double>(now - *since).count() : kNotKnown;
    return changes.emplace_back(GroupRecord{.step = start_->position.step,
                                            .ranks = ranks_,
                                            .global_batch = config_.global_batch(),
                                            .lr = config_.lr,
                                            .seconds = seconds});
  };
  const auto only_in = [](const std::vector<int>& these, const std::vector<int>& those) {
    std::vector<int> rest;
    std::set_difference(these.begin(), these.end(), those.begin(), those.end(), std::back_inserter(rest));
    return rest;
  };
  if (std::vector<int> joined = only_in(ranks_, record_.reported); !joined.empty())
    add(record_.stopped_at).joined = std::move(joined);
  if (record_.failed_at) {
    GroupRecord& record = add(record_.failed_at);
    record.lost = only_in(record_.reported, ranks_);
    record.why = std::move(record_.why);
    record.goes_back = from_checkpoints_;
    for (const int rank : record.lost) {
      const auto at = std::find(start_snapshot_.ranks.begin(), start_snapshot_.ranks.end(), rank);
      const auto index = static_cast<size_t>(at - start_snapshot_.ranks.begin());
      const bool known = at != start_snapshot_.ranks.end();
      // The checkpoint has the residual.
      record.lost_residual_norms.push_back(from_checkpoints_ ? 0
                                           : known           ? start_snapshot_.residual_norms[index]
                                                             : kNotKnown);
    }
  }
  record_ = {.reported = ranks_};
  return changes;
}

// ---- New ranks

void Elastic::open_admission(std::function<std::string(const std::string&)> validate) {
  comm().transport().open_admission(launched_.elastic.most, std::move(validate));
}

void Elastic::post_members() {
  if (launched_.members.empty() || comm().rank() != 0) return;
  try {
    const std::string invitation = comm().transport().invitation();
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
  if (next_) record_.stopped_at = now;
  return has_grown();
}

void Elastic::move_on() {
  group_ = std::move(next_);
  ranks_.resize(static_cast<size_t>(group_->world()), kUnknown);
  ranks_changed_ = true;
  config_ = config_for(group_->world());
}

void Elastic::take_snapshot(const RankState& rank, const Position& position, Snapshots::Pending pending) {
  snapshots_.take(rank, ranks_, position, pending);
}

}  // namespace gradwire
