// Ranks as processes on one host or many, over TCP.
//
// An exchange runs on the host stream's thread. The thread posts all receives and sends of the exchange
// (tcp_links.h), each straight into or from the caller's memory, and waits for them until the deadline. A
// header precedes each call's payload, from each rank to the next rank, which compares the
// header with its current call. Payload of another call or size cannot reach a rank's memory.
//
// Each rank also has a connection to rank 0 (net/store.h) for failures: all ranks are notified at once of a
// rank that dies, times out or disagrees, and the error on every rank names the ranks that do not answer.
#pragma once

#include <memory>

#include "collectives/net/membership.h"
#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"

namespace gradwire {

struct TcpOptions {
  GroupOptions group;
  // True if survivors can continue after a failure (Transport::regroup()). Must be the same on every rank.
  bool shrinkable = false;
  // If set, messages between ranks pass through emulated links. Must be the same on every rank.
  EmulatedLink link = {};
};

// Creates this rank's transport: joins the group and connects to every rank. Blocks until all ranks have
// joined. Throws BadInput for invalid options, CommError if a rank does not join in time.
std::unique_ptr<Transport> make_tcp_transport(const TcpOptions& options);

// Joins a running group as its highest rank, when the group calls Transport::grow(). Ignores the rank, world
// and rendezvous in `options.group`. `join`: how to find the group (Transport::invitation() of any rank), and
// this process's request. Throws BadInput, with the reason, if the group rejects the request. Throws
// CommError if no rank answers within the join timeout, the group has ended, or the new group does not form.
std::unique_ptr<Transport> join_tcp_transport(const TcpOptions& options, const JoinRequest& join);

}  // namespace gradwire
