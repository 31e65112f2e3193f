// The failure of a group of processes, as known to this rank: the first failure, this rank's activity, and
// the errors that it throws.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

namespace gradwire {

class Membership;

// Any thread may call the methods.
class TcpFailure {
 public:
  // `group` is used from the first call of give_up() or abort() on.
  explicit TcpFailure(Membership& group) : group_(group) {}

  // Sets this rank's activity, for other ranks' errors: "in call 17, allreduce of ..."
  void set_activity(const std::string& activity);
  // Sets the rank that this rank waits for; -1: none.
  void set_waiting_for(int rank) { waiting_for_ = rank; }
  // Returns both: "in call 17, allreduce of ..., waiting for rank 2".
  std::string activity();

  // Calls `interrupt` when the group fails; it must not block. Throws CommError if the group has failed.
  void on_failure(std::function<void()> interrupt);
  // Records that the group has failed, and interrupts this rank.
  void record(const std::string& cause);
  // Returns the first failure that this rank has recorded; empty if none.
  std::string recorded();
  void throw_if_failed();
  // Fails the group for `reason`.
  void abort(const std::string& reason);
  // Notifies the group, finds out which ranks still answer, and throws an error with everything known.
  // `doing`: this rank's activity, for the error.
  [[noreturn]] void give_up(const std::string& doing, const std::string& cause);

 private:
  std::string activities_of_others(int waited_for);

  Membership& group_;
  std::mutex mutex_;
  std::function<void()> interrupt_;
  std::string failure_;      // the first failure this rank received
  std::string final_error_;  // thrown by give_up()
  std::string activity_ = "joining";
  std::atomic<int> waiting_for_{-1};
};

}  // namespace gradwire
