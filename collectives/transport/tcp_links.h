// Messages between the ranks of a group of processes: one TCP connection per pair.
//
// On a connection messages follow each other, each behind a frame that says what it is and how long. The receiver
// matches them in order: payload goes from the socket straight to where the message it meets was posted. A frame other
// than the expected one stops the connection there, with the payload unread: it never reaches memory meant for
// something else.
//
// Who waits does the work: wait() polls all connections and moves what can be moved, so a message costs no switch
// between threads. Where the caller has other things to do between post() and wait(), hand_over() leaves the work to a
// thread of the links' own until the next wait().
#pragma once

#include <poll.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "collectives/rendezvous/socket.h"

namespace gradwire {

// Nothing can be sent to a rank any more, or received from it.
struct LinkLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class TcpLinks {
 public:
  struct Frame {
    uint64_t tag = 0, bytes = 0;
  };
  // Stays where it is from post() to its end, which is wait() or drop().
  struct Message {
    bool sent = false;  // or received
    int peer = 0;
    void* data = nullptr;  // sends only read it
    size_t bytes = 0;
    uint64_t tag = 0;  // the same on both sides
    bool done = false;

   private:
    friend class TcpLinks;
    Frame frame_;
    size_t moved_ = 0;  // of frame and data
  };

  // Listens at `address` of this machine. Throws CommError when it cannot.
  TcpLinks(int rank, int world, const std::string& address);
  ~TcpLinks();
  TcpLinks(const TcpLinks&) = delete;

  // What the others need to connect: address, port and a secret that keeps strangers out.
  std::string contact() const;
  // Connects to every rank; contacts[r] is rank r's. Throws CommError that says to whom not.
  void connect(const std::vector<std::string>& contacts, SteadyClock::time_point deadline);

  // post(), hand_over() and wait() belong to one thread at a time. post() and wait() throw LinkLost, and CommError after
  // interrupt().
  void post(Message& message);
  void hand_over();
  // Until `message` is done; false at the deadline.
  bool wait(Message& message, SteadyClock::time_point deadline);

  // From any thread: everything that waits, or will, throws.
  void interrupt();
  // Forgets what is posted: its memory is left alone from here on. Connections are of no use afterwards.
  void drop();

 private:
  struct Link {
    Socket socket;
    std::deque<Message*> sends, receives;
    std::string lost;         // why nothing moves any more
    bool mismatched = false;  // the next frame is not of receives.front()
  };
  // An event that ends a poll().
  class Bell {
   public:
    Bell();
    void ring();
    void silence();
    int fd() const { return socket_.fd(); }

   private:
    Socket socket_;
  };

  void accept_others(SteadyClock::time_point deadline);
  bool has_work() const;
  void push(Link& link);
  void pull(Link& link);
  // Waits until something can move or `bell` rings, and moves it. With `lock` held on entry and exit.
  void poll_once(std::unique_lock<std::mutex>& lock, Bell& bell, std::vector<pollfd>& entries,
                 std::vector<Link*>& owners, SteadyClock::time_point deadline);
  void run();

  const int rank_;
  Socket listener_;
  std::string address_, secret_;
  std::mutex mutex_;
  std::vector<Link> links_;  // by rank
  bool interrupted_ = false;
  Bell caller_bell_;
  std::vector<pollfd> entries_;
  std::vector<Link*> owners_;
  // The thread that works between hand_over() and wait(); started when first needed.
  std::thread helper_;
  std::condition_variable work_;
  Bell helper_bell_;
  bool helping_ = false, polling_ = false, stop_ = false;
};

}  // namespace gradwire
