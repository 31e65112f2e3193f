#include "trainer/train/board.h"

#include "kernels/error.h"

namespace gradwire {

Board::Board(int world, std::chrono::milliseconds timeout)
    : timeout_(timeout), posted_(static_cast<size_t>(world)) {}

void Board::post(int rank, const Entry& entry) {
  std::lock_guard lock(mutex_);
  posted_[static_cast<size_t>(rank)].push_back(entry);
  changed_.notify_all();
}

std::vector<Board::Entry> Board::collect() {
  std::unique_lock lock(mutex_);
  auto missing = [&] {
    size_t rank = 0;
    while (rank < posted_.size() && !posted_[rank].empty()) ++rank;
    return rank;
  };
  bool in_time =
      changed_.wait_for(lock, timeout_, [&] { return !aborted_.empty() || missing() == posted_.size(); });
  if (!aborted_.empty()) throw CommError(aborted_);
  if (!in_time) {
    throw CommError("rank " + std::to_string(missing()) + " has not reported its step to rank 0 within " +
                    std::to_string(timeout_.count()) + " ms");
  }
  std::vector<Entry> round;
  for (auto& queue : posted_) {
    round.push_back(queue.front());
    queue.pop_front();
  }
  return round;
}

void Board::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (aborted_.empty()) aborted_ = reason;
  changed_.notify_all();
}

}  // namespace gradwire
