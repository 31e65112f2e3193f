// Finds stragglers: ranks for whose data the other ranks wait.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "trainer/log/observer.h"

namespace gradwire {

struct Straggler {
  int rank = 0;
  double behind_s = 0;  // mean wait of the other ranks minus this rank's wait
  double share = 0;     // behind_s / the measured time
};

// Finds the straggler. waited_s: as in WaitRecord, collected over `seconds`. Returns nothing if no rank waits
// clearly less than the others.
std::optional<Straggler> find_straggler(const std::vector<std::vector<double>>& waited_s, double seconds);

// Collects the wait records of a run, in order.
class WaitHistory {
 public:
  // Adds a record. The history restarts if the number of ranks changes, or if time goes back, as after a
  // resume.
  void add(const WaitRecord& record);

  // Return the waits, time and steps over the last kWindow records. Empty and 0 before the second record.
  std::vector<std::vector<double>> recent_waits() const;
  double recent_seconds() const;
  int64_t recent_steps() const;

  struct Finding {
    Straggler straggler;  // the straggler in the window
    int64_t since_step = 0;
    double since_s = 0;  // the records' time at which this rank became the straggler
  };
  const std::optional<Finding>& finding() const { return finding_; }

  double finding_age_s() const { return finding_ ? window_.back().seconds - finding_->since_s : 0; }

  static constexpr size_t kWindow = 5;

 private:
  std::deque<WaitRecord> window_;  // up to kWindow + 1 records
  std::optional<Finding> finding_;
};

}  // namespace gradwire
