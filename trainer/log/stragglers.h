// Who holds the others up: found from how long ranks have waited for each other's data.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "trainer/config/run.h"

namespace gradwire {

struct Straggler {
  int rank = 0;
  double behind_s = 0;  // how much longer each other rank has waited than this one
  double share = 0;     // of the time
};

// waited_s as in WaitRecord, collected over `seconds`. Nothing where no rank stands out.
std::optional<Straggler> find_straggler(const std::vector<std::vector<double>>& waited_s, double seconds);

// The records of a run so far, in order.
class WaitHistory {
 public:
  // A record of another number of ranks, or one that does not follow the last (the run was resumed), begins anew.
  void add(const WaitRecord& record);

  // Over the last kWindow records: waits, time and steps. Empty and 0 before the second record.
  std::vector<std::vector<double>> recent_waits() const;
  double recent_seconds() const;
  int64_t recent_steps() const;

  struct Finding {
    Straggler straggler;  // in the window
    int64_t since_step = 0;
    double since_s = 0;  // when it began to be the same rank's doing, in the records' time
  };
  const std::optional<Finding>& finding() const { return finding_; }

  double finding_age_s() const { return finding_ ? window_.back().seconds - finding_->since_s : 0; }

  static constexpr size_t kWindow = 5;

 private:
  std::deque<WaitRecord> window_;  // one more than kWindow
  std::optional<Finding> finding_;
};

}  // namespace gradwire
