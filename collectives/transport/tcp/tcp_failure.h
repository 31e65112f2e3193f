// The failure of a group of processes, as known to this rank: the first failure, this rank's activity, and
// the errors that it throws.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

namespace gradwire {

class Membership;

// The failure of a group, as known to this rank. Any thread may call the methods.
class TcpFailure {
 public:
  // Creates an object without a failure. The first call of give_up() or abort() is the first use of `group`.
  explicit TcpFailure(Membership& group) : group_(group) {}

  // Sets this rank's activity, for other ranks' errors: "in call 17, allreduce of ..."
  void set_activity(std::string activity);
  // Sets the rank that this rank waits for; -1: none.
  void set_waiting_for(int rank) { waiting_for_ = rank; }
  // Returns the activity and the awaited rank: "in call 17, allreduce of ..., waiting for rank 2".
  std::string activity();

  // Calls `interrupt` when the group fails; `interrupt` must not block. Throws CommError if the group has
  // failed.
  void on_failure(std::function<void()> interrupt);
  // Records that the group has failed, and interrupts this rank.
  void record(const std::string& cause);
  // Returns the first failure that this rank has recorded; "" if no failure is recorded.
  std::string recorded();
  void throw_if_failed();
  // Fails the group for `reason`.
  void abort(const std::string& reason);
  // Notifies the group, finds out which ranks still answer, and throws an error with all known facts.
  // `doing`: this rank's activity, for the error.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause);

 private:
  std::string activities_of_others(int waited_for);

  Membership& group_;
  std::mutex mutex_;
  std::function<void()> interrupt_;
  std::string failure_;      // the first failure that this rank has recorded
  std::string final_error_;  // the error that give_up() throws
  std::string activity_ = "joining";
  std::atomic<int> waiting_for_{-1};
};

}  // namespace gradwire
