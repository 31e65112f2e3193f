#include "collectives/transport/tcp/tcp_connector.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "collectives/net/reach.h"
#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Returns the purpose of the handshakes at a listener. The purpose binds a handshake to one listener, so that
// a connection cannot be relayed to another listener.
std::string purpose(const std::string& listener) {
  return "link " + listener;
}

void throw_if_interrupted(const TcpConnector::Limits& limits) {
  if (limits.interrupted()) throw CommError("the group failed while its ranks connected");
}

}  // namespace

TcpConnector::TcpConnector(int rank, int world, const std::string& address, const std::string& key,
                           const PortRange& ports)
    : rank_(rank),
      world_(world),
      listener_(listen_within(ports, address)),
      address_(address),
      name_(random_secret()),
      key_(key) {}

std::string TcpConnector::contact() const {
  return contact_of(listener_, address_, name_).text();
}

std::vector<Socket> TcpConnector::connect(const std::vector<std::string>& contacts, const Limits& limits,
                                          const Log& rejected) {
  std::vector<Socket> sockets(static_cast<size_t>(world_));
  for (int r = 0; r < rank_; ++r) {
    sockets[static_cast<size_t>(r)] = connect_to(r, contacts[static_cast<size_t>(r)], limits);
  }
  accept_higher(sockets, limits, rejected);
  listener_.close();
  return sockets;
}

void TcpConnector::accept_higher(std::vector<Socket>& sockets, const Limits& limits, const Log& rejected) {
  const Credentials credentials{key_, purpose(name_)};
  PendingCallers pending(listener_, credentials);
  const auto report = [&] {
    for (const std::string& line : pending.take_log()) {
      if (rejected) rejected(line);
    }
  };
  for (std::string missing = missing_ranks(sockets); !missing.empty(); missing = missing_ranks(sockets)) {
    throw_if_interrupted(limits);
    std::vector<pollfd> entries = {{limits.wake_fd, POLLIN, 0}};
    pending.add_entries(entries);
    // The timeout also lets this loop drop silent callers.
    const std::chrono::milliseconds tick = pending.empty() ? std::chrono::hours(1) : kHandshakeTime / 5;
    const auto soon = SteadyClock::now() + pending.patience(tick);
    poll(entries.data(), entries.size(), milliseconds_until(std::min(soon, limits.deadline)));
    if (!pending.refused().empty()) throw CommError("this rank " + pending.refused());
    if (SteadyClock::now() >= limits.deadline) {
      const Contact mine = contact_of(listener_, address_, name_);
      throw CommError(
          fmt::format("not connected in time to rank {}, which connects to this one at {} port {}: is an "
                      "address of these reachable from there, and the port open",
                      missing, fmt::join(mine.addresses, ", "), mine.port));
    }
    for (auto& caller : pending.advance(entries, sockets.size())) accept_rank(sockets, std::move(caller));
    report();
  }
  pending.reject_all(kSaidNothing);  // no further rank is expected
  report();
}

// Returns the higher ranks that are not connected, "2, 3"; "" if all higher ranks are connected.
std::string TcpConnector::missing_ranks(const std::vector<Socket>& sockets) const {
  std::string ranks;
  for (size_t r = static_cast<size_t>(rank_) + 1; r < sockets.size(); ++r) {
    if (!sockets[r]) ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
  }
  return ranks;
}

void TcpConnector::accept_rank(std::vector<Socket>& sockets, PendingCallers::Caller caller) const try {
  if (caller.first.op != Frame::Op::link) return;
  const int rank = Message::decode(caller.first.value).number("rank", rank_ + 1, world_ - 1);
  Socket& socket = sockets[static_cast<size_t>(rank)];
  if (socket) return;
  expect_full_buffers(caller.socket);
  socket = std::move(caller.socket);
} catch (const CommError&) {  // the caller is not a rank
}

// Connects to a rank. Retries until the deadline: a host's network may not be up yet, and a flood of
// unauthenticated peers may displace a connection. A dead rank fails the group, which interrupts the retries.
Socket TcpConnector::connect_to(int rank, const std::string& contact, const Limits& limits) const {
  const auto theirs = Contact::parse(contact);
  if (!theirs) {
    throw CommError(fmt::format(
        "connecting to rank {}: its address does not parse; are all ranks the same build?", rank));
  }
  const Frame hello{Frame::Op::link, 0, "", Message().add("rank", rank_).encode()};
  const Credentials credentials{key_, purpose(theirs->name)};
  while (true) {
    Reach reached =
        reach(*theirs, credentials, {.deadline = limits.deadline, .retry = true, .stop = limits.wake_fd});
    throw_if_interrupted(limits);
    if (!reached.socket) throw CommError(fmt::format("connecting to rank {}: {}", rank, reached.why));
    if (!send_frame(*reached.socket, hello, limits.deadline)) continue;
    expect_full_buffers(*reached.socket);
    return std::move(*reached.socket);
  }
}

}  // namespace gradwire
