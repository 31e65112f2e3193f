// How the ranks of a failed group agree on the survivors.
//
// Each rank of a shrinkable group listens at its own port from the beginning, served by a thread. After a
// failure each survivor asks all lower ranks concurrently and waits for the lowest that answers. A rank that
// reaches no lower rank leads. A silent rank is not asked again in this regrouping unless it calls. The
// leader asks the ranks that have not called, which also notifies them of the failure. It waits for those
// that answer, and publishes the survivors and the location of its new store. A missing rank is either
//   gone     nothing listens at its port: the process has ended
//   silent   no answer within a second: stopped, or cut off; it may be alive
//
// At most one group survives (no split brain). The leader needs more than half of the ranks that may be alive
// (all except those gone), or half of them including the lowest. If a rank was itself stopped, the others may
// have continued without it and ended, so it must not assume that any rank is dead. Each group has a number
// and a random name, which distinguish members of different groups. The listener outlives the group, so that
// a rank that was left out gets an error when it calls.
//
// The leader's connections to the other survivors stay open until each survivor is in the new group, so that
// the death of a rank before that is detected at once.
//
// Joiners use the same listener (joiner.h is their side). They send a request to any rank. The lowest rank
// keeps them waiting; the others redirect them to it. Between two calls the group invites the joiners that
// still answer, and all form a group with the joiners as the highest ranks. A rank that missed the growth is
// notified as after a failure.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/net/contact.h"
#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"
#include "collectives/net/store.h"
#include "runtime/threads/thread.h"

namespace gradwire {

class Quorum {
 public:
  // Listens at `address` of this machine (empty: at all its addresses), at one of `ports`, for ranks that
  // know `key`. Throws CommError if listening fails.
  Quorum(const std::string& address, const std::string& key, const PortRange& ports = {});
  ~Quorum();
  Quorum(const Quorum&) = delete;

  // Returns the text of the Contact with which other ranks call this rank.
  std::string contact() const;
  const std::string& address() const { return address_; }
  // Records the address by which the rank with this contact is connected to this rank. Calls use that
  // address: a refusal at another address would not prove that the rank is gone. Must not run while this
  // object calls.
  void reached_at(const std::string& contact, const std::string& address) { reached_[contact] = address; }
  // Makes this process `rank` of a group whose ranks have these contacts. Until leave(), a thread of this
  // object calls `failed` when another rank reports that the group has failed, and `note` with lines about
  // unauthenticated peers for rank 0's log. `note` returns whether the line reached rank 0; if not, this
  // process prints it.
  void enter(int rank, std::vector<std::string> contacts, std::function<void(const std::string& why)> failed,
             std::function<bool(const std::string& line)> note = nullptr);
  // After leave() neither callback runs or will be called.
  void leave();

  struct Survivors {
    std::vector<int> ranks;     // ranks in the old group, ascending; the first leads
    std::string name = {};      // of the new group
    std::string location = {};  // location of its store; the leader must publish() it
    // Contacts of the new ranks that follow them. If not empty, the group formed and failed before this rank
    // was notified.
    std::vector<std::string> joined = {};
  };
  // Returns the survivors. Collective over them. On the leader, followed by publish(). Throws CommError if
  // this rank was left out, too few ranks answer, or not all ranks that answer call it within `timeout`,
  // counted from when a rank leads.
  Survivors regroup(std::chrono::milliseconds timeout);
  // Notifies the survivors; also begins the new group for them.
  void publish(Survivors survivors, const std::string& location);
  // Returns the leader's sockets to the other survivors, by rank; valid until enter(). Each survivor sends
  // something once it has entered. Owned by this object.
  std::vector<int> followers() const;
  // Until enter(): returns whether the rank that announced the survivors is gone, or another rank reports
  // that the group being formed has failed.
  bool given_up() const;

  // ---- New ranks

  // Opens admission: joiners may wait while ranks and joiners are fewer than `most`. `validate` gets a
  // joiner's description of itself and returns why it is rejected, or ""; a thread of this object calls it.
  void open_admission(int most, std::function<std::string(const std::string& about)> validate);
  // Closes admission and notifies waiting joiners that the run has ended.
  void close_admission();
  // Returns how many joiners wait here. Any thread may call it.
  int waiting() const { return waiting_; }
  // Returns the contacts of the group's ranks, one per line, for joiners.
  std::string contacts() const;
  struct Joiner {
    std::string contact;
    Socket socket;
  };
  // Returns the waiting joiners that still answer; for the lowest rank. Takes at most kPatience.
  std::vector<Joiner> invite();
  // Records that a group `name` of this group's ranks followed by `joined` has formed. Followed by enter().
  void grow(const std::string& name, const std::vector<std::string>& joined);
  // For a joiner, before its first enter(): the group's name and the number of groups before it.
  void begin(int number, const std::string& name);
  // Returns the number of groups before this one.
  int number() const;

