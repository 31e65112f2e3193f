#include "trainer/train/rank_reports.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

#include "runtime/threads/running_clock.h"
#include "runtime/util/error.h"

namespace gradwire {

LocalRankReports::LocalRankReports(int world, std::chrono::milliseconds timeout)
    : timeout_(timeout), posted_(static_cast<size_t>(world)) {}

void LocalRankReports::post(int rank, const Report& report) {
  std::lock_guard lock(mutex_);
  posted_[static_cast<size_t>(rank)].push_back(report);
  changed_.notify_all();
}

std::vector<RankReports::Report> LocalRankReports::collect() {
  std::unique_lock lock(mutex_);
  auto missing = [&] {
    size_t rank = 0;
    while (rank < posted_.size() && !posted_[rank].empty()) ++rank;
    return rank;
  };
  bool in_time = changed_.wait_until(lock, RunningClock::now() + timeout_,
                                     [&] { return !aborted_.empty() || missing() == posted_.size(); });
  if (!aborted_.empty()) throw CommError(aborted_);
  if (!in_time) {
    throw CommError(
        fmt::format("rank {} has not reported its step to rank 0 within {} ms", missing(), timeout_.count()));
  }
  std::vector<Report> round;
  for (auto& queue : posted_) {
    round.push_back(queue.front());
    queue.pop_front();
  }
  return round;
}

void LocalRankReports::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (aborted_.empty()) aborted_ = reason;
  changed_.notify_all();
}

namespace {

using Words = std::array<uint64_t, 4>;  // all fields of a report except waited_s, which follows

}  // namespace

void MessageRankReports::post(int, const Report& report) {
  const Words words = {std::bit_cast<uint64_t>(report.loss), std::bit_cast<uint64_t>(report.correct),
                       static_cast<uint64_t>(report.images), report.hash};
  std::string message(reinterpret_cast<const char*>(words.data()), sizeof words);
  message.append(reinterpret_cast<const char*>(report.waited_s.data()),
                 report.waited_s.size() * sizeof(double));
  comm_.send_message(message);
}

std::vector<RankReports::Report> MessageRankReports::collect() {
  std::vector<Report> round;
  for (int rank = 0; rank < comm_.world(); ++rank) {
    const std::string message = comm_.take_message(rank);
    Words words;
    std::vector<double> waited_s(
        message.size() < sizeof words ? 0 : (message.size() - sizeof words) / sizeof(double));
    if (message.size() != sizeof words + waited_s.size() * sizeof(double)) {
      throw CommError(fmt::format("rank {}'s report cannot be read; are all ranks the same build?", rank));
    }
    std::memcpy(words.data(), message.data(), sizeof words);
    if (!waited_s.empty()) {
      std::memcpy(waited_s.data(), message.data() + sizeof words, waited_s.size() * sizeof(double));
    }
    round.push_back({std::bit_cast<double>(words[0]), std::bit_cast<double>(words[1]),
                     static_cast<int64_t>(words[2]), words[3], std::move(waited_s)});
  }
  return round;
}

void MessageRankReports::abort(const std::string& reason) {
  comm_.abort(reason);
}

}  // namespace gradwire
