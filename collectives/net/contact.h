// A listener's addresses, port and name, and how to reach it.
//
// A host has addresses that only some other hosts can reach (a VPN, a second network). It also has addresses
// that every host has (docker0's 172.17.0.1), where another process may answer. So a listener publishes all
// its addresses, and a connecting process tries them until the handshake proves that the intended listener
// answers.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "collectives/net/handshake.h"
#include "collectives/net/socket.h"

namespace gradwire {

struct Contact {
  std::vector<std::string> addresses;  // or host names
  int port = 0;
  std::string name = "-";  // of the listener, drawn at random
  std::string host = {};   // host_id() where the listener is; empty: unknown, or irrelevant with one address

  // Returns one line: "ADDRESS,ADDRESS@HOST PORT NAME"; with one address "ADDRESS PORT NAME".
  std::string text() const;
  static std::optional<Contact> parse(const std::string& text);
};

// Returns the contact of a listener of this process. `address`: the address to listen at; empty: all
// addresses of this host.
Contact contact_of(const Socket& listener, const std::string& address, const std::string& name);

// Returns the contact's text with one more address, tried last: the address at which this process has already
// reached that rank. The address may differ from rank 0's addresses if a container's ports are forwarded.
std::string with_address(const std::string& contact, const std::string& address);

// Returns an id of this machine and its network namespace. Processes with equal ids reach each other at
// loopback. Empty if unknown.
std::string host_id();

// Returns the contact's addresses in the order in which this process should try them. On the contact's own
// host, loopback is first. On another host, addresses in a network of this host come first and addresses that
// this host also has come last. Loopback is included there only if the contact has no other address.
std::vector<std::string> addresses_to_try(const Contact& contact);

struct Reach {
  std::optional<Socket> socket;  // authenticated by the handshake
  std::string why;    // without a socket: "10.9.0.1:4000: Connection refused; 172.17.0.1:4000: no answer"
  bool gone = false;  // at every address nothing listens or another process answers
  bool other_secret = false;  // at every address another process answers
};

struct ReachOptions {
  SteadyClock::time_point deadline;
  // Retry an address that refuses or hangs up, until the deadline. Otherwise try each address once.
  bool retry = false;
  int stop = -1;  // a file descriptor; once readable, reach() ends with `why` = "interrupted"
};
// Connects to the listener of `contact` at the first of its addresses that answers. An address that does not
// answer delays the next one by 200 ms. All attempts stay open until the handshake succeeds at one address.
Reach reach(const Contact& contact, const Credentials& credentials, const ReachOptions& options);

}  // namespace gradwire