  // Keys of the messages between a joiner and a rank.
  // Joiner: its contact, a line, and its description of itself.
  static constexpr const char* kRequest = "request";
  static constexpr const char* kWait = "wait";  // rank, once per second
  // Rank: asks whether the joiner still answers. Joiner: it does.
  static constexpr const char* kCome = "come";
  static constexpr const char* kJoin = "join";            // rank: the invitation
  static constexpr const char* kHere = "here";            // joiner: it has joined
  static constexpr const char* kElsewhere = "elsewhere";  // rank: the contact of the rank to ask
  static constexpr const char* kUnwelcome = "unwelcome";  // rank: rejected, with the reason

  const std::string& key() const { return credentials_.key; }

  static constexpr std::chrono::milliseconds kPatience{1000};  // with a rank that does not answer
  // Returns the purpose of the handshakes at this listener.
  static std::string purpose_of(const std::string& name) { return "quorum " + name; }

 private:
  struct Caller {
    Socket socket;
    std::string from;                      // its address
    std::unique_ptr<Challenge> challenge;  // until answered
    std::string in = {};
    int rank = -1;            // set once it waits for the survivors
    std::string joiner = {};  // its contact, once it waits to join
  };
  enum class Presence { here, silent, gone };
  struct Call {
    Presence presence = Presence::silent;
    Socket socket;  // to a rank that is `here`
  };

  void serve();
  void serve_until_stopped();
  void serve_callers();
  void reject(const Caller& caller, const std::string& why);
  void report_rejected(int rank, const std::vector<std::string>& lines);
  void listen_to(Caller& caller);
  void answer(Caller& caller, const StoreMessage& message);
  void hear(Caller& joiner, const std::string& text);
  void have_joiners_wait();
  void send_away();
  Call call(int rank, const char* what);
  void look_below(std::set<int>& silent, std::set<int>& gone);
  std::optional<Survivors> follow(int leader, Socket socket, SteadyClock::time_point deadline);
  Survivors understand(const std::string& text) const;
  std::optional<Survivors> lead(std::set<int> silent, std::set<int> gone, SteadyClock::time_point deadline);
  Survivors count(std::set<int> silent, const std::set<int>& gone);
  std::vector<int> missing(const std::set<int>& silent, const std::set<int>& gone) const;
  void adopt(const Survivors& survivors);

  const std::string address_, listener_name_;
  const Credentials credentials_;
  Socket listener_;
  Acceptor acceptor_{listener_};
  WakeEvent wake_;
  std::mutex calling_;  // held while these run; locked before mutex_
  std::function<void(const std::string&)> failed_;
  std::function<bool(const std::string&)> note_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<Caller> callers_;
  std::vector<Socket> followers_;  // see followers()
  Socket told_by_;                 // the survivors' announcer, until this rank has entered their group
  // A rank reports that the group not entered yet has failed.
  bool given_up_ = false;
  bool lost_caller_ = false;  // a caller that waited for the survivors has hung up
  int rank_ = 0;
  std::vector<std::string> contacts_;           // by rank
  std::map<std::string, std::string> reached_;  // by contact, where known
  int number_ = 0;                              // the number of groups before this one
  std::string name_ = "-";                      // of the group, drawn by its leader
  std::string before_ = "";                     // name of the previous group
  std::vector<int> last_;                       // the survivors of the previous group
  std::string last_text_;                       // the text sent to them
  bool follows_ = false;                        // waits for a leading rank; callers should try that rank
  bool outranked_ = false;                      // a lower rank leads
  std::set<int> heard_;  // ranks that have called since this rank last asked lower ranks
  bool told_ = false;    // a caller has reported that the group failed
  const RunningClock::Watch watch_;
  // Number of stops before this group. After another stop the other ranks may assume that this rank is dead.
  int64_t long_stops_ = RunningClock::long_stops();
  bool stop_ = false;
  RejectedConnections rejected_;
  std::vector<std::string> notes_;  // pending lines about rejected connections
  int most_ = 0;                    // limit of ranks, including joiners
  std::function<std::string(const std::string&)> validate_;
  SteadyClock::time_point told_to_wait_at_ = {};
  std::atomic<int> waiting_ = 0;
  Thread thread_;
};

}  // namespace gradwire
