// Ranks as processes, on one host or many, over TCP.
//
// An exchange runs on the host stream's thread: it posts all of its receives and sends (tcp_links.h), each
// straight into or from the caller's memory, and waits for them until the deadline. Headers precede the
// payload (tcp_messages.h): once per call to the next rank; outside of calls, once per exchange to every
// peer. The receiver compares them with its own; payload of another call or size cannot touch its memory.
//
// In addition each rank has a connection to rank 0 (rendezvous/store.h) for failures: all ranks learn at once
// of one that dies, times out or disagrees, and the error on every rank says who no longer answers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/rendezvous/membership.h"
#include "collectives/rendezvous/socket.h"
#include "collectives/transport/transport.h"

namespace gradwire {

struct TcpOptions {
  GroupOptions group;
  // A checksum after each message, so that what was damaged on the way is an error. Also GRADWIRE_VERIFY_PAYLOAD=1.
  // Each rank decides for what it sends.
  bool verify_payload = false;
  // Whether survivors can go on after a failure: Transport::regroup(). The same on every rank.
  bool shrinkable = false;
};

// Joins the group and connects to every rank. Blocks until all have joined. Throws BadInput for invalid
// options, CommError when a rank does not join in time.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options);

// Where a group that takes new ranks is, and what this process tells it.
struct Doors {
  std::function<std::string()>
      read;                // the newest Transport::doors() of any of its ranks; "" while there is none
  std::string about = {};  // for Transport::open_door()'s judge
  // How long to wait for the group to let this process in; 0: as long as the group says that it will.
  std::chrono::milliseconds longest{0};
};
// Joins a group that is running, as its highest rank, when that calls Transport::grow(). Of `options.group`, rank, world
// and rendezvous are found out. Throws BadInput, with the reason, if the group refuses; CommError if none of its ranks
// answers for as long as joining may take, or has ended, or if the group does not form.
std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& options, const Doors& doors);

}  // namespace gradwire
