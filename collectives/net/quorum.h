// How the ranks of a failed group agree on the survivors.
//
// Each rank of a shrinkable group listens at a separate port from the beginning, served by a thread. After a
// failure each survivor asks all lower ranks concurrently and waits for the lowest rank that answers. A rank
// that reaches no lower rank leads. A silent rank is not asked again in the same regrouping unless the silent
// rank calls. The leader asks the ranks that have not called, which also notifies those ranks of the failure.
// The leader waits for the ranks that answer, and publishes the survivors and the location of its new store.
// A missing rank is either
//   gone     nothing listens at the rank's port: the process has ended
//   silent   no answer within a second: the process is stopped or cut off, and may be alive
//
// At most one group survives (no split brain). The leader needs more than half of the ranks that may be alive
// (all ranks except gone ranks), or half of those ranks including the lowest. If a rank was stopped, the
// other ranks may have continued without that rank and ended, so the stopped rank must not assume that any
// rank is dead. Each group has a number and a random name, which distinguish members of different groups. The
// listener outlives the group, so that a rank that was left out gets an error when it calls.
//
// The leader's connections to the other survivors stay open until each survivor is in the new group. If a
// survivor dies earlier, the leader detects the death at once.
//
// Joiners use the same listener (listener.h). A rank that missed the growth of the group is notified
// as after a failure.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/listener.h"
#include "collectives/net/reach.h"
#include "collectives/net/socket.h"
#include "runtime/threads/running_clock.h"
#include "runtime/threads/thread.h"

namespace gradwire {

class Quorum {
 public:
  // Listens at `address` of this machine (empty: at all addresses), at one port of `ports`, for ranks that
  // know `key`. Throws CommError if listening fails.
  Quorum(const std::string& address, const std::string& key, const PortRange& ports = {})
      : listener_("quorum", address, key, ports) {
    thread_ = Thread("the thread that answers other ranks", [this] { serve(); });
  }
  ~Quorum();
  Quorum(const Quorum&) = delete;

  // Returns the text of the Contact that other ranks use to call this rank.
  std::string contact() const { return listener_.contact().text(); }
  const std::string& address() const { return listener_.address(); }
  const std::string& key() const { return listener_.key(); }
  // Records the address by which the rank with this contact is connected to this rank. This object then calls
  // the rank at the recorded address, because a refusal at another address would not prove that the rank is
  // gone. Must not run while this object calls other ranks.
  void reached_at(const std::string& contact, const std::string& address) { reached_[contact] = address; }
  // Makes this process `rank` of a group whose ranks have these contacts. Until leave(), a thread of this
  // object calls `failed` when another rank reports that the group has failed. The thread calls `note` with
  // lines about unauthenticated peers for rank 0's log. `note` returns whether the line reached rank 0; if
  // not, this process prints the line.
  void enter(int rank, std::vector<std::string> contacts, std::function<void(const std::string& why)> failed,
             std::function<bool(const std::string& line)> note = nullptr);
  // Ends the use of the callbacks of enter(). Waits for a running callback.
  void leave() {
    std::lock_guard lock(calling_);
    failed_ = nullptr;
    note_ = nullptr;
  }

  // The next group after a group: its survivors, or its ranks and joiners.
  struct NextGroup {
    std::vector<int> ranks;                // ranks in the old group, ascending; the first rank leads
    std::string name = {};                 // random, chosen by the leader
    std::string location = {};             // of the group's store; "" until published by the leader
    std::vector<std::string> joined = {};  // contacts of the joiners, which become the highest ranks

    std::string encode() const;
    // Decodes a group. Throws CommError unless `text` describes a group that includes `rank` of `world`
    // ranks.
    static NextGroup decode(const std::string& text, int rank, int world);
  };
  // Returns the group of the survivors. Collective over the survivors. If the returned `location` is empty,
  // this rank leads and must publish() the group. If the returned `joined` is not empty, the group has
  // already formed by growth, and failed before this rank was notified. Throws CommError if this rank was
  // left out, if too few ranks answer, or if some rank that answers does not call regroup() within `timeout`,
  // counted from when a rank leads.
  NextGroup regroup(std::chrono::milliseconds timeout);
  // Sends the group to the survivors, and begins the new group on this rank.
  void publish(NextGroup survivors, const std::string& location) {
    survivors.location = location;
    adopt(survivors);
  }
  // Returns the leader's sockets to the other survivors, by rank; valid until enter(). Each survivor sends a
  // frame once the survivor has entered the group. This object owns the sockets.
  std::vector<int> followers() const {
    std::lock_guard lock(mutex_);
    std::vector<int> sockets;
    for (const Socket& socket : followers_) sockets.push_back(socket.fd());
    return sockets;
  }
  // Returns whether the rank that announced the survivors is gone, or another rank reports that the group
  // being formed has failed. Valid until enter().
  bool given_up() const {
    std::lock_guard lock(mutex_);
    return given_up_ || (announcer_ && announcer_.hung_up());
  }

