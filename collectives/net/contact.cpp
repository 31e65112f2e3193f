#include "collectives/net/contact.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "collectives/net/interfaces.h"
#include "collectives/net/listener.h"
#include "runtime/util/parse.h"

namespace gradwire {

std::string Contact::text() const {
  const std::string at = addresses.size() > 1 && !host.empty() ? "@" + host : "";
  return fmt::format("{}{} {} {}", fmt::join(addresses, ","), at, port, name);
}

std::optional<Contact> Contact::parse(const std::string& text) {
  std::istringstream words(text);
  std::string where, port, address;
  Contact contact;
  if (!(words >> where >> port >> contact.name)) return std::nullopt;
  const auto number = parse_number(port, 1, 65535);
  if (!number) return std::nullopt;
  contact.port = *number;
  if (const size_t at = where.find('@'); at != std::string::npos) {
    contact.host = where.substr(at + 1);
    where.resize(at);
  }
  std::istringstream list(where);
  while (std::getline(list, address, ',')) {
    if (!address.empty()) contact.addresses.push_back(address);
  }
  if (contact.addresses.empty()) return std::nullopt;
  return contact;
}

Contact contact_of(const Socket& listener, const std::string& address, const std::string& name) {
  Contact contact{.addresses = {address}, .port = local_port(listener), .name = name};
  if (address.empty()) {
    contact.addresses = own_addresses();
    contact.host = host_id();
  }
  return contact;
}

std::string with_address(const std::string& contact, const std::string& address) {
  auto parsed = Contact::parse(contact);
  if (!parsed || address.empty() || is_loopback(address) ||
      std::find(parsed->addresses.begin(), parsed->addresses.end(), address) != parsed->addresses.end()) {
    return contact;
  }
  parsed->addresses.push_back(address);
  return parsed->text();
}

std::string host_id() {
  static const std::string id = [] {
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    struct stat space {};
    if (boot.empty() || stat("/proc/self/ns/net", &space) != 0) return std::string();
    return fmt::format("{}.{}.{}", boot, space.st_dev, space.st_ino);
  }();
  return id;
}

std::vector<std::string> addresses_to_try(const Contact& contact) {
  std::vector<std::string> addresses = contact.addresses;
  if (addresses.size() < 2 || contact.host.empty()) return addresses;
  if (contact.host == host_id()) {
    std::stable_partition(addresses.begin(), addresses.end(), is_loopback);
    return addresses;
  }
  std::erase_if(addresses, is_loopback);
  if (addresses.empty()) return contact.addresses;
  const std::vector<std::string> own = own_addresses();
  const auto is_own = [&](const std::string& a) { return std::find(own.begin(), own.end(), a) != own.end(); };
  const auto rest = std::stable_partition(addresses.begin(), addresses.end(),
                                          [&](const std::string& a) { return !is_own(a); });
  std::stable_partition(addresses.begin(), rest, in_own_network);
  return addresses;
}

}  // namespace gradwire
