// Ranks as processes, on one host or many, over TCP.
//
// An exchange posts all of its receives and sends (tcp_links.h), each straight from or into the caller's memory,
// on the host stream's thread, and waits for each until the deadline. Headers go ahead of the payload
// (tcp_messages.h): once per call to the next rank, once per exchange to every peer. The receiver compares
// them with its own; payload of a call or size other than its own cannot touch its memory.
//
// Beside these connections each rank has one to rank 0 (rendezvous/store.h), on which failures travel: who
// dies, times out or disagrees is known to everybody at once, and the error on every rank says who no longer
// answers.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/rendezvous/membership.h"
#include "collectives/transport/transport.h"

namespace gradwire {

struct TcpOptions {
  GroupOptions group;
  // The network interface to listen on; empty: the one that reaches rank 0.
  std::string interface;
};

// Joins the group and connects to every rank. Blocks until all are there. Throws BadInput for options that
// cannot work, CommError when a rank does not come in time.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options);

}  // namespace gradwire