  // ---- New ranks

  AdmissionQueue& admission() { return admission_; }
  // Returns the contacts of the group's ranks, one per line, for joiners.
  std::string contacts() const {
    std::lock_guard lock(mutex_);
    std::string lines;
    for (const std::string& contact : contacts_) lines += contact + "\n";
    return lines;
  }
  // Returns the group of this group's ranks and these joiners, without a location.
  NextGroup grown_by(const std::vector<AdmissionQueue::Joiner>& joiners) const {
    std::lock_guard lock(mutex_);
    NextGroup grown{.ranks = std::vector<int>(contacts_.size()), .name = random_secret()};
    std::iota(grown.ranks.begin(), grown.ranks.end(), 0);
    for (const AdmissionQueue::Joiner& joiner : joiners) grown.joined.push_back(joiner.contact);
    return grown;
  }
  // Makes the group of the survivors, or the grown group, the current group. Must be followed by enter().
  // Notifies current and future callers.
  void adopt(const NextGroup& next);
  // Sets the group's name and the number of groups before the group. Only a joiner calls it, before enter().
  void begin(int number, const std::string& name) {
    std::lock_guard lock(mutex_);
    number_ = number;
    name_ = name;
  }
  // Returns the number of groups before this group.
  int number() const {
    std::lock_guard lock(mutex_);
    return number_;
  }

  static constexpr std::chrono::milliseconds kPatience{1000};  // time limit for a rank's answer
  // Returns the purpose of the handshakes at this listener.
  static std::string purpose_of(const std::string& name) { return "quorum " + name; }

 private:
  struct Caller {
    Socket socket;
    int rank = -1;  // -1 once the caller has been notified of the survivors
  };
  enum class Presence { here, silent, gone };
  struct Call {
    Presence presence = Presence::silent;
    Socket socket;  // connection to a rank whose presence is `here`
  };
  // This rank's part in choosing the survivors.
  struct Round {
    bool follows = false;      // this rank waits for a leading rank; callers should call the leading rank
    bool outranked = false;    // a lower rank leads
    bool lost_caller = false;  // a caller that waited for the survivors has hung up
    std::set<int> heard = {};  // ranks that have called since this rank last asked lower ranks
  };
  // Methods that run on the listener's thread.
  void serve();
  void serve_until_stopped();
  void answer(Listener::Caller caller);
  void answer_rank(Listener::Caller caller);
  void notify_owner(const std::vector<std::string>& log);

  // Methods that run on the thread of the rank's calls.
  void send_away();
  Call call(int rank, Frame::Op request);
  bool ask(const std::vector<int>& ranks, std::set<int>& silent, std::set<int>& gone,
           std::vector<std::optional<Frame>>* replies = nullptr);
  std::optional<NextGroup> follow(int leader, Socket socket, SteadyClock::time_point deadline);
  std::optional<NextGroup> lead(std::set<int> silent, std::set<int> gone, SteadyClock::time_point deadline);
  NextGroup count(std::set<int> silent, const std::set<int>& gone);
  std::vector<int> missing(const std::set<int>& silent, const std::set<int>& gone) const;

  // Returns the time by which another rank should answer.
  static SteadyClock::time_point patience_end() { return SteadyClock::now() + kPatience; }

  const RunningClock::Watch watch_;
  Listener listener_;
  WakeEvent wake_;
  std::atomic<bool> stop_ = false;
  AdmissionQueue admission_;
  std::map<std::string, std::string> reached_;  // known addresses, by contact

  std::mutex calling_;  // guards the owner's callbacks and is held during them; locked before mutex_
  std::function<void(const std::string&)> failed_;
  std::function<bool(const std::string&)> note_;

  mutable std::mutex mutex_;  // guards the members up to long_stops_
  std::condition_variable changed_;
  // The current group and facts about the previous group.
  int rank_ = 0;
  std::vector<std::string> contacts_;  // the ranks' contacts, by rank
  int number_ = 0;                     // number of groups before this group
  std::string name_ = "-";             // random, chosen by the leader
  std::string previous_name_;
  std::vector<int> survivors_;  // survivors of the previous group
  std::string announcement_;    // NextGroup::encode() of this group
  Round round_;
  // The survivors' group, until this rank has entered it: on the leader, the connections to the other
  // survivors; on other survivors, the connection to the leader; whether a rank reports that the group has
  // failed.
  std::vector<Socket> followers_;
  Socket announcer_;
  bool given_up_ = false;
  std::vector<Caller> callers_;  // ranks that wait for the survivors or have received them
  // A rank has reported that this group has failed; the owner is not notified yet.
  bool failure_reported_ = false;
  // Number of stops before this group. After another stop the other ranks may assume that this rank is dead.
  int64_t long_stops_ = RunningClock::long_stops();

  Thread thread_;
};

}  // namespace gradwire
