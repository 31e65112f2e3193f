// How the ranks of a failed group agree on which of them are left.
//
// Each rank of a group that may go on listens at a port of its own, from the beginning, served by a thread. After a
// failure each survivor asks all ranks below it at the same time, and waits for the lowest that answers. A
// rank that reaches no lower rank leads. A silent rank is not asked again in this regrouping unless it calls.
// The leader asks the ranks that have not called, which also tells them of the failure, waits for those that
// answer, and publishes who is left and where its new store is. A rank that is missing is one of
//   gone     nothing listens at its port any more: the process has ended
//   silent   it does not answer in a second: stopped, or cut off. It may live
//
// Two groups never go on from one. The leader needs more than half of the ranks that may live (all but those gone), or
// half of them and the lowest. A rank that was itself stopped, so that the others may have gone on without it and
// ended, takes nobody for gone. Each group has a number and a random name, so members of two can tell that they are.
// The listener outlives the group: a rank that was left out is told so when it calls.
//
// The connections over which the leader has told the others stay until each of these is in the new group, so that a rank
// that dies before is missed at once.
//
// New ranks come through the same listener (newcomer.h has their side). They knock at any rank; the lowest keeps them
// waiting, the others send them there. Between two calls of the group it invites those that still answer, and all
// together form a group of which the newcomers are the highest ranks. Who finds out late that the others have grown is
// told as after a failure.
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

#include "collectives/rendezvous/contact.h"
#include "collectives/rendezvous/handshake.h"
#include "collectives/rendezvous/socket.h"
#include "collectives/rendezvous/store.h"
#include "runtime/thread.h"

namespace gradwire {

class Reunion {
 public:
  // Listens at `address` of this machine (empty: at all its addresses), at one of `ports`, for ranks that
  // know `key`. Throws CommError if listening fails.
  Reunion(const std::string& address, const std::string& key, const PortRange& ports = {});
  ~Reunion();
  Reunion(const Reunion&) = delete;

  // Returns the Contact's text, which the other ranks need to call this rank.
  std::string contact() const;
  const std::string& address() const { return address_; }
  // Records the address by which the rank with this contact is connected to this rank. Calls use that
  // address: a refusal at another address would not prove that the rank is gone. Must not run while this
  // object calls.
  void reached_at(const std::string& contact, const std::string& address) { reached_[contact] = address; }
  // This process is `rank` of a group whose ranks have these contacts. From here to leave(), `failed` is called, from a
  // thread of this object, when another rank says that the group has failed; and `note` with a line about strangers at
  // this port, for rank 0's log, which returns whether it gets there: otherwise this process prints it.
  void enter(int rank, std::vector<std::string> contacts, std::function<void(const std::string& why)> failed,
             std::function<bool(const std::string& line)> note = nullptr);
  // Neither is called any more, nor running.
  void leave();

  struct Survivors {
    std::vector<int> ranks;    // of the group before, ascending; the first leads
    std::string name = {};     // of the new group
    std::string meeting = {};  // where its store is; the leader has to publish() it
    // Contacts of new ranks that follow them. Then the group has formed, and failed, before this rank heard of it.
    std::vector<std::string> joined = {};
  };
  // Collective over the survivors. On the leader, followed by publish(). Throws CommError when this rank was left out,
  // when too few answer, or when the ranks that answer do not all call it within `timeout`, counted from when
  // a rank leads.
  Survivors regroup(std::chrono::milliseconds timeout);
  // Tells the survivors, for whom this also begins the new group.
  void publish(Survivors survivors, const std::string& meeting);
  // Until enter(). The leader's sockets to the other survivors, in the order of their ranks; each says something, whatever
  // it is, once it has entered. They stay this object's.
  std::vector<int> followers() const;
  // Until enter(): whether the rank that told this one who is left is gone, or another one says that the group which was
  // to form has failed.
  bool given_up() const;

  // ---- New ranks

