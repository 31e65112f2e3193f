// The network interfaces of this host.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

// Returns this host's addresses that other hosts might reach, IPv4 and IPv6, in the order of the interfaces,
// followed by the loopback address.
std::vector<std::string> own_addresses();
// Returns 127.0.0.1, or ::1 if that is this host's only loopback address.
std::string loopback_address();
// Returns whether an interface of this host is in the same network as this address.
bool in_own_network(const std::string& address);
// Returns the address of the interface with this name. Throws BadInput that lists the existing interfaces if
// no interface has this name.
std::string address_of_interface(const std::string& name);
// Throws BadInput, prefixed with `what`, if no interface has this name.
void check_interface(const std::string& what, const std::string& name);

}  // namespace gradwire
