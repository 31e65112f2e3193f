#include "trainer/log/stragglers.h"

#include <algorithm>
#include <numeric>

namespace gradwire {

std::optional<Straggler> find_straggler(const std::vector<std::vector<double>>& waited_s, double seconds) {
  if (waited_s.size() < 2) return {};
  // A rank that waits for a late rank is late for the next rank. So the straggler is the rank that waits
  // least, not the rank for which others wait most.
  std::vector<double> total;
  for (const auto& of_rank : waited_s) total.push_back(std::accumulate(of_rank.begin(), of_rank.end(), 0.0));
  const auto least = std::min_element(total.begin(), total.end());
  const double others =
      (std::accumulate(total.begin(), total.end(), 0.0) - *least) / static_cast<double>(total.size() - 1);
  constexpr double kWorthMentioning = 0.05;
  if (!(others - *least >= kWorthMentioning * seconds)) return {};
  return Straggler{.rank = static_cast<int>(least - total.begin()),
                   .behind_s = others - *least,
                   .share = (others - *least) / seconds};
}

void WaitHistory::add(const WaitRecord& record) {
  if (!window_.empty()) {
    const WaitRecord& last = window_.back();
    if (record.waited_s.size() != last.waited_s.size() || record.seconds <= last.seconds) {
      window_.clear();
      finding_.reset();
    }
  }
  window_.push_back(record);
  if (window_.size() > kWindow + 1) window_.pop_front();
  const auto found = find_straggler(recent_waits(), recent_seconds());
  if (!found) {
    finding_.reset();
  } else if (finding_ && finding_->straggler.rank == found->rank) {
    finding_->straggler = *found;
  } else {
    const WaitRecord& before = window_[window_.size() - 2];
    finding_ = {.straggler = *found, .since_step = before.step, .since_s = before.seconds};
  }
}

std::vector<std::vector<double>> WaitHistory::recent_waits() const {
  if (window_.size() < 2) return {};
  std::vector<std::vector<double>> waits = window_.back().waited_s;
  const auto& before = window_.front().waited_s;
  for (size_t r = 0; r < waits.size(); ++r) {
    for (size_t p = 0; p < std::min(waits[r].size(), before[r].size()); ++p) waits[r][p] -= before[r][p];
  }
  return waits;
}

double WaitHistory::recent_seconds() const {
  return window_.size() < 2 ? 0 : window_.back().seconds - window_.front().seconds;
}

int64_t WaitHistory::recent_steps() const {
  return window_.size() < 2 ? 0 : window_.back().step - window_.front().step;
}

}  // namespace gradwire