  // From here on newcomers may wait, as long as there are fewer than `most` ranks with them. `judge` is given what a
  // newcomer says of itself, and returns why it is refused, or ""; a thread of this object calls it.
  void open_door(int most, std::function<std::string(const std::string& about)> judge);
  // Tells those who wait that the run has ended.
  void close_door();
  // How many wait, here. Any thread may ask.
  int waiting() const { return waiting_; }
  // What a newcomer needs to find the group: the contacts of its ranks, a line each.
  std::string contacts() const;
  struct Newcomer {
    std::string contact;
    Socket socket;
  };
  // Those that wait and still answer, for the lowest rank. Takes at most kPatience.
  std::vector<Newcomer> invite();
  // A group `name` of this one's ranks and then `joined` has formed. Followed by enter().
  void grow(const std::string& name, const std::vector<std::string>& joined);
  // For a newcomer, before its first enter(): the group is `name`, and there were `number` before it.
  void begin(int number, const std::string& name);
  // How many groups there were before this one.
  int number() const;

  // Keys of what passes between a newcomer and a rank.
  static constexpr const char* kKnock = "knock";  // newcomer: its contact, a line; and what it says of itself
  static constexpr const char* kWait = "wait";    // rank, each second
  static constexpr const char* kCome = "come";    // rank: does it still answer? Newcomer: it does
  static constexpr const char* kJoin = "join";    // rank: the invitation
  static constexpr const char* kHere = "here";    // newcomer: it has joined
  static constexpr const char* kElsewhere = "elsewhere";  // rank: the contact of the one to ask
  static constexpr const char* kUnwelcome = "unwelcome";  // rank: why

  const std::string& key() const { return credentials_.key; }

  static constexpr std::chrono::milliseconds kPatience{1000};  // with a rank that does not answer
  // What listeners' handshakes are for.
  static std::string purpose_of(const std::string& name) { return "reunion " + name; }

 private:
  struct Caller {
    Socket socket;
    std::string from;                      // its address
    std::unique_ptr<Challenge> challenge;  // until it is met
    std::string in = {};
    int rank = -1;              // once it waits to be told who is left
    std::string newcomer = {};  // its contact, once it waits to join
  };
  enum class Presence { here, silent, gone };
  struct Call {
    Presence presence = Presence::silent;
    Socket socket;  // to a rank that is here
  };

  void serve();
  void serve_until_stopped();
  void serve_callers();
  void turn_away(const Caller& caller, const std::string& why);
  void tell_of_strangers(int rank, const std::vector<std::string>& lines);
  void listen_to(Caller& caller);
  void answer(Caller& caller, const StoreMessage& message);
  void hear(Caller& newcomer, const std::string& text);
  void have_newcomers_wait();
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
  std::mutex calling_;  // held while these run; before mutex_
  std::function<void(const std::string&)> failed_;
  std::function<bool(const std::string&)> note_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<Caller> callers_;
  std::vector<Socket> followers_;  // see followers()
  Socket told_by_;                 // who is left, until this rank has entered that group
  bool given_up_ = false;          // a rank says that the group has failed that this one has not entered yet
  bool lost_caller_ = false;       // that waited to be told
  int rank_ = 0;
  std::vector<std::string> contacts_;           // by rank
  std::map<std::string, std::string> reached_;  // by contact, where known
  int number_ = 0;                              // of the group: the number of groups before it
  std::string name_ = "-";                      // of the group, drawn by its leader
  std::string before_ = "";                     // name of the previous group
  std::vector<int> last_;                       // the survivors of that group
  std::string last_text_;                       // and the text sent to them
  bool follows_ = false;                        // waits for a rank that leads; callers should try that rank
  bool outranked_ = false;                      // a lower rank leads
  std::set<int> heard_;                         // ranks that have called since this rank last looked below it
  bool told_ = false;                           // a caller has reported that the group failed
  const RunningClock::Watch watch_;
  // Number of stops before this group. After another stop the other ranks may assume that this rank is dead.
  int64_t long_stops_ = RunningClock::long_stops();
  bool stop_ = false;
  TurnedAway turned_away_;
  std::vector<std::string> notes_;  // of whom it has turned away, to be told
  int most_ = 0;                    // ranks, with newcomers
  std::function<std::string(const std::string&)> judge_;
  SteadyClock::time_point told_to_wait_at_ = {};
  std::atomic<int> waiting_ = 0;
  Thread thread_;
};

}  // namespace gradwire
