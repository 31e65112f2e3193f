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
  std::vector<std::string> addresses;  // each an IP address or a host name
  int port = 0;
  std::string name = "-";  // the listener's name, drawn at random
  std::string host = {};   // host_id() of the listener's host; empty: unknown, or not needed

  // Returns one line: "ADDRESS,ADDRESS@HOST PORT NAME"; with one address "ADDRESS PORT NAME".
  std::string text() const;
  static std::optional<Contact> parse(const std::string& text);
};

// Returns the contact of a listener of this process. `address`: the address at which the listener listens;
// empty: all addresses of this host.
Contact contact_of(const Socket& listener, const std::string& address, const std::string& name);

// Returns an id of this machine and its network namespace. Processes with equal ids reach each other at
// loopback. Returns "" if the id is unknown.
std::string host_id();

// Returns the contact's addresses in the order in which this process should try them. If the contact is on
// this host, loopback is first. Otherwise, addresses in a network of this host come first, and addresses that
// this host also has come last. Loopback is then included only if the contact has no other address.
std::vector<std::string> addresses_to_try(const Contact& contact);

struct Reach {
  std::optional<Socket> socket;  // the connection, authenticated by the handshake
  std::string why;    // reasons per address, if `socket` is empty: "10.9.0.1:4000: Connection refused"
  bool gone = false;  // at every address, nothing listens or another process answers
  bool other_secret = false;  // at every address, a process with another secret answers
};

// Connects to the listener of `contact` at the first of the contact's addresses that answers. An address that
// does not answer delays the next address by 200 ms. All attempts stay open until the handshake succeeds at
// one address. `retry`: retry an address that refuses or hangs up, until the deadline; otherwise try each
// address once. `stop`: a file descriptor; reach() ends with `why` = "interrupted" when it is readable.
Reach reach(const Contact& contact, const Credentials& credentials, SteadyClock::time_point deadline,
            bool retry = false, int stop = -1);

// The network interfaces of this host.

// Returns this host's addresses that other hosts might reach, IPv4 and IPv6, in the order of the interfaces,
// followed by the loopback address.
std::vector<std::string> own_addresses();
// Returns 127.0.0.1, or ::1 if that is this host's only loopback address.
std::string loopback_address();
// Returns the address of the interface with this name. Throws BadInput that lists the existing interfaces if
// no interface has this name.
std::string address_of_interface(const std::string& name);

}  // namespace gradwire
