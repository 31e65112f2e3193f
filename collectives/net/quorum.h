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
  Quorum(const std::string& address, const std::string& key, const PortRange& ports = {});
  ~Quorum();
  Quorum(const Quorum&) = delete;

  // Returns the text of the Contact that other ranks use to call this rank.
  std::string contact() const;
  const std::string& address() const { return listener_.address; }
  const std::string& key() const { return listener_.credentials.key; }
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
  void leave();

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
  void publish(NextGroup survivors, const std::string& location);
  // Returns the leader's sockets to the other survivors, by rank; valid until enter(). Each survivor sends a
  // frame once the survivor has entered the group. This object owns the sockets.
  std::vector<int> followers() const;
  // Returns whether the rank that announced the survivors is gone, or another rank reports that the group
  // being formed has failed. Valid until enter().
  bool given_up() const;

  // ---- New ranks

  AdmissionQueue& admission() { return admission_; }
  // Returns the contacts of the group's ranks, one per line, for joiners.
  std::string contacts() const;
  // Returns the group of this group's ranks and these joiners, without a location.
  NextGroup grown_by(const std::vector<AdmissionQueue::Joiner>& joiners) const;
  // Records that the grown group has formed. Must be followed by enter().
  void grow(const NextGroup& grown) { adopt(grown); }
  // Sets the group's name and the number of groups before the group. Only a joiner calls it, before enter().
  void begin(int number, const std::string& name);
  // Returns the number of groups before this group.
  int number() const;

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
  struct Listener {
    Listener(const std::string& at, const std::string& key, const PortRange& ports);

    const std::string address, name;
    const Credentials credentials;
    Socket socket;
    PendingCallers pending{socket, credentials};
    WakeEvent wake;
    std::atomic<bool> stop = false;
  };
  // The current group and facts about the previous group.
  struct Group {
    int rank = 0;
    std::vector<std::string> contacts = {};  // the ranks' contacts, by rank
    int number = 0;                          // number of groups before this group
    std::string name = "-";                  // random, chosen by the leader
    std::string previous_name = {};
    std::vector<int> survivors = {};  // survivors of the previous group
    std::string announcement = {};    // NextGroup::encode() of this group
  };
  // This rank's part in choosing the survivors.
  struct Round {
    bool follows = false;      // this rank waits for a leading rank; callers should call the leading rank
    bool outranked = false;    // a lower rank leads
    bool lost_caller = false;  // a caller that waited for the survivors has hung up
    std::set<int> heard = {};  // ranks that have called since this rank last asked lower ranks
  };
  // The survivors' group, until this rank has entered it.
  struct Forming {
    std::vector<Socket> followers = {};  // on the leader: connections to the other survivors
    Socket announcer = {};               // on other survivors: the connection to the leader
    bool given_up = false;               // a rank reports that the group being formed has failed
  };
  // The current group's callbacks.
  struct Owner {
    std::function<void(const std::string&)> failed;
    std::function<bool(const std::string&)> note;
  };

  // Methods that run on the listener's thread.
  void serve();
  void serve_until_stopped();
  void answer(PendingCallers::Caller caller);
  void answer_rank(PendingCallers::Caller caller);
  void remove_lost_callers();
  void notify_owner(const std::vector<std::string>& log);

  // Methods that run on the thread of the rank's calls.
  void send_away();
  Call call(int rank, Frame::Op request);
  void look_below(std::set<int>& silent, std::set<int>& gone);
  std::optional<NextGroup> follow(int leader, Socket socket, SteadyClock::time_point deadline);
  std::optional<NextGroup> lead(std::set<int> silent, std::set<int> gone, SteadyClock::time_point deadline);
  std::optional<NextGroup> ask_missing(const std::vector<int>& ranks, std::set<int>& silent,
                                       std::set<int>& gone);
  NextGroup count(std::set<int> silent, const std::set<int>& gone);
  std::vector<int> missing(const std::set<int>& silent, const std::set<int>& gone) const;
  void adopt(const NextGroup& survivors);

  // Returns the time by which another rank should answer.
  static SteadyClock::time_point patience_end() { return SteadyClock::now() + kPatience; }

  const RunningClock::Watch watch_;
  Listener listener_;
  AdmissionQueue admission_;
  std::map<std::string, std::string> reached_;  // known addresses, by contact

  std::mutex calling_;  // guards owner_; held during its callbacks; locked before mutex_
  Owner owner_;

  mutable std::mutex mutex_;  // guards the members up to long_stops_
  std::condition_variable changed_;
  Group group_;
  Round round_;
  Forming forming_;
  std::vector<Caller> callers_;  // ranks that wait for the survivors or have received them
  // A rank has reported that this group has failed; the owner is not notified yet.
  bool failure_reported_ = false;
  // Number of stops before this group. After another stop the other ranks may assume that this rank is dead.
  int64_t long_stops_ = RunningClock::long_stops();

  Thread thread_;
};

}  // namespace gradwire
