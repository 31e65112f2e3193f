// Where a listener can be reached: the addresses of its host, its port and its name; and how to reach it there.
//
// Hosts have addresses that only some of the others can reach (a VPN, a second network), and addresses that every host
// has (docker0's 172.17.0.1), at which another process may answer. So a listener says all that it has, and whoever
// connects tries them until the handshake proves that the listener meant answers.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "collectives/rendezvous/handshake.h"
#include "collectives/rendezvous/socket.h"

namespace gradwire {

struct Contact {
  std::vector<std::string> addresses;  // or names
  int port = 0;
  std::string name = "-";  // of the listener, drawn at random
  std::string host = {};   // host_id() where the listener is; empty: unknown, or irrelevant with one address

  // One line: "ADDRESS,ADDRESS@HOST PORT NAME"; with one address "ADDRESS PORT NAME".
  std::string text() const;
  static std::optional<Contact> parse(const std::string& text);
};

// Returns the contact of a listener of this process. `address`: at which it listens; empty: at all of this host's.
Contact contact_of(const Socket& listener, const std::string& address, const std::string& name);

// Names this machine and its network namespace: processes with equal ids reach each other at loopback. Empty if unknown.
std::string host_id();

// The contact's addresses in the order in which this process should try them: on the contact's own host loopback first;
// elsewhere those in a network of this host first, those that this host has itself last, and loopback only if there is
// nothing else.
std::vector<std::string> addresses_to_try(const Contact& contact);

struct Reach {
  std::optional<Socket> socket;  // proved by the handshake
  std::string why;       // without a socket: "10.9.0.1:4000: Connection refused; 172.17.0.1:4000: no answer"
  bool refused = false;  // nothing listens at any of the addresses
  bool other_secret = false;  // at each of the addresses something else answers
};

struct ReachOptions {
  SteadyClock::time_point deadline;
  // Whether to try an address again that refuses or hangs up, until the deadline; else each is tried once.
  bool retry = false;
  int stop = -1;  // a file descriptor: once it can be read, ends with `why` = "interrupted"
};
// Connects to the listener of `contact`, at whichever of its addresses it answers. An address that does not answer
// keeps the next one waiting for 200 ms; all stay open until one has proved to be right.
Reach reach(const Contact& contact, const Credentials& credentials, const ReachOptions& options);

}  // namespace gradwire
